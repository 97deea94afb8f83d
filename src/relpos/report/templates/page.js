// Sort a table by a click on a heading: figures highest first, names from A; a second click reverses the order. Missing
// figures stay at the end, and a mechanism's other rules stay below its best.
document.documentElement.className = "scripted";
document.querySelectorAll("table.sortable").forEach((table) => {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = heading.querySelector("button");
    const numeric = heading.dataset.kind === "number";
    button.addEventListener("click", () => {
      const sorted = heading.getAttribute("aria-sort");
      const descending = sorted ? sorted !== "descending" : numeric;
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const groups = [];
      for (const row of table.tBodies[0].rows) row.className === "other" ? groups.at(-1).push(row) : groups.push([row]);
      const value = (group) => group[0].cells[column].dataset.sort;
      groups.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = numeric ? Number(x) - Number(y) : x.localeCompare(y);
        return descending ? -order : order;
      });
      table.tBodies[0].append(...groups.flat());
      const way = numeric ? (descending ? "highest first" : "lowest first") : descending ? "from Z" : "from A";
      document.getElementById("sort-status").textContent = `Sorted by ${button.textContent}, ${way}.`;
    });
  });
});
// A button that copies a box of code; if copying is not allowed, it selects the text instead.
document.querySelectorAll("pre.copyable").forEach((box) => {
  const button = document.createElement("button");
  Object.assign(button, { type: "button", className: "copy", textContent: "Copy" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(box.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(box);
      button.textContent = "Selected: copy it with the keyboard";
    }
  });
  box.after(button);
});
