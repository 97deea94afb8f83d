// Mechanisms by words of their names and by family: rows of tables, pictures and curves of the others are hidden.
const bar = document.querySelector(".filter");
const search = bar.querySelector("input[type=search]");
const boxes = [...bar.querySelectorAll("input[type=checkbox]")];
const showAll = bar.querySelector("button");
const names = Object.keys(comparison.families);

function applyFilter() {
  const words = search.value.toLowerCase().split(/[\s,]+/).filter(Boolean);
  const families = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
  const named = (name) => !words.length || words.some((word) => name.toLowerCase().includes(word));
  const shown = new Set(names.filter((name) => families.has(comparison.families[name]) && named(name)));
  const all = shown.size === names.length;
  document.querySelectorAll("[data-position]").forEach((element) => {
    element.hidden = !shown.has(element.dataset.position);
  });
  showAll.disabled = !words.length && boxes.every((box) => box.checked);
  document.getElementById("filter-status").textContent = all
    ? `All ${names.length} mechanisms are shown.`
    : `${shown.size} of ${names.length} mechanisms are shown, here and in all tables, curves and pictures below.`;
  document.dispatchEvent(new CustomEvent("filter", { detail: all ? null : shown }));
}

search.addEventListener("input", applyFilter);
boxes.forEach((box) => box.addEventListener("change", applyFilter));
showAll.addEventListener("click", () => {
  search.value = "";
  boxes.forEach((box) => { box.checked = true; });
  applyFilter();
  search.focus();
});
bar.hidden = false;
applyFilter();
