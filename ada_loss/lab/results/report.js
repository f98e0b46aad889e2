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
const find = id => document.getElementById(id);
const filter = find("filter"), matching = find("matching");
const data = JSON.parse(find("data").textContent), lower = JSON.parse(find("data").dataset.lower);
const title = curve => lower.includes(curve) ? `${curve}, lower is better` : curve;
const rows = [...body.rows].map(row => [row, find(`cell-${row.dataset.cells}`)]);
const drawn = [...document.querySelectorAll("main [data-cells]")].filter(part => part.closest("table") !== table);
const panels = [...document.querySelectorAll(".panel")];
filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const left = new Set();
  for (const [row, cell] of rows) {
    const values = [...row.cells].map(part => part.textContent.toLowerCase());
    const fits = words.every(word => values.some(value => value.includes(word)));
    row.hidden = cell.hidden = !fits;
    if (fits) left.add(row.dataset.cells);
  }
  for (const part of drawn) {
    const cells = part.dataset.cells.split(" ").filter(Boolean);
    part.toggleAttribute("hidden", words.length > 0 && cells.length > 0 && !cells.some(cell => left.has(cell)));
  }
  for (const panel of panels) {
    const own = [...panel.querySelectorAll("[data-cells]")].filter(part => part.dataset.cells);
    panel.hidden = own.length > 0 && own.every(part => part.hasAttribute("hidden"));
  }
  matching.textContent = words.length ? `${left.size} of ${rows.length}` : "";
});
const number = value => Number(value.toPrecision(3)).toString();
function plot(place, series) {
  const ys = series.flatMap(([x, y]) => y.filter(value => value !== null));
  const low = Math.min(...ys), high = Math.max(...ys), last = Math.max(...series.map(([x]) => x[x.length - 1]));
  const log = low > 0 && high / low > 8, scale = log ? Math.log : value => value;
  const height = value => 100 * (1 - (scale(value) - scale(low)) / ((scale(high) - scale(low)) || 1));
  const svg = place.querySelector("svg");
  svg.replaceChildren(...series.map(([x, y, colour]) => {
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    let pen = "M";
    path.setAttribute("d", y.map((value, i) => {
      if (value === null) { pen = "M"; return ""; }
      const point = `${pen}${(100 * x[i] / (last || 1)).toFixed(1)} ${height(value).toFixed(1)}`;
      pen = "L";
      return point;
    }).join(" "));
    path.setAttribute("class", colour);
    return path;
  }));
  place.querySelector(".high").textContent = number(high);
  place.querySelector(".low").textContent = number(low);
  place.querySelector(".last").textContent = number(last);
  place.querySelector(".kind").textContent = log ? "logarithmic" : "";
}
const overlay = find("overlay"), choice = find("curve");
const name = () => choice ? choice.value : Object.keys(Object.values(data)[0] || {})[0];
function draw() {
  document.querySelectorAll(".curve").forEach(part => { part.hidden = part.dataset.curve !== name(); });
  const chosen = rows.filter(([row]) => row.querySelector("input:checked") && data[row.dataset.cells][name()]);
  overlay.hidden = !chosen.length;
  if (overlay.hidden) return;
  const colours = chosen.map((_, i) => `c${i % 7}`);
  plot(overlay, chosen.map(([row], i) => [...data[row.dataset.cells][name()], colours[i]]));
  overlay.querySelector("h2").textContent = `Chosen cells: ${title(name())}`;
  overlay.querySelector(".legend").replaceChildren(...chosen.map(([row, cell], i) => {
    const key = document.createElement("span");
    key.className = "key";
    key.append(overlay.querySelector("svg").cloneNode(false), cell.querySelector("summary").firstChild.textContent.trim());
    const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    line.setAttribute("width", 22); line.setAttribute("height", 10);
    line.append(document.createElementNS("http://www.w3.org/2000/svg", "path"));
    line.firstChild.setAttribute("d", "M0 5 L22 5");
    line.firstChild.setAttribute("class", colours[i]);
    key.firstChild.replaceWith(line, " ");
    return key;
  }));
}
if (choice) choice.addEventListener("change", draw);
table.addEventListener("change", draw);
document.querySelectorAll(".curves[data-cell]").forEach(place => {
  const show = () => {
    if (place.childElementCount) return;
    for (const [curve, [x, y]] of Object.entries(data[place.dataset.cell])) {
      const figure = document.createElement("figure");
      figure.append(...[...overlay.querySelectorAll(".plot, .ends")].map(part => part.cloneNode(true)));
      const words = document.createElement("figcaption");
      words.textContent = title(curve);
      figure.prepend(words);
      figure.querySelector("svg").setAttribute("aria-label", curve);
      plot(figure, [[x, y, "own"]]);
      place.append(figure);
    }
  };
  place.closest("details").addEventListener("toggle", show);
});
find("csv").addEventListener("click", () => {
  const quoted = value => /[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value;
  const values = row => [...row.cells].slice(1).map(cell => cell.dataset.value);
  const lines = [["id", ...heads.slice(1).map(head => head.textContent)]];
  for (const [row] of rows) if (!row.hidden) lines.push([row.dataset.cells, ...values(row)]);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lines.map(line => line.map(quoted).join(",")).join("\n") + "\n"], {type: "text/csv"}));
  link.download = "cells.csv";
  link.click();
  URL.revokeObjectURL(link.href);
});
function open() {
  const cell = location.hash && document.getElementById(location.hash.slice(1));
  if (cell && cell.tagName === "DETAILS") { cell.open = true; cell.scrollIntoView(); }
}
addEventListener("hashchange", open);
open();
