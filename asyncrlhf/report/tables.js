"use strict";
// A table wider than the page becomes a card a row.
function fitTables() {
  for (const box of document.querySelectorAll(".table")) {
    box.classList.remove("cards");
    box.classList.toggle("cards", box.scrollWidth > box.clientWidth + 1);
  }
}
addEventListener("resize", fitTables);
fitTables();
