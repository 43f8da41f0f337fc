"use strict";
// Draws the curves of a report from the JSON beside it.
(() => {
  const { runs } = JSON.parse(document.getElementById("data").textContent);
  new Curves.Board(document, runs);
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
})();
