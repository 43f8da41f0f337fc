// What a run would take, before anything is downloaded or started: what `tonnage plan` says, drawn.

import { get, post, query } from "./api.js";
import { commandLine, copy, empty, failed, field, h, linesOf, svg, wide } from "./dom.js";
import { bytes, count, seconds } from "./format.js";
import { commandAtWork } from "./parts.js";

const METHODS = [["", "what fits best"], ["adapter=none", "all weights"], ["adapter.rank=16", "LoRA"], ["adapter.quantize=nf4", "LoRA on 4 bits"]];
const kept = { model: "", rows: "", devices: "", number: "1", method: "", length: "", more: "", words: [], result: null, line: "", asked: null, pending: null };

export async function showPlan(place) {
  const { hardware, models } = await get("/api/choices");
  const model = h("input", { type: "text", value: kept.model, required: true, list: "models", placeholder: "Qwen/Qwen2.5-0.5B", autocomplete: "off", spellcheck: "false" });
  const rows = h("input", { type: "text", value: kept.rows, placeholder: "rows.jsonl (else full packs are supposed)", spellcheck: "false" });
  const device = h("select", {}, h("option", { value: "" }, "this machine"), hardware.map((name) => h("option", { value: name }, name)));
  const number = h("input", { type: "number", min: 1, max: 1024, value: kept.number, "aria-label": "How many devices", class: "few" });
  const method = h("select", {}, METHODS.map(([word, name]) => h("option", { value: word }, name)));
  const length = h("input", { type: "number", min: 8, step: 1, value: kept.length, placeholder: "as the config's default", class: "few wide-few" });
  const more = h("textarea", { rows: 2, placeholder: "optimizer.lr=1e-4", spellcheck: "false" });
  const submit = h("button", { type: "submit", class: "main" }, "Plan");
  device.value = kept.devices;
  method.value = kept.method;
  more.value = kept.more;
  const shownNumber = () => { number.disabled = !device.value; };
  device.addEventListener("change", shownNumber);
  shownNumber();
  const work = h("div", {}), shown = h("div", { class: "planned" });
  let closing = () => {}, ended = false;
  const form = h("form", { class: "asked", onsubmit: (event) => { event.preventDefault(); kept.words = []; ask(); } },
    field("Model", model, "A hub id or a directory; nothing but its config is fetched."), field("Rows", rows), h("datalist", { id: "models" }, models.map((name) => h("option", { value: name }))),
    h("div", { class: "pair" }, field("Hardware", device), field("Devices", number)), h("div", { class: "pair" }, field("Train", method), field("Tokens in a pack", length)),
    field("More keys of the config", more, "KEY=VALUE, a line each"), h("p", { class: "going" }, submit));
  place.append(h("h1", {}, "Plan"), h("div", { class: "two" }, h("section", { class: "form" }, form), h("div", { class: "answer" }, work, shown)));

  function words() {
    const list = [];
    const path = rows.value.trim(); // of which YAML would take "#" and ":" for its own, unless it is written as YAML
    const isPlain = /^[[{"']/.test(path) || !/[#:"'\s]/.test(path);
    if (path) list.push(`data.train=${isPlain ? path : JSON.stringify(path)}`);
    if (length.value) list.push(`data.max_length=${length.value}`);
    if (method.value) list.push(method.value);
    return [...list, ...linesOf(more), ...kept.words];
  }

  function keep() {
    Object.assign(kept, { model: model.value.trim(), rows: rows.value, devices: device.value, number: number.value, method: method.value, length: length.value, more: more.value });
  }

  async function ask() {
    keep();
    closing();
    const asked = { model: kept.model, words: words(), hardware: device.value ? `${number.value || 1}x${device.value}` : "" };
    try {
      kept.pending = { asked, command: await post("/api/plan", { ...asked, in_place_of: kept.pending ? kept.pending.command.command : "" }) };
      watch();
    } catch (error) {
      work.replaceChildren(failed(error.message));
    }
  }

  // Show how the command goes, also when the view is opened again.
  function watch() {
    const mine = kept.pending;
    shown.classList.add("old");
    const atWork = commandAtWork(mine.command, async (now) => {
      if (ended || mine !== kept.pending) return;
      kept.pending = null;
      shown.classList.remove("old");
      if (now.status !== 0) { kept.result = null; shown.replaceChildren(); return; }
      Object.assign(kept, { result: await get(query("/api/planned", { command: now.command })), line: now.line, asked: mine.asked });
      work.replaceChildren();
      draw();
    });
    closing = atWork.close;
    work.replaceChildren(h("section", { class: "command-box" }, atWork.box));
  }

  function choose(choice) { kept.words = choice.words; ask(); }

  function draw() {
    if (!kept.result) {
      if (!work.firstChild) shown.replaceChildren(empty("Nothing is planned yet.", h("p", {}, "Name a model, and see what it takes on this machine or on any other: memory, time, and what else could be done.")));
      return;
    }
    const plan = kept.result, [chosen] = plan.choices;
    shown.replaceChildren(
      h("section", { class: "tiles", "aria-label": "Plan" }, [
        ["memory of a worker", bytes(chosen.peak_bytes)], ["a step", seconds(chosen.step_seconds)],
        ["tokens/s", count(plan.tokens_per_step / chosen.step_seconds)], ["fits", plan.fits ? "yes" : "no"],
      ].map(([name, value]) => h("div", { class: "tile" }, h("span", { class: "name" }, name), h("span", { class: "figure" }, value)))),
      plan.warnings.map((warning) => h("p", { class: "message waiting" }, warning)),
      waysSection(plan, (way) => { method.value = METHODS.some(([word]) => word === way.override) ? way.override : ""; if (method.value !== way.override) more.value = [...more.value.split("\n").filter(Boolean), way.override].join("\n"); kept.words = []; ask(); }),
      h("section", {}, h("h2", {}, "Memory against time"), scatter(plan, choose), choicesTable(plan, choose)),
      h("section", {}, h("h2", {}, "Memory through the run"), instants(plan)),
      h("section", {}, h("h2", {}, "In words"), wide("In words", h("table", {}, plan.facts.map(([name, words]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, words)))))),
      goSection());
  }

  // The same as a command, as a file, and begun here.
  function goSection() {
    const asked = kept.asked, isHere = !asked.hardware, hasRows = asked.words.some((word) => word.startsWith("data.train="));
    const yaml = h("pre", { class: "output", tabindex: "0", role: "region", "aria-label": "YAML" }, "");
    const copyYaml = h("button", { type: "button", class: "small", onclick: () => copy(yaml.textContent, copyYaml) }, "Copy");
    post("/api/config", { model: asked.model, words: asked.words }).then((made) => { yaml.textContent = made.yaml; }).catch((error) => { yaml.textContent = error.message; });
    const name = h("input", { type: "text", value: "first", "aria-label": "Name of the run", spellcheck: "false" });
    const began = h("div", {});
    const start = h("button", { type: "button", class: "main", onclick: async () => {
      try {
        const command = await post("/api/start", { model: asked.model, words: asked.words, name: name.value.trim() });
        began.replaceChildren(commandAtWork(command).box, h("p", {}, h("a", { href: query("#/run", { run: name.value.trim() }) }, "Watch it"), " as soon as its rows are read and its plan is made."));
      } catch (error) { began.replaceChildren(failed(error.message)); }
    } }, "Start it here");
    return h("section", {}, h("h2", {}, "Do it"),
      h("p", { class: "remark" }, "This plan, in a terminal"), commandLine(kept.line.replace(/ --json$/, "")),
      h("p", { class: "remark" }, "As a config, for ", h("code", {}, "tonnage train CONFIG"), " ", copyYaml), yaml,
      isHere && hasRows ? h("div", { class: "begin" }, h("label", {}, "Name ", name), start) : h("p", { class: "remark" }, isHere ? "To start it here, name rows to train on." : "It was planned for other hardware: train it there."), began);
  }

  draw();
  if (kept.pending) watch();
  return () => { ended = true; closing(); keep(); };
}

function waysSection(plan, choose) {
  if (!plan.ways.length) return null;
  const most = Math.max(...plan.ways.map((way) => way.peak_bytes || 0), plan.usable_bytes);
  return h("section", {}, h("h2", {}, "Ways to train it"), h("div", { class: "ways" }, plan.ways.map((way) => h("div", { class: `way ${way.fits ? "" : "no"}` },
    h("h3", {}, way.way),
    way.peak_bytes ? [meter(way.peak_bytes, plan.usable_bytes, most, way.fits),
      h("p", { class: "big" }, bytes(way.peak_bytes), h("span", {}, way.fits ? "" : " does not fit")),
      h("p", { class: "remark" }, `${seconds(way.step_seconds)} a step, ${count(way.tokens_per_second)} tokens/s`), h("p", { class: "remark" }, way.in_words),
      h("button", { type: "button", class: "small", "aria-label": `Plan ${way.way}`, onclick: () => choose(way) }, "Choose")] : h("p", { class: "remark" }, way.why_not)))));
}

function meter(value, budget, most, fits) {
  const drawn = svg("svg", { class: `meter ${fits ? "" : "no"}`, viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" });
  drawn.append(svg("rect", { class: "rail", width: 100, height: 6 }), svg("rect", { class: "held", width: (100 * value / most).toFixed(2), height: 6 }), svg("rect", { class: "limit", x: (100 * budget / most - 0.3).toFixed(2), width: 0.6, height: 6 }));
  return drawn;
}

// Every choice as a point: memory to the right, seconds upwards; what fits is left of the line.
function scatter(plan, choose) {
  const width = 640, height = 240, left = 62, right = 36, top = 16, bottom = 34;
  const drawn = svg("svg", { class: "scatter", viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Ways to run the step: memory against seconds" });
  const xs = plan.choices.map((choice) => choice.peak_bytes), ys = plan.choices.map((choice) => choice.step_seconds);
  const span = (values) => { const [low, high] = [Math.min(...values), Math.max(...values)]; const more = (high - low) * 0.12 || high * 0.1 || 1; return [Math.max(0, low - more), high + more]; };
  const near = plan.usable_bytes < 3 * Math.max(...xs) ? [plan.usable_bytes] : [];
  const [x0, x1] = span([...xs, ...near]), [y0, y1] = span(ys);
  const x = (value) => left + ((value - x0) / (x1 - x0)) * (width - left - right);
  const y = (value) => height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom);
  const text = (words, place) => { const made = svg("text", { class: "tick", ...place }); made.textContent = words; return made; };
  for (let at = 0; at <= 4; at++) {
    const [memory, time] = [x0 + (at / 4) * (x1 - x0), y0 + (at / 4) * (y1 - y0)];
    drawn.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(time), y2: y(time) }), text(seconds(time), { x: left - 8, y: y(time) + 4, "text-anchor": "end" }), text(bytes(memory), { x: x(memory), y: height - 14, "text-anchor": "middle" }));
  }
  if (near.length) drawn.append(svg("line", { class: "budget", x1: x(near[0]), x2: x(near[0]), y1: top, y2: height - bottom }), text("may be used", { x: x(near[0]) - 6, y: top + 10, "text-anchor": "end" }));
  plan.choices.forEach((choice, at) => {
    const words = `${bytes(choice.peak_bytes)}, ${seconds(choice.step_seconds)} a step: ${choice.in_words}${at ? "" : " (chosen)"}${choice.fits ? "" : " (does not fit)"}`;
    const group = svg("g", { class: `choice ${at ? "" : "chosen"} ${choice.fits ? "" : "no"}`, tabindex: 0, role: "button", "aria-label": words });
    const title = svg("title");
    title.textContent = words;
    group.append(title, svg("circle", { class: "touch", cx: x(choice.peak_bytes), cy: y(choice.step_seconds), r: 16 }), svg("circle", { cx: x(choice.peak_bytes), cy: y(choice.step_seconds), r: at ? 5 : 7 }));
    group.addEventListener("click", () => choose(choice));
    group.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(choice); } });
    drawn.append(group);
  });
  return h("div", { class: "wide" }, drawn);
}

function choicesTable(plan, choose) {
  return wide("Ways to run the step", h("table", { class: "figures" }, h("thead", {}, h("tr", {}, ["memory", "a step", "how"].map((title, at) => h("th", { scope: "col", class: at === 2 ? "words" : "" }, title)), h("th", { scope: "col" }, h("span", { class: "unseen" }, "Choose")))),
    h("tbody", {}, plan.choices.map((choice, at) => h("tr", { class: at ? "" : "chosen" }, h("td", {}, bytes(choice.peak_bytes)), h("td", {}, seconds(choice.step_seconds)), h("td", { class: "words long" }, choice.in_words, choice.fits ? "" : " (does not fit)"),
      h("td", {}, at ? h("button", { type: "button", class: "small", "aria-label": `Choose ${choice.in_words}`, onclick: () => choose(choice) }, "Choose") : h("span", { class: "remark" }, "planned")))))));
}

// Bytes by category at every instant of a step, all bars in one scale.
function instants(plan) {
  const whole = Math.max(plan.usable_bytes < 3 * plan.choices[0].peak_bytes ? plan.usable_bytes : 0, ...plan.instants.map((instant) => Object.values(instant.parts).reduce((a, b) => a + b, 0)));
  const most = {};
  for (const instant of plan.instants) for (const [name, value] of Object.entries(instant.parts)) most[name] = Math.max(value, most[name] || 0);
  const legend = h("p", { class: "legend" }, Object.keys(plan.colours).filter((name) => name in most).map((name) => h("span", {}, swatch(plan.colours[name]), `${name} ${bytes(most[name])}`)));
  const bar = (parts) => {
    const drawn = svg("svg", { class: "stack", viewBox: "0 0 1000 14", preserveAspectRatio: "none", "aria-hidden": "true" });
    let at = 0;
    for (const [name, value] of Object.entries(parts)) {
      const piece = svg("rect", { x: ((1000 * at) / whole).toFixed(1), width: ((1000 * value) / whole).toFixed(1), height: 14, fill: plan.colours[name] });
      const title = svg("title");
      title.textContent = `${name} ${bytes(value)}`;
      piece.append(title);
      drawn.append(piece);
      at += value;
    }
    if (plan.usable_bytes < whole * 1.001) drawn.append(svg("rect", { class: "limit", x: ((1000 * plan.usable_bytes) / whole - 2).toFixed(1), width: 2, height: 14 }));
    return drawn;
  };
  return [legend, wide("Memory through the run", h("table", { class: "instants" }, h("tbody", {}, plan.instants.map((instant) => h("tr", { class: instant.peak ? "peak" : "" }, h("th", { scope: "row" }, instant.name), h("td", { class: "right" }, bytes(Object.values(instant.parts).reduce((a, b) => a + b, 0))), h("td", {}, bar(instant.parts)))))))];
}

function swatch(colour) {
  const drawn = svg("svg", { class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true" });
  drawn.append(svg("rect", { width: 10, height: 10, rx: 2, fill: colour }));
  return drawn;
}
