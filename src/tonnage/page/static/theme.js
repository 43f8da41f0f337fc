"use strict";
// Before anything is drawn: light or dark as it was chosen, else as the system says.
(() => {
  const root = document.documentElement;
  const chosen = localStorage.getItem("tonnage-theme");
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
})();
