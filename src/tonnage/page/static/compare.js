// Runs side by side: curves, what is set differently, what they answered.

import { get, query } from "./api.js";
import { empty, h, wide } from "./dom.js";
import { bytes, count, figure } from "./format.js";
import { curvesSection, progress, state } from "./parts.js";

const MOST = 12;

export async function showCompare(place, words) {
  const names = words.getAll("run").slice(0, MOST);
  const all = (await get("/api/runs")).runs;
  const link = (list) => (list.length ? query("#/compare", { run: list }) : "#/compare");
  const add = h("select", { "aria-label": "Add a run", disabled: names.length >= MOST, onchange: () => { location.hash = link([...names, add.value]); } },
    h("option", { value: "" }, "Add a run…"), all.filter((row) => !names.includes(row.run)).map((row) => h("option", { value: row.run }, row.run)));
  place.append(h("h1", {}, "Compare"), h("div", { class: "tools" }, all.length ? add : null,
    names.map((name, at) => h("span", { class: "chip chosen" }, h("span", { class: `key c${at}`, "aria-hidden": "true" }), h("span", { class: "name" }, name),
      h("a", { href: link(names.filter((other) => other !== name)), "aria-label": `Take ${name} away` }, "×")))));
  if (!names.length) {
    place.append(empty(all.length ? "Nothing to compare yet." : "No run lies below this folder yet.", h("p", {}, all.length ? "Add runs here, or tick them in the list." : "Runs appear in the list by themselves.")));
    return null;
  }
  const { runs, differences, samples } = await get(query("/api/compare", { run: names }));
  const head = runs.map((run, at) => h("th", { scope: "col" }, h("span", { class: `key c${at}`, "aria-hidden": "true" }), h("a", { href: query("#/run", { run: run.row.run }) }, run.row.run)));
  const line = (title, of) => h("tr", {}, h("th", { scope: "row" }, title), runs.map((run) => h("td", {}, of(run.row) || "–")));
  const best = (run) => Math.min(...run.curves.evaluations.loss.filter((value) => value !== null));
  const figures = h("section", {}, h("h2", {}, "Figures"), wide("Figures", h("table", { class: "figures compared" },
    h("thead", {}, h("tr", {}, h("td", {}), head)),
    h("tbody", {}, line("state", state), line("model", (row) => row.model), line("trains", (row) => row.trains), line("steps", progress), line("loss", (row) => figure(row.loss)), line("evaluation", (row) => figure(row.evaluation)),
      h("tr", {}, h("th", { scope: "row" }, "best evaluation"), runs.map((run) => h("td", {}, Number.isFinite(best(run)) ? figure(best(run)) : "–"))),
      line("tokens/s", (row) => count(row.tokens_per_second)), line("memory", (row) => bytes(row.memory_bytes)), line("tags", (row) => row.tags.join(", "))))));
  const curves = curvesSection();
  const unlike = h("section", {}, h("h2", {}, "What is set differently"), differences.length
    ? wide("What is set differently", h("table", { class: "figures compared" }, h("thead", {}, h("tr", {}, h("td", {}), head.map((cell) => cell.cloneNode(true)))),
      h("tbody", {}, differences.map(([key, values]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, key)), values.map((value) => h("td", { class: "words" }, h("code", {}, value))))))))
    : h("p", { class: "remark" }, runs.length > 1 ? "Nothing: the configs are the same." : "Add another run to see how their configs differ."));
  place.append(figures, curves, unlike);
  if (samples.length) place.append(samplesSection(runs, samples));
  const board = new Curves.Board(curves, runs.map((run) => ({ name: run.row.run, ...run.curves })));
  return () => board.close();
}

// Answers of all runs to the same prompts, after the first or the last evaluation of each.
function samplesSection(runs, samples) {
  const body = h("div", {});
  const when = h("select", { onchange: draw }, h("option", { value: "last" }, "last"), h("option", { value: "first" }, "first"));
  function draw() {
    body.replaceChildren(...samples.map((sample) => h("div", { class: "row" },
      h("div", { class: "text" }, h("span", { class: "context" }, sample.prompt)),
      sample.expected === null ? null : h("p", { class: "remark" }, "expected ", h("span", { class: "text inline" }, sample.expected)),
      h("div", { class: "beside" }, runs.map((run, at) => {
        const answers = sample.answers[at];
        const shown = when.value === "last" ? answers[answers.length - 1] : answers[0];
        const isRight = shown && sample.expected !== null && shown[1].trim() === sample.expected.trim();
        return h("div", {}, h("div", { class: `when c${at}` }, h("span", { class: "key", "aria-hidden": "true" }), h("span", {}, `${run.row.run}${shown ? `, step ${count(shown[0])}` : ""}`)),
          h("div", { class: `text ${isRight ? "counts" : ""}` }, shown ? shown[1] || "(nothing)" : "was not asked"));
      })))));
  }
  draw();
  return h("section", {}, h("h2", {}, "Samples"), h("p", { class: "controls" }, h("label", {}, "after the ", when, " evaluation")), body);
}
