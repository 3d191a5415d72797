"use strict";
const opened = []; // on paper nothing can be opened
addEventListener("beforeprint", () => {
  for (const part of document.querySelectorAll("details:not([open])")) opened.push(part), (part.open = true);
});
addEventListener("afterprint", () => {
  for (const part of opened.splice(0)) part.open = false;
});
for (const head of document.querySelectorAll("th[aria-sort]")) {
  head.querySelector("button").addEventListener("click", () => {
    const body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.children) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[head.cellIndex].dataset.value ?? row.cells[head.cellIndex].textContent;
    const compare = (a, b) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      const order = a - b || (isNaN(a - b) ? a.localeCompare(b, "en", { numeric: true }) : 0);
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
  });
}
