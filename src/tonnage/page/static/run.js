// One run: what the report says of it, live; its log, workers, checkpoints; and what can be done with it.

import { get, getText, listen, post, query } from "./api.js";
import { escaped, failed, h, wide } from "./dom.js";
import { ago, bytes, clock, count, figure } from "./format.js";
import { commandAtWork, curvesSection, goOn, progress, state } from "./parts.js";

const SECTIONS_SECONDS = 20;

export async function showRun(place, words, onLost) {
  const run = words.get("run") || "";
  const name = run === "." ? "this folder" : run;
  document.title = `${name} · tonnage`;
  const head = h("div", { class: "head" }, h("h1", {}, name), h("span", { class: "pill" }));
  const message = h("p", { class: "message", role: "status" }), under = h("p", { class: "lead" });
  const buttons = h("div", { class: "buttons" }), work = h("div", {});
  const tiles = h("section", { class: "tiles", "aria-label": "Now" });
  const curves = curvesSection(), workers = h("section", { hidden: true }), saved = h("section", { hidden: true });
  const log = logSection(run), tags = tagsSection(run), report = h("div", { class: "report" }, h("p", { class: "remark" }, "reading"));
  place.append(head, under, message, buttons, work, tags.section, tiles, curves, saved, workers, log.section, report);

  let data = null, board = null, drawnState = "", sectionsAt = 0, fetched = 0, closing = () => {}, appended = 0, ended = false;
  const ending = new AbortController();

  function drawHead(row) {
    head.lastChild.replaceChildren(state(row));
    under.textContent = [row.model, row.trains, row.workers > 1 ? `${row.workers} workers` : ""].filter(Boolean).join(" · ");
    message.textContent = row.message;
    message.hidden = !row.message;
    message.className = `message ${row.state}`;
    const isWorking = row.state === "training", isAsked = row.doing.startsWith("stopping");
    const key = `${row.state} ${isAsked}`;
    if (key === drawnState) return;
    drawnState = key;
    const shown = [];
    if (isWorking) shown.push(action("Stop", "/api/run/stop", isAsked, "danger"));
    if (["stopped", "failed"].includes(row.state)) shown.push(action("Resume", "/api/run/resume", false, "main"));
    if (["done", "stopped"].includes(row.state)) shown.push(h("a", { class: "button", href: query("#/chat", { run }) }, "Chat"));
    shown.push(h("a", { class: "button", href: query("#/compare", { run }) }, "Compare with…"));
    buttons.replaceChildren(...shown);
  }

  function action(label, path, disabled, kind) {
    const button = h("button", { type: "button", class: `button ${kind}`, disabled, onclick: async () => {
      button.disabled = true;
      closing();
      try {
        const atWork = commandAtWork(await post(path, { run }));
        closing = atWork.close;
        work.replaceChildren(h("section", { class: "command-box", "aria-label": label }, atWork.box));
      } catch (error) {
        work.replaceChildren(failed(error.message));
        button.disabled = false;
      }
    } }, label);
    return button;
  }

  function drawTiles(row) {
    const figures = [
      ["steps", progress(row)], ["loss", figure(row.loss)], ["evaluation", figure(row.evaluation)], ["tokens/s", count(row.tokens_per_second)],
      ["memory", bytes(row.memory_bytes)], row.state === "training" ? ["time left", clock(row.remaining_seconds)] : ["changed", ago(row.changed)],
    ];
    tiles.replaceChildren(...figures.map(([title, value]) => h("div", { class: "tile" }, h("span", { class: "name" }, title), h("span", { class: "figure" }, value || "–"))));
  }

  function drawWorkers() {
    if (!data) return;
    workers.hidden = !["training", "failed"].includes(data.row.state) || !data.workers.some((line) => line.seconds);
    if (workers.hidden) return;
    const past = (time) => (time ? clock(data.time - time + (performance.now() - data.heard) / 1000) : "");
    const doing = (line) => (line.step ? `${line.phase}, step ${count(line.step)}` : line.phase) + (line.micro_batch ? `, micro-batch ${line.micro_batch} of ${line.num_micro_batches}` : "");
    const table = h("table", { class: "figures" }, h("thead", {}, h("tr", {}, ["worker", "where it is", "for", "last sign"].map((title, at) => h("th", { scope: "col", class: at === 1 ? "words" : "" }, title)))),
      h("tbody", {}, data.workers.map((line, rank) => h("tr", {}, h("th", { scope: "row" }, String(rank)), h("td", { class: "words place" }, line.seconds ? doing(line) : "not begun"), h("td", {}, past(line.seconds)), h("td", {}, line.alive ? `${past(line.alive)} ago` : "")))));
    workers.replaceChildren(h("h2", {}, "Workers"), wide("Workers", table));
  }

  async function drawSaved() {
    const list = (await get(query("/api/run/saved", { run }), ending.signal)).saved;
    saved.hidden = !list.length;
    const results = h("div", {});
    const check = (path, label) => h("button", { type: "button", class: "small", "aria-label": label, onclick: async () => {
      try { results.replaceChildren(commandAtWork(await post("/api/verify", { path })).box); }
      catch (error) { results.replaceChildren(failed(error.message)); }
    } }, "Verify");
    const table = h("table", { class: "figures" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "what"), h("th", { scope: "col" }, "size"), h("th", { scope: "col" }, "files"), h("th", { scope: "col" }, "written"), h("th", { scope: "col" }, h("span", { class: "unseen" }, "Verify")))),
      h("tbody", {}, list.map((line) => h("tr", {}, h("th", { scope: "row" }, line.kind, h("code", { class: "under" }, line.path)), h("td", {}, line.size), h("td", {}, count(line.files)), h("td", {}, ago(line.changed)), h("td", {}, check(line.path, `Verify the ${line.kind}`))))));
    saved.replaceChildren(h("h2", {}, "Checkpoints and exports"), wide("Checkpoints and exports", table), results);
  }

  async function drawReport() {
    if (fetched || ended) return;
    fetched = 1;
    sectionsAt = Date.now();
    try {
      const open = new Map([...report.querySelectorAll("details")].map((one) => [one.querySelector("summary").textContent, one.open]));
      const made = escaped(await getText(query("/api/run/sections", { run }), ending.signal));
      for (const one of made.querySelectorAll("details")) one.open = Boolean(open.get(one.querySelector("summary").textContent));
      for (const wide of made.querySelectorAll(".wide")) wide.tabIndex = 0;
      report.replaceChildren(...made.childNodes);
    } catch (error) {
      if (!ending.signal.aborted) report.replaceChildren(h("p", { class: "message" }, error.message));
    }
    fetched = 0;
  }

  function again() { stop(); stop = listen(query("/api/run/live", { run }), onNews, onLost); }

  function onNews(news) {
    if (ended) return;
    const before = data, row = news.row;
    if (news.curves && news.since === undefined) { data = news; appended = 0; }
    else if (!data || news.version !== data.version || news.since > data.steps || (news.steps > data.steps && !news.curves) || appended > 600) { again(); return; }
    else {
      if (news.curves) { appended += news.steps - data.steps; goOn(data.curves, news.curves); }
      Object.assign(data, { row, workers: news.workers, time: news.time, steps: Math.max(data.steps, news.steps) });
    }
    data.heard = performance.now();
    drawHead(row);
    drawTiles(row);
    drawWorkers();
    if (news.curves) { if (board) board.update([{ name, ...data.curves }]); else board = new Curves.Board(curves, [{ name, ...data.curves }]); }
    log.look();
    const hasEnded = before && before.state !== undefined && before.state !== row.state;
    if (!before || hasEnded || (row.state === "training" && Date.now() - sectionsAt > SECTIONS_SECONDS * 1000)) { drawReport(); drawSaved().catch(() => {}); }
    data.state = row.state;
    tags.show(row);
  }

  let stop = listen(query("/api/run/live", { run }), onNews, (lost) => {
    if (lost && !data) { place.replaceChildren(h("h1", {}, name), failed(lost)); onLost(""); }
    else onLost(lost);
  });
  const ticking = setInterval(drawWorkers, 2000);
  return () => { ended = true; stop(); clearInterval(ticking); ending.abort(); closing(); if (board) board.close(); };
}

function logSection(run) {
  const text = h("pre", { class: "output log", tabindex: "0", role: "region", "aria-label": "Log" });
  const which = h("select", { "aria-label": "Which log", onchange: () => look(true) }, h("option", { value: "log" }, "what happened"), h("option", { value: "0" }, "output of worker 0"));
  const details = h("details", { ontoggle: () => look(true) }, h("summary", {}, h("h2", {}, "Log")), h("p", { class: "controls" }, which), text);
  const section = h("section", {}, details);
  let at = 0;
  async function look(now = false) {
    if (!details.open || (!now && Date.now() - at < 2000)) return;
    at = Date.now();
    const path = which.value === "log" ? query("/api/run/log", { run }) : query("/api/run/output", { run, rank: which.value });
    try {
      const atEnd = now || text.scrollTop + text.clientHeight >= text.scrollHeight - 4;
      text.textContent = (await get(path)).text || "Nothing was written yet.";
      if (atEnd) text.scrollTop = text.scrollHeight;
    } catch (error) { text.textContent = error.message; }
  }
  return { section, look };
}

function tagsSection(run) {
  const tags = h("input", { type: "text", class: "tags-input", placeholder: "tags, with commas", "aria-label": "Tags" });
  const note = h("textarea", { rows: 1, placeholder: "A note on this run", "aria-label": "Note" });
  const status = h("span", { class: "remark", role: "status" });
  const section = h("div", { class: "tagged" }, tags, note, status);
  let shown = "";
  const tagList = () => tags.value.split(",").map((tag) => tag.trim()).filter(Boolean);
  async function save() {
    if (JSON.stringify([tagList(), note.value]) === shown) return;
    try {
      const written = await post("/api/run/tags", { run, tags: tagList(), note: note.value });
      shown = JSON.stringify([written.tags, written.note]);
      status.textContent = "kept in tags.json of the run";
    } catch (error) { status.textContent = error.message; }
    setTimeout(() => { status.textContent = ""; }, 4000);
  }
  const fit = () => { note.rows = Math.min(12, note.value.split("\n").length); };
  for (const control of [tags, note]) control.addEventListener("change", save);
  note.addEventListener("input", fit);
  tags.addEventListener("keydown", (event) => { if (event.key === "Enter") save(); });
  function show(row) {
    const next = JSON.stringify([row.tags, row.note]);
    if (next === shown || [tags, note].includes(document.activeElement)) return;
    shown = next;
    tags.value = row.tags.join(", ");
    note.value = row.note;
    fit();
  }
  return { section, show };
}
