// Data exactly as the model will see them: what `tonnage inspect` says, with masks in colour.

import { get, post, query } from "./api.js";
import { empty, failed, field, h, linesOf, svg, wide } from "./dom.js";
import { count } from "./format.js";
import { commandAtWork } from "./parts.js";

const SHOWN = 50;
const kept = { config: "", rows: "100", more: "", result: null, pending: null };

export async function showData(place, words) {
  const [{ configs }, { runs }] = await Promise.all([get("/api/choices"), get("/api/runs")]);
  if (words.get("run")) kept.config = words.get("run");
  const config = h("select", {}, h("optgroup", { label: "Runs" }, runs.map((row) => h("option", { value: row.run }, row.run))), configs.length ? h("optgroup", { label: "Configs" }, configs.map((name) => h("option", { value: name }, name))) : null);
  if ([...config.options].some((option) => option.value === kept.config)) config.value = kept.config;
  const rows = h("input", { type: "number", min: 1, max: 1000, value: kept.rows, class: "few" });
  const more = h("textarea", { rows: 1, placeholder: "data.max_length=512", spellcheck: "false" });
  more.value = kept.more;
  const work = h("div", {}), shown = h("div", {});
  let closing = () => {}, ended = false;
  const form = h("form", { class: "across", onsubmit: (event) => { event.preventDefault(); ask(); } }, field("Data of", config), field("Rows to show", rows), field("Changed keys", more), h("button", { type: "submit", class: "main" }, "Show"));
  place.append(h("h1", {}, "Data"), config.options.length ? h("section", { class: "form" }, form) : empty("No run and no config lies below this folder.", h("p", {}, "tonnage init writes a config.")), work, shown);

  async function ask() {
    Object.assign(kept, { config: config.value, rows: rows.value, more: more.value });
    closing();
    try {
      kept.pending = await post("/api/inspect", { config: config.value, words: linesOf(more), rows: Number(rows.value), in_place_of: kept.pending ? kept.pending.command : "" });
      watch();
    } catch (error) { work.replaceChildren(failed(error.message)); }
  }

  // Show how the command goes, also when the view is opened again.
  function watch() {
    const mine = kept.pending;
    const atWork = commandAtWork(mine, async (now) => {
      if (ended || mine !== kept.pending) return;
      kept.pending = null;
      try { kept.result = await get(query("/api/inspected", { command: now.command })); }
      catch { kept.result = null; }
      if (now.status === 0) work.replaceChildren();
      draw();
    });
    closing = atWork.close;
    work.replaceChildren(h("section", { class: "command-box" }, atWork.box));
  }

  function draw() {
    const data = kept.result;
    if (!data) {
      if (config.options.length && !work.firstChild) shown.replaceChildren(empty("Nothing is shown yet.", h("p", {}, "Choose a run or a config, and see its rows token by token, with what is trained on in colour.")));
      else shown.replaceChildren();
      return;
    }
    shown.replaceChildren(
      data.problems.map((problem) => failed(problem)),
      h("section", {}, h("h2", {}, "Lengths in tokens"), histogram(data)),
      h("section", {}, h("h2", {}, "What became of every row and token"), wide("Account", h("table", { class: "figures" }, h("thead", {}, h("tr", {}, h("td", {}), data.sources.map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, data.lines.map((line) => h("tr", { class: line.stands_out ? "loss" : "" }, h("th", { scope: "row", class: line.name.startsWith(" ") ? "under" : "" }, line.name.trim()), line.cells.map((cell) => h("td", {}, cell))))))), data.remarks.map((remark) => h("p", { class: "remark" }, remark))),
      rowsSection(data));
  }

  draw();
  if (kept.pending) watch();
  return () => { ended = true; closing(); };
}

function histogram(data) {
  if (!data.lengths.length) return h("p", { class: "remark" }, "There are no documents.");
  const groups = grouped(data.lengths), most = Math.max(...groups.map(([, , number]) => number));
  const bar = (number, isLong) => {
    const drawn = svg("svg", { class: "hist", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
    drawn.append(svg("rect", { class: isLong ? "long" : "", width: Math.max(0.4, (100 * number) / most).toFixed(2), height: 10 }));
    return drawn;
  };
  return [h("table", { class: "instants" }, h("tbody", {}, groups.map(([low, high, number]) => h("tr", {}, h("th", { scope: "row" }, low === high ? count(low) : `${count(low)} – ${count(high)}`), h("td", { class: "right" }, count(number)), h("td", {}, bar(number, data.max_length && low > data.max_length)))))),
    data.max_length ? h("p", { class: "remark" }, `A pack has ${count(data.max_length)} tokens; longer documents are in another colour, and the account says what became of them.`) : null];
}

// At most about twenty groups of bins that are next to each other.
function grouped(lengths) {
  const edges = lengths.map(([edge]) => edge), size = Math.ceil(lengths.length / 20), groups = [];
  const end = (edge) => (edge < 8 ? edge : edge + 2 ** Math.floor(Math.log2(edge)) / 8 - 1);
  for (let at = 0; at < lengths.length; at += size) {
    const part = lengths.slice(at, at + size);
    groups.push([edges[at], end(part[part.length - 1][0]), part.reduce((sum, [, number]) => sum + number, 0)]);
  }
  return groups;
}

function rowsSection(data) {
  const readable = reader(data.documents), texts = data.documents.map((document) => readable(document.tokens).map(([text]) => text).join("").toLowerCase());
  const search = h("input", { type: "search", placeholder: "Search these rows", "aria-label": "Search these rows", oninput: draw });
  const number = h("span", { class: "remark", role: "status" }), body = h("div", {});
  let most = SHOWN;
  function draw() {
    const word = search.value.toLowerCase();
    const fitting = data.documents.filter((_, at) => texts[at].includes(word));
    number.textContent = word ? `${count(fitting.length)} of ${count(data.documents.length)} rows` : `${count(data.documents.length)} rows, as they are trained first`;
    body.replaceChildren(...fitting.slice(0, most).map(rowOf), fitting.length > most ? h("button", { type: "button", onclick: () => { most += SHOWN; draw(); } }, "Show more") : "");
  }
  function rowOf(document) {
    const supervised = document.tokens.filter((token) => token.weight > 0).length;
    const made = h("div", { class: "text" }, readable(document.tokens).map(([text, kind]) => h("span", { class: kind }, text)));
    const label = document.desirable === undefined ? "" : document.desirable ? ", a good answer" : ", a bad answer";
    return h("div", { class: "row" }, h("div", { class: "where" }, `${document.file}:${document.row} · ${count(document.tokens.length)} tokens, ${count(supervised)} supervised, pack ${count(document.pack)}${label}`), made);
  }
  draw();
  return h("section", {}, h("h2", {}, "Rows"), h("div", { class: "tools" }, search, h("span", { class: "text inline" }, h("span", { class: "counts" }, "supervised"), " ", h("span", { class: "context" }, "context"), " ", h("span", { class: "context special" }, "special token")), number), body);
}

// Tokens as pieces of text that have one weight. Tokens of byte-level vocabularies stand for bytes, which are put together.
function reader(documents) {
  const isBytes = documents.some((document) => document.tokens.some((token) => /[ĠĊ]/.test(token.text)));
  const table = new Map();
  for (let byte = 0, next = 0; byte < 256; byte++) {
    const isShown = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    table.set(String.fromCodePoint(isShown ? byte : 256 + next++), byte);
  }
  const decoder = new TextDecoder();
  const decode = (texts) => {
    if (!isBytes) return texts.join("").replaceAll("▁", " ");
    const letters = [...texts.join("")];
    if (letters.some((letter) => !table.has(letter))) return texts.join("");
    return decoder.decode(Uint8Array.from(letters.map((letter) => table.get(letter))));
  };
  return (tokens) => {
    const pieces = [];
    for (const token of tokens) {
      const kind = `${token.weight === 1 ? "counts" : token.weight > 0 ? "partly" : "context"}${token.special ? " special" : ""}`;
      const last = pieces[pieces.length - 1];
      if (last && last[1] === kind && !token.special) last[0].push(token.text);
      else pieces.push([[token.text], kind]);
    }
    return pieces.map(([texts, kind]) => [kind.includes("special") ? texts[0] : decode(texts), kind]);
  };
}
