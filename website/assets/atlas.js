"use strict";
// The index of the atlas: sorts by a column, filters by kind, axes and words.
const table = document.getElementById("atlas");
if (table) {
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const by = (id) => document.getElementById(id);
  const number = (text) => { const x = parseFloat(text.replace(/,/g, "")); return Number.isNaN(x) ? null : x; };
  const compare = (column, sign) => (a, b) => {
    const [x, y] = [a.cells[column].textContent, b.cells[column].textContent];
    if (!x || !y) return !x - !y; // empty cells last
    const [p, q] = [number(x), number(y)];
    return sign * (p !== null && q !== null ? p - q : x.localeCompare(y));
  };
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    heads.forEach((one) => one.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    body.append(...rows.sort(compare(column, sign)));
  }));
  const filter = () => rows.forEach((row) => {
    const kind = by("atlas-kind").value, axes = by("atlas-axes").value, rule = by("atlas-rules").value, words = by("atlas-search").value.toLowerCase();
    row.hidden = !((!kind || row.dataset.kind === kind) && (!axes || row.dataset.axes.split(" ").includes(axes))
      && (!rule || row.dataset.rules.split("|").includes(rule))
      && row.textContent.toLowerCase().includes(words));
  });
  document.querySelector("form.filters").addEventListener("input", filter);
  document.querySelector("form.filters").addEventListener("submit", (event) => event.preventDefault());
  // Columns beyond the edge are told, and shaded.
  const box = table.parentElement, cue = document.querySelector(".atlas-cue");
  const told = () => {
    cue.hidden = box.scrollWidth <= box.clientWidth + 1;
    box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  };
  box.addEventListener("scroll", told);
  new ResizeObserver(told).observe(box);
}
// The explorer is light or dark as this page is.
if (document.querySelector(".explorer")) {
  const tell = () => window.postMessage({ dark: document.body.dataset.mdColorScheme === "slate" }, "*");
  new MutationObserver(tell).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
  addEventListener("load", tell);
}
