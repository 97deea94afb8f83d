// Tables sorted by a press on a heading: figures highest first, names from A on; then the other way round. What was not
// measured stays at the end.
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
      const value = (row) => row.cells[column].dataset.sort;
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = numeric ? Number(x) - Number(y) : x.localeCompare(y);
        return descending ? -order : order;
      });
      table.tBodies[0].append(...rows);
      const way = numeric ? (descending ? "highest first" : "lowest first") : descending ? "from Z" : "from A";
      document.getElementById("sort-status").textContent = `Sorted by ${button.textContent}, ${way}.`;
    });
  });
});
