"use strict";
const table = document.getElementById("sortable"), body = table.tBodies[0];
const heads = [...table.tHead.rows[0].cells];
heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
  const up = head.getAttribute("aria-sort") !== "ascending";
  heads.forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = row => row.cells[column].dataset.value;
  const compare = (a, b) => {
    if (a === "" || b === "") return (a === "") - (b === "") || 0;
    const difference = Number(a) - Number(b);
    return (up ? 1 : -1) * (Number.isNaN(difference) ? a.localeCompare(b) : difference);
  };
  body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
}));
const filter = document.getElementById("filter"), matching = document.getElementById("matching");
const rows = [...body.rows].map(row => [row, document.getElementById(row.querySelector("a").hash.slice(1))]);
filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const [row, cell] of rows) {
    const values = [...row.cells].map(part => part.textContent.toLowerCase());
    const fits = words.every(word => values.some(value => value.includes(word)));
    row.hidden = cell.hidden = !fits;
    count += fits;
  }
  matching.textContent = words.length ? `${count} of ${rows.length}` : "";
});
function open() {
  const cell = location.hash && document.getElementById(location.hash.slice(1));
  if (cell && cell.tagName === "DETAILS") { cell.open = true; cell.scrollIntoView(); }
}
addEventListener("hashchange", open);
open();
