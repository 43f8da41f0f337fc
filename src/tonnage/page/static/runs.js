// The list of all runs, live.

import { listen, query } from "./api.js";
import { empty, h, wide } from "./dom.js";
import { ago, bytes, clock, count, figure } from "./format.js";
import { progress, sparkline, state, STATES } from "./parts.js";

const order = (row) => STATES.indexOf(row.state);
const COLUMNS = [
  { key: "run", title: "Run", of: (row) => row.run, text: true },
  { key: "state", title: "State", of: order, text: true },
  { key: "progress", title: "Steps", of: (row) => (row.num_steps ? row.step / row.num_steps : 0) },
  { key: "loss", title: "Loss", of: (row) => row.loss },
  { key: "evaluation", title: "Evaluation", of: (row) => row.evaluation },
  { key: "speed", title: "Tokens/s", of: (row) => row.tokens_per_second },
  { key: "memory", title: "Memory", of: (row) => row.memory_bytes },
  { key: "left", title: "Time left", of: (row) => row.remaining_seconds },
  { key: "changed", title: "Changed", of: (row) => row.changed },
];
const kept = { sort: "changed", up: false, search: "", states: new Set(), chosen: new Set() };

export async function showRuns(place, _, onLost) {
  let rows = null;
  const search = h("input", { type: "search", placeholder: "Filter by name, model, tag or note", "aria-label": "Filter runs", value: kept.search, oninput: () => { kept.search = search.value; draw(); } });
  const chips = h("div", { class: "chips", role: "group", "aria-label": "States" });
  const compare = h("a", { class: "button", href: "#/compare" }, "Compare");
  const body = h("div", { class: "listed" }, h("p", { class: "remark" }, "reading"));
  place.append(h("h1", {}, "Runs"), h("div", { class: "tools" }, search, chips, compare), body);

  function shown() {
    const words = kept.search.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => [row.run, row.model, row.trains, row.note, row.message, row.state, ...row.tags.map((tag) => `#${tag}`)].join(" ").toLowerCase();
    const fitting = rows.filter((row) => (!kept.states.size || kept.states.has(row.state)) && words.every((word) => text(row).includes(word)));
    const of = COLUMNS.find((column) => column.key === kept.sort).of;
    const compared = (a, b) => {
      const [x, y] = [of(a), of(b)];
      if (x === y) return a.run < b.run ? -1 : 1;
      if (x === null || y === null) return x === null ? 1 : -1;
      return (x < y ? -1 : 1) * (kept.up ? 1 : -1);
    };
    return fitting.sort(compared);
  }

  function drawChips() {
    const buttons = STATES.filter((name) => rows.some((row) => row.state === name)).map((name) =>
      h("button", {
        type: "button", class: "chip", "aria-pressed": String(kept.states.has(name)),
        onclick: () => { if (!kept.states.delete(name)) kept.states.add(name); draw(); },
      }, name, h("span", { class: "number" }, count(rows.filter((row) => row.state === name).length))));
    const at = [...chips.children].indexOf(document.activeElement);
    chips.replaceChildren(...buttons);
    if (at >= 0 && chips.children[at]) chips.children[at].focus();
  }

  function heading(column) {
    const isSorted = kept.sort === column.key;
    const turn = () => { kept.up = isSorted ? !kept.up : Boolean(column.text); kept.sort = column.key; draw(); };
    return h("th", { scope: "col", class: column.text ? "" : "right", "aria-sort": isSorted ? (kept.up ? "ascending" : "descending") : null },
      h("button", { type: "button", class: "plain", "data-column": column.key, onclick: turn }, column.title, h("span", { class: "arrow", "aria-hidden": "true" }, isSorted ? (kept.up ? "↑" : "↓") : "")));
  }

  function line(row) {
    const choose = h("input", { type: "checkbox", "aria-label": `Compare ${row.run}`, checked: kept.chosen.has(row.run), onchange: () => { if (!kept.chosen.delete(row.run)) kept.chosen.add(row.run); drawCompare(); } });
    const cell = (title, ...content) => h("td", { class: "right", "data-title": title }, content);
    return h("tr", { class: row.state },
      h("td", { class: "choose" }, choose),
      h("th", { scope: "row" }, h("a", { href: query("#/run", { run: row.run }) }, row.run === "." ? "this folder" : row.run),
        h("span", { class: "under" }, [row.model, row.trains].filter(Boolean).join(" · ")),
        row.tags.length || row.note ? h("span", { class: "tags" }, row.tags.map((tag) => h("span", { class: "tag" }, tag)), row.note ? h("span", { class: "under note" }, row.note.split("\n")[0]) : null) : null),
      h("td", { "data-title": "State" }, state(row), row.message ? h("span", { class: "under why" }, row.message.split("\n")[0].slice(0, 160)) : null),
      cell("Steps", progress(row)),
      cell("Loss", row.loss === null ? "" : h("span", { class: "loss-cell" }, sparkline(row.spark), h("span", { class: "value" }, figure(row.loss)))),
      cell("Evaluation", figure(row.evaluation)), cell("Tokens/s", count(row.tokens_per_second)), cell("Memory", bytes(row.memory_bytes)),
      cell("Time left", clock(row.remaining_seconds)), cell("Changed", ago(row.changed)));
  }

  function drawCompare() {
    const here = new Set((rows || []).map((row) => row.run));
    for (const name of kept.chosen) if (!here.has(name)) kept.chosen.delete(name);
    compare.hidden = kept.chosen.size < 2;
    compare.textContent = `Compare ${kept.chosen.size} runs`;
    compare.href = query("#/compare", { run: [...kept.chosen] });
  }

  function draw() {
    if (!rows) return;
    drawChips();
    drawCompare();
    if (!rows.length) {
      body.replaceChildren(empty("No run lies below this folder yet.", h("p", {}, "Runs appear here by themselves, whoever starts them. To start one: ", h("a", { href: "#/plan" }, "plan it here"), ", or ", h("code", {}, "tonnage train CONFIG"), ".")));
      return;
    }
    const list = shown();
    if (!list.length) { body.replaceChildren(empty("No run fits.", h("p", {}, "Clear the filter to see all of them."))); return; }
    const focused = document.activeElement, column = focused && focused.dataset ? focused.dataset.column : null;
    const link = focused && body.contains(focused) ? focused.getAttribute("href") || focused.getAttribute("aria-label") : null;
    const table = h("table", { class: "runs" }, h("thead", {}, h("tr", {}, h("th", { scope: "col", class: "choose" }, h("span", { class: "unseen" }, "Compare")), COLUMNS.map(heading))), h("tbody", {}, list.map(line)));
    body.replaceChildren(wide("Runs", table));
    const again = column ? body.querySelector(`[data-column="${column}"]`) : link ? [...body.querySelectorAll("a, input")].find((one) => one.getAttribute("href") === link || one.getAttribute("aria-label") === link) : null;
    if (again) again.focus();
  }

  drawCompare();
  const known = new Map();
  return listen("/api/runs/live", (news) => {
    for (const row of news.rows) known.set(row.run, row);
    for (const name of known.keys()) if (!news.names.includes(name)) known.delete(name);
    rows = [...known.values()];
    draw();
  }, onLost);
}
