// Parts that several views show: a state, a sparkline, curves, a command at work.

import { get, post, query } from "./api.js";
import { commandLine, h, svg } from "./dom.js";

export const STATES = ["training", "waiting", "stopped", "failed", "done"];

const DOING = {
  starting: "starting the workers", import: "importing torch", compile: "compiling loops", join: "waiting for the other workers",
  build: "building the model", load: "loading the model", optimizer: "making the optimizer's state",
  reference: "computing the reference", teacher: "asking the teacher", features: "looking at the images",
  evaluate: "evaluating", answer: "answering", save: "saving", preparing: "preparing",
};

export function state(row) {
  const asked = row.doing.startsWith("stopping: ");
  const doing = DOING[row.doing.replace("stopping: ", "")] || "";
  const words = row.state === "training" ? (asked ? "stopping" : doing || "training") : row.state;
  return h("span", { class: `state ${row.state}` }, words);
}

export function sparkline(values, width = 110, height = 26) {
  const drawn = svg("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return drawn;
  const low = Math.min(...known), high = Math.max(...known);
  const x = (at) => 1 + (at / (values.length - 1)) * (width - 5);
  const y = (value) => 2 + (1 - (high > low ? (value - low) / (high - low) : 0.5)) * (height - 5);
  let path = "", pen = "M";
  values.forEach((value, at) => {
    if (value === null) { pen = "M"; return; }
    path += `${pen}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  drawn.append(svg("path", { d: path }));
  const last = values[values.length - 1];
  if (last !== null) drawn.append(svg("circle", { cx: x(values.length - 1).toFixed(1), cy: y(last).toFixed(1), r: 2 }));
  return drawn;
}

export function progress(row) {
  const part = row.num_steps ? Math.min(1, row.step / row.num_steps) : 0;
  const words = row.num_steps ? `${row.step.toLocaleString("en")} / ${row.num_steps.toLocaleString("en")}` : "";
  const bar = svg("svg", { class: "progress", viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" });
  bar.append(svg("rect", { class: "rail", width: 100, height: 4 }), svg("rect", { class: "done", width: (100 * part).toFixed(2), height: 4 }));
  return h("span", { class: "progressed" }, h("span", { class: "steps" }, words), bar);
}

// A section with curves, which `Curves.Board` draws.
export function curvesSection(title = "Curves") {
  const id = (name) => `curves-${name}`;
  return h("section", { class: "curves" }, h("h2", {}, title),
    h("form", { class: "controls" },
      h("label", { for: id("smoothing") }, "smoothing ", h("input", { type: "range", id: id("smoothing"), class: "smoothing", min: 0, max: 0.99, step: 0.01, value: "0.6" }), h("output", { class: "smoothed" }, "0.60")),
      h("label", {}, h("input", { type: "checkbox", class: "log" }), " log axis"),
      h("label", { for: id("axis") }, "over ", h("select", { id: id("axis"), class: "axis" }, h("option", { value: "step" }, "steps"), h("option", { value: "tokens" }, "tokens"), h("option", { value: "hours" }, "hours")))),
    h("div", { class: "legend" }), h("div", { class: "charts" }));
}

// Add the steps of `more` to curves; whether they go on where those end.
export function goOn(curves, more) {
  const last = curves.x.step.length ? curves.x.step[curves.x.step.length - 1] : 0;
  const from = more.x.step.findIndex((step) => step > last);
  curves.evaluations = more.evaluations;
  if (from < 0) return;
  const before = curves.x.step.length;
  for (const name of Object.keys(curves.x)) curves.x[name].push(...more.x[name].slice(from));
  const added = curves.x.step.length - before;
  for (const name of new Set([...Object.keys(curves.series), ...Object.keys(more.series)])) {
    const series = (curves.series[name] ||= { mean: new Array(before).fill(null) });
    const values = more.series[name] ? more.series[name].mean.slice(from) : new Array(added).fill(null);
    for (const key of Object.keys(series)) series[key].push(...values);
  }
  curves.skipped.push(...more.skipped.filter((step) => step > last));
}

// Begin a command by `begin()`, and show how it goes until it has ended. `onEnd` hears of it.
export function commandAtWork(command, onEnd = () => {}) {
  const output = h("pre", { class: "output", tabindex: "0", role: "region", "aria-label": "What it prints" });
  const status = h("span", { class: "remark", role: "status" }, "at work");
  const end = h("button", { type: "button", class: "small", onclick: () => post("/api/command/end", { command: command.command }) }, "End it");
  const box = h("div", { class: "at-work" }, commandLine(command.line), h("p", { class: "going" }, status, end), output);
  let timer = 0;
  async function look() {
    let now;
    try { now = await get(query("/api/command", { command: command.command })); }
    catch (error) { status.textContent = error.message; return; }
    const atEnd = output.scrollTop + output.clientHeight >= output.scrollHeight - 4;
    output.textContent = now.output;
    output.hidden = !now.output;
    if (atEnd) output.scrollTop = output.scrollHeight;
    if (now.status === null) { timer = setTimeout(look, 600); return; }
    end.remove();
    status.textContent = now.status === 0 ? "done" : now.status === 3 ? "stopped as asked" : now.status < 0 ? "ended" : `failed (exit status ${now.status})`;
    status.classList.toggle("bad", ![0, 3].includes(now.status) && now.status > 0);
    onEnd(now);
  }
  output.hidden = true;
  look();
  return { box, close: () => clearTimeout(timer) };
}
