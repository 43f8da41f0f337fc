// Which view is shown: the part of the address behind "#". A view is a function of the place and of what the address
// says besides; it returns a function that ends it.

import { takeToken, Refused } from "./api.js";
import { empty, h } from "./dom.js";
import { showChat } from "./chat.js";
import { showCompare } from "./compare.js";
import { showData } from "./data.js";
import { showPlan } from "./plan.js";
import { showRun } from "./run.js";
import { showRuns } from "./runs.js";

const VIEWS = { runs: showRuns, run: showRun, compare: showCompare, plan: showPlan, data: showData, chat: showChat };
const TITLES = { runs: "Runs", run: "Run", compare: "Compare", plan: "Plan", data: "Data", chat: "Chat" };
const main = document.getElementById("main");
let end = null, number = 0;

export function onLost(message) {
  const line = document.getElementById("lost");
  line.textContent = message;
  line.hidden = !message;
}

async function show() {
  const [name, words = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const view = Object.hasOwn(VIEWS, name) ? name : "runs";
  const mine = ++number;
  if (end) end();
  end = null;
  onLost("");
  document.title = `${TITLES[view]} · tonnage`;
  for (const link of document.querySelectorAll("#nav a")) {
    const isHere = link.getAttribute("href") === `#/${view === "run" ? "runs" : view}`;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const place = h("div", { class: `view ${view}` });
  main.replaceChildren(place);
  try {
    const ending = await VIEWS[view](place, new URLSearchParams(words), onLost);
    if (mine === number) end = ending || null;
    else if (ending) ending();
  } catch (error) {
    if (mine !== number) return;
    const isRefused = error instanceof Refused;
    place.replaceChildren(h("h1", {}, TITLES[view]), empty(isRefused ? error.message : "The server does not answer."));
    if (!isRefused && !(error instanceof TypeError)) throw error;
  }
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("tonnage-theme", root.dataset.theme);
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
addEventListener("keydown", (event) => {
  const search = main.querySelector("input[type=search]");
  if (event.key !== "/" || !search || event.target.closest("input, textarea, select")) return;
  event.preventDefault();
  search.focus();
});
takeToken();
addEventListener("hashchange", () => { takeToken(); show(); });
show();
