"use strict";
// Curves of runs, as the report and the page draw them. Text from files only ever becomes text nodes.
const Curves = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const CHARTS = [
    { name: "loss", title: "Loss", unit: number, log: true },
    { name: "reward_margin", title: "Margin between rewards of chosen and rejected answers", unit: number, zero: true },
    { name: "reward_accuracy", title: "Pairs whose chosen answer has the higher reward", unit: number, zero: true },
    { name: "lr", title: "Learning rate", unit: number, log: true },
    { name: "grad_norm", title: "Gradient norm", unit: number, log: true },
    { name: "tokens_per_second", title: "Tokens a second", unit: number },
    { name: "memory", title: "Memory of the fullest worker", unit: bytes, zero: true },
    { name: "loss_scale", title: "Loss scale", unit: number, log: true },
  ];

  // Numbers for people.
  function number(value) {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(4)));
  }
  function bytes(value) {
    for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
      if (Math.abs(value) >= scale) return `${Number((value / scale).toPrecision(3))} ${unit}`;
    return String(Math.round(value));
  }
  function short(value) {
    for (const [unit, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
      if (Math.abs(value) >= scale * 10 || (Math.abs(value) >= scale && unit !== "k"))
        return `${Number((value / scale).toPrecision(3))}${unit}`;
    return String(Number(value.toPrecision(4)));
  }
  const across = (value, axis) => (axis === "hours" ? `${number(value)} h` : Math.round(value).toLocaleString("en"));

  function element(name, attributes, parent, text) {
    const made = document.createElementNS(SVG, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    if (parent) parent.appendChild(made);
    return made;
  }
  function html(name, className, parent, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    if (parent) parent.appendChild(made);
    return made;
  }

  // Moving average with weights that fall by the factor `smoothing` from point to point; gaps stay gaps.
  function smooth(values, smoothing) {
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = smoothing * sum + (1 - smoothing) * value;
      weight = smoothing * weight + (1 - smoothing);
      return sum / weight;
    });
  }

  // About `count` round numbers between two.
  function ticks(low, high, count) {
    const raw = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((times) => times * power).find((one) => one >= raw) || 10 * power;
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
    return found;
  }
  function logTicks(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const times of [1, 2, 5]) {
        const at = times * 10 ** power;
        if (at >= low * 0.9999 && at <= high * 1.0001) found.push(at);
      }
    if (found.length < 2) return ticks(low, high, 3).filter((at) => at > 0);
    return found.length > 7 ? found.filter((at) => Math.abs(Math.log10(at) - Math.round(Math.log10(at))) < 1e-9) : found;
  }

  // The number of the point that is nearest to a value, in an ascending list.
  function nearest(values, wanted) {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle + 1;
      else high = middle;
    }
    return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
  }

  class Chart {
    constructor(about, board, parent) {
      this.about = about;
      this.board = board;
      this.figure = html("figure", "", parent);
      const caption = html("figcaption", "", this.figure);
      html("span", "name", caption, about.title);
      this.told = html("span", "told", caption, "");
      this.svg = element("svg", { role: "img", tabindex: "0", "aria-label": about.title }, this.figure);
      this.svg.addEventListener("pointermove", (event) => board.point(this.valueAt(event.clientX)));
      this.svg.addEventListener("pointerleave", () => board.point(null));
      this.svg.addEventListener("keydown", (event) => this.onKey(event));
      this.svg.addEventListener("blur", () => board.point(null));
    }

    // What is drawn: a line for each run that has such values, and for the loss one of its evaluations.
    lines() {
      const { runs, state } = this.board;
      const found = [];
      runs.forEach((run, at) => {
        const series = run.series[this.about.name], x = run.x[state.axis];
        if (series) {
          const smoothing = this.about.name === "lr" ? 0 : state.smoothing;
          found.push({ at, run, x, values: smoothing ? smooth(series.mean, smoothing) : series.mean, raw: smoothing ? series.mean : null, least: series.least, most: series.most });
        }
        if (this.about.name === "loss" && run.evaluations.step.length)
          found.push({ at, run, x: run.evaluations[state.axis], values: run.evaluations.loss, evaluated: true });
      });
      return found;
    }

    draw() {
      const { runs, state } = this.board;
      const width = Math.max(260, this.figure.clientWidth || 400), height = this.figure === this.figure.parentNode.firstChild ? 260 : 190;
      const lines = this.lines();
      const every = lines.flatMap((line) => [line.values, line.raw || [], line.least || [], line.most || []]).flat().filter((value) => value !== null);
      const log = state.log && Boolean(this.about.log) && every.some((value) => value > 0);
      const known = log ? every.filter((value) => value > 0) : every;
      const xs = lines.flatMap((line) => line.x);
      this.figure.hidden = !known.length;
      if (!known.length) return;
      let low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
      if (this.about.zero) low = Math.min(0, low);
      if (low === high) { const more = Math.abs(low) * 0.1 || 1; if (!log) low -= more; else low *= 0.9; high += more; }
      if (log) { const more = (high / low) ** 0.04; low /= more; high *= more; }
      else { const more = (high - low) * 0.05; if (!(this.about.zero && low === 0)) low -= more; high += more; }
      let first = xs.reduce((a, b) => Math.min(a, b)), last = xs.reduce((a, b) => Math.max(a, b));
      if (first === last) last = first + 1;

      const box = { left: 58, right: width - 10, top: 8, bottom: height - 22 };
      const toY = log ? Math.log10 : (value) => value;
      this.x = (value) => box.left + ((value - first) / (last - first)) * (box.right - box.left);
      this.y = (value) => box.bottom - ((toY(value) - toY(low)) / (toY(high) - toY(low))) * (box.bottom - box.top);
      this.back = (place) => first + ((place - box.left) / (box.right - box.left)) * (last - first);
      this.box = box; this.log = log; this.drawn = lines;

      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      for (const at of log ? logTicks(low, high) : ticks(low, high, height > 200 ? 5 : 4)) {
        const y = this.y(at);
        element("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }, this.svg);
        element("text", { class: "tick", x: box.left - 6, y: y + 4, "text-anchor": "end" }, this.svg, this.about.unit(at));
      }
      for (const at of ticks(first, last, Math.max(2, Math.floor(width / 110)))) {
        const x = this.x(at);
        element("text", { class: "tick", x, y: height - 6, "text-anchor": x > box.right - 14 ? "end" : "middle" }, this.svg, state.axis === "hours" ? number(at) : short(at));
      }
      for (const line of lines) this.drawLine(line);
      runs.forEach((run, at) => this.drawMarks(run, at));
      this.over = element("g", {}, this.svg);
    }

    drawLine(line) {
      const group = element("g", { class: `c${line.at}` }, this.svg);
      if (line.least) element("path", { class: "band", d: this.band(line) }, group);
      if (line.raw && !line.least) element("path", { class: "curve raw", d: this.path(line.x, line.raw) }, group);
      element("path", { class: line.evaluated ? "curve evaluated" : "curve", d: this.path(line.x, line.values) }, group);
      const lone = line.values.filter((value) => value !== null).length === 1;
      if ((line.evaluated && line.values.length <= 80) || lone)
        line.values.forEach((value, at) => {
          if (this.shows(value)) element("circle", { class: "dot", cx: this.x(line.x[at]), cy: this.y(value), r: 3 }, group);
        });
    }

    drawMarks(run, at) {
      const { state } = this.board;
      if (this.about.name !== "loss") return;
      const steps = run.x.step, axis = run.x[state.axis];
      if (!steps.length) return;
      const group = element("g", { class: `c${at}` }, this.svg);
      for (const step of run.restarts) {
        const x = this.x(axis[nearest(steps, step)]);
        element("title", {}, element("line", { class: "restart", x1: x, x2: x, y1: this.box.top, y2: this.box.bottom }, group), `begun again at step ${step}`);
      }
      for (const step of run.skipped) {
        const x = this.x(axis[nearest(steps, step)]);
        element("title", {}, element("line", { class: "skip", x1: x, x2: x, y1: this.box.bottom - 8, y2: this.box.bottom }, group), `step ${step} was skipped`);
      }
    }

    shows(value) { return value !== null && (!this.log || value > 0); }

    path(x, values) {
      let text = "", pen = "M";
      for (let at = 0; at < values.length; at++) {
        if (!this.shows(values[at])) { pen = "M"; continue; }
        text += `${pen}${this.x(x[at]).toFixed(1)} ${this.y(values[at]).toFixed(1)}`;
        pen = "L";
      }
      return text;
    }

    // The room between the least and the greatest values, a piece between every two gaps.
    band(line) {
      let text = "", over = [], under = [];
      const close = () => { if (over.length) text += `M${over.join("L")}L${under.reverse().join("L")}Z`; over = []; under = []; };
      for (let at = 0; at < line.values.length; at++) {
        if (!this.shows(line.least[at]) || !this.shows(line.most[at])) { close(); continue; }
        const x = this.x(line.x[at]).toFixed(1);
        over.push(`${x} ${this.y(line.most[at]).toFixed(1)}`);
        under.push(`${x} ${this.y(line.least[at]).toFixed(1)}`);
      }
      close();
      return text;
    }

    valueAt(clientX) {
      const place = this.svg.getBoundingClientRect();
      if (!this.box || !place.width) return null;
      const width = Number(this.svg.getAttribute("viewBox").split(" ")[2]);
      return this.back(((clientX - place.left) / place.width) * width);
    }

    onKey(event) {
      const line = this.drawn && this.drawn[0], by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !line) return;
      event.preventDefault();
      const now = this.board.pointed === null ? 0 : nearest(line.x, this.board.pointed);
      this.board.point(line.x[Math.max(0, Math.min(line.x.length - 1, now + by))]);
    }

    // Show what was measured at a place on the axis, or nothing.
    show(at) {
      const { runs, state } = this.board;
      if (this.figure.hidden || !this.over) return;
      this.over.replaceChildren();
      this.told.textContent = "";
      if (at === null) return;
      const words = [];
      let place = null;
      for (const line of this.drawn) {
        const number = nearest(line.x, at), value = line.values[number];
        if (!this.shows(value === undefined ? null : value)) continue;
        const x = this.x(line.x[number]);
        if (place === null) place = { x, value: line.x[number] };
        element("circle", { class: "at", cx: x, cy: this.y(value), r: 4 }, element("g", { class: `c${line.at}` }, this.over));
        const exact = line.raw ? line.raw[number] : value;
        const range = line.least && line.least[number] !== line.most[number] ? ` (${this.about.unit(line.least[number])} to ${this.about.unit(line.most[number])})` : "";
        const whose = runs.length > 1 ? `${line.run.name} ` : "";
        words.push(`${whose}${line.evaluated ? "evaluation " : ""}${this.about.unit(exact === null ? value : exact)}${range}`);
      }
      if (!place) return;
      this.over.prepend(element("line", { class: "cross", x1: place.x, x2: place.x, y1: this.box.top, y2: this.box.bottom }));
      this.told.textContent = `${state.axis === "step" ? "step " : ""}${across(place.value, state.axis)}${state.axis === "tokens" ? " tokens" : ""} · ${words.join(" · ")}`;
    }
  }

  // Curves of some runs below `root`, which holds elements of the classes controls, smoothing, smoothed, log, axis, legend and charts.
  class Board {
    constructor(root, runs) {
      this.root = root;
      this.state = { smoothing: 0.6, log: false, axis: "step" };
      this.pointed = null;
      this.charts = [];
      this.runs = [];
      this.part("controls").addEventListener("submit", (event) => event.preventDefault());
      this.part("controls").addEventListener("input", () => this.onInput());
      let next = 0;
      this.resized = () => { cancelAnimationFrame(next); next = requestAnimationFrame(() => this.draw()); };
      addEventListener("resize", this.resized);
      this.update(runs);
    }

    part(name) { return this.root.querySelector(name === "controls" ? "form.controls" : `.${name}`); }

    close() { removeEventListener("resize", this.resized); }

    // Draw other runs, or the same with more steps.
    update(runs) {
      this.runs = runs;
      const has = (about) => runs.some((run) => run.series[about.name] || (about.name === "loss" && run.evaluations.step.length));
      const shown = CHARTS.filter(has);
      if (shown.map((about) => about.name).join() !== this.charts.map((chart) => chart.about.name).join() || !this.charts.length) {
        this.part("charts").replaceChildren();
        this.charts = shown.map((about) => new Chart(about, this, this.part("charts")));
        if (!shown.length) html("p", "remark", this.part("charts"), "No step was recorded.");
      }
      this.explain();
      this.draw();
    }

    // The legend: runs by colour, and what the lines are.
    explain() {
      const legend = this.part("legend");
      legend.replaceChildren();
      if (this.runs.length > 1)
        this.runs.forEach((run, at) => {
          const entry = html("span", "", legend);
          html("span", `key c${at}`, entry);
          entry.append(run.name);
        });
      else if (this.runs.length && this.runs[0].evaluations.step.length) html("span", "told", legend, "solid: training, dashed: evaluation");
    }

    onInput() {
      const axis = this.part("axis").value;
      this.state.smoothing = Number(this.part("smoothing").value);
      this.state.log = this.part("log").checked;
      if (this.state.axis !== axis) this.pointed = null;
      this.state.axis = axis;
      this.part("smoothed").textContent = this.state.smoothing.toFixed(2);
      this.draw();
    }

    point(at) {
      this.pointed = at;
      for (const chart of this.charts) chart.show(at);
    }

    draw() {
      for (const chart of this.charts) chart.draw();
      this.point(this.pointed);
    }
  }

  return { Board, number, bytes, short };
})();
