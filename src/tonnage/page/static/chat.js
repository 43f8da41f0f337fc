// Talk to a run, an export or a model, or to two side by side; tokens and their probabilities on demand. What was said is
// kept in the browser's tab, and is there again when the view is left for another or the page is loaded again.

import { events, get, post, postStream, query } from "./api.js";
import { commandLine, empty, failed, field, h } from "./dom.js";

const LIKELIEST = 5, KEEP = "tonnage-chat";

function kept() {
  try { return JSON.parse(sessionStorage.getItem(KEEP)) || {}; } catch { return {}; }
}

export async function showChat(place, words) {
  const { runs } = await get("/api/runs");
  const chosen = words.getAll("run"), before = { sides: [], ...kept() };
  const system = h("textarea", { rows: 2, placeholder: "No system prompt", value: before.system || "" });
  const temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, value: before.temperature || "0", class: "few" });
  const length = h("input", { type: "number", min: 1, max: 8192, value: before.length || "", placeholder: "up to 512", class: "few" });
  const template = h("input", { type: "text", value: before.template || "auto", class: "few", list: "templates", spellcheck: "false" });
  const shows = h("input", { type: "checkbox", checked: Boolean(before.shows) });
  const question = h("textarea", { rows: 2, placeholder: "Say something", "aria-label": "Your message", required: true });
  const send = h("button", { type: "submit", class: "main" }, "Send"), stop = h("button", { type: "button", hidden: true, onclick: () => { for (const side of sides) side.stop(); } }, "Stop");
  const form = h("form", { class: "ask", onsubmit: (event) => { event.preventDefault(); ask(); } }, question, h("div", { class: "buttons" }, send, stop, h("button", { type: "button", onclick: () => { for (const side of sides) side.clear(); question.focus(); } }, "New conversation")));
  question.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); } });
  const sides = [0, 1].map((at) => {
    const side = before.sides[at] || {};
    return sideOf(chosen[at] && chosen[at] !== side.model ? { model: chosen[at] } : side, runs, at, template, () => shows.checked);
  });
  place.append(h("h1", {}, "Chat"), h("section", { class: "form" }, h("div", { class: "across" }, field("System prompt", system), field("Temperature", temperature), field("Tokens at most", length), field("Template", template), h("datalist", { id: "templates" }, ["auto", "plain", "chatml", "alpaca"].map((name) => h("option", { value: name }))), h("label", { class: "check" }, shows, " show tokens and their probabilities"))),
    h("div", { class: "sides" }, sides.map((side) => side.box)), form);
  shows.addEventListener("change", () => { for (const side of sides) side.draw(); });
  sides.forEach((side, at) => { if (chosen[at]) side.load(); else side.findAgain(); });
  addEventListener("pagehide", keep);

  function keep() {
    const state = { system: system.value, temperature: temperature.value, length: length.value, template: template.value, shows: shows.checked };
    const store = (withTokens) => sessionStorage.setItem(KEEP, JSON.stringify({ ...state, sides: sides.map((side) => side.state(withTokens)) }));
    try { store(true); } catch { try { store(false); } catch { /* even the words are more than a browser keeps */ } }
  }

  async function ask() {
    const text = question.value.trim(), ready = sides.filter((side) => side.isReady());
    if (!text) return;
    if (!ready.length) { sides[0].say("Load a run or a model first."); return; }
    question.value = "";
    send.disabled = true;
    stop.hidden = false;
    const how = { temperature: Number(temperature.value), max_tokens: Number(length.value) || undefined, system: system.value.trim() };
    await Promise.all(ready.map((side) => side.ask(text, how)));
    send.disabled = false;
    stop.hidden = true;
    question.focus();
  }

  return () => { keep(); removeEventListener("pagehide", keep); for (const side of sides) side.close(); };
}

// `before`: what the side's `state` was when the view was left.
function sideOf(before, runs, at, template, showsTokens) {
  const listId = `talkers-${at}`;
  const model = h("input", { type: "text", value: before.model || "", list: listId, placeholder: at ? "another beside it" : "a run, an export's directory or a hub id", "aria-label": at ? "Beside it" : "Who answers", spellcheck: "false", autocomplete: "off" });
  const button = h("button", { type: "submit" }, "Load"), status = h("span", { class: "remark", role: "status" });
  const talk = h("div", { class: "talk", role: "log", "aria-label": at ? "Conversation beside it" : "Conversation", tabindex: "0" }), command = h("div", {});
  const box = h("section", { class: "side" }, h("form", { class: "who", onsubmit: (event) => { event.preventDefault(); load(); } }, model, h("datalist", { id: listId }, runs.filter((row) => row.step > 0).map((row) => h("option", { value: row.run }))), button, status), command, talk);
  let begun = before.command || "", served = null, timer = 0, turns = before.turns || [], controller = null, closed = false;

  async function load() {
    clearTimeout(timer);
    served = null;
    begun = "";
    if (!model.value.trim()) { status.textContent = ""; command.replaceChildren(); return; }
    try {
      const loading = await post("/api/chat/load", { model: model.value.trim(), template: template.value.trim() || "auto" });
      begun = loading.command;
      command.replaceChildren(commandLine(loading.line));
      status.textContent = "loading";
      look(begun);
    } catch (error) { say(error.message); }
  }

  // Go on with the model that was loaded when the view was left, if it still is.
  async function findAgain() {
    if (!begun) return;
    const now = await get(query("/api/chat/served", { command: begun })).catch(() => ({ status: 0 }));
    if (now.status === null) { command.replaceChildren(commandLine(now.line)); look(begun); }
    else status.textContent = "not loaded any more";
  }

  async function look(id) {
    if (closed) return;
    try {
      const now = await get(query("/api/chat/served", { command: id }));
      if (now.model !== null && now.status === null) { served = { command: id, model: now.model }; status.textContent = "ready"; draw(); return; }
      if (now.status !== null) { say(now.output || "It ended."); return; }
      timer = setTimeout(() => look(id), 500);
    } catch (error) { say(error.message); }
  }

  function say(message) {
    status.textContent = "";
    if (!turns.length) talk.replaceChildren();
    talk.append(failed(message));
  }

  async function ask(text, how) {
    const turn = { role: "assistant", model: served.model, content: "", tokens: [], failed: "" };
    turns.push({ role: "user", content: text, tokens: [], failed: "" }, turn);
    controller = new AbortController();
    draw();
    // A question that was refused, or whose answer broke off, is left out together with its answer.
    const counts = (_, place) => !turns[place - (place % 2) + 1].failed;
    const messages = [...(how.system ? [{ role: "system", content: how.system }] : []), ...turns.slice(0, -1).filter(counts).map(({ role, content }) => ({ role, content }))];
    try {
      const question = { model: served.model, messages, stream: true, temperature: how.temperature, max_tokens: how.max_tokens, logprobs: true, top_logprobs: LIKELIEST };
      const response = await postStream("/api/chat", { command: served.command, question }, controller.signal);
      let isWhole = false;
      for await (const data of events(response)) {
        if (data === "[DONE]") { isWhole = true; break; }
        const piece = JSON.parse(data);
        if (piece.error) { turn.failed = piece.error.message; break; }
        const [choice] = piece.choices;
        turn.content += choice.delta.content || "";
        if (choice.logprobs) turn.tokens.push(...choice.logprobs.content);
        draw();
      }
      if (!isWhole && !turn.failed) turn.failed = "The answer broke off: the model's server has ended. Load it again.";
    } catch (error) {
      if (!controller.signal.aborted) turn.failed = error.message;
    }
    controller = null;
    draw();
  }

  function draw() {
    if (!turns.length) { talk.replaceChildren(served ? h("p", { class: "remark" }, `${served.model} listens.`) : at ? h("p", { class: "remark" }, "Another run or model answers the same here.") : empty("Nobody is loaded yet.", h("p", {}, "Choose a run, and talk to its newest model. It is loaded into a process of its own, which ends with the page."))); return; }
    const atEnd = talk.scrollTop + talk.clientHeight >= talk.scrollHeight - 30;
    talk.replaceChildren(...turns.map((turn) => h("div", { class: `turn ${turn.role}` }, h("span", { class: "who-says" }, turn.role === "user" ? "you" : turn.model),
      showsTokens() && turn.tokens.length ? h("div", { class: "text tokens" }, turn.tokens.map(tokenOf)) : h("div", { class: "words" }, turn.content || (turn.failed ? "" : controller && turn === turns.at(-1) ? "…" : "(nothing)")), turn.failed ? failed(turn.failed) : null)));
    if (atEnd) talk.scrollTop = talk.scrollHeight;
  }

  function stop() { if (controller) controller.abort(); }
  function clear() { stop(); turns = []; draw(); }
  function state(withTokens) { return { model: model.value, command: begun, turns: withTokens ? turns : turns.map((turn) => ({ ...turn, tokens: [] })) }; }
  draw();
  return { box, load, findAgain, ask, draw, clear, stop, say, state, isReady: () => served !== null, close: () => { closed = true; clearTimeout(timer); stop(); } };
}

// A token, whose likelier it was the fuller its colour; what else was likely, when it is pointed at or has the focus.
function tokenOf(token) {
  const shown = (logprob) => `${(100 * Math.exp(logprob)).toPrecision(3)}%`;
  const others = token.top_logprobs.map((other) => `${JSON.stringify(other.token)} ${shown(other.logprob)}`).join(", ");
  const part = Math.min(4, Math.floor(Math.exp(token.logprob) * 5));
  return h("span", { class: `token p${part}`, tabindex: "0", role: "note", title: `${JSON.stringify(token.token)} ${shown(token.logprob)}; likeliest: ${others}`, "aria-label": `${token.token} ${shown(token.logprob)}` }, token.token, h("span", { class: "pop", "aria-hidden": "true" }, token.top_logprobs.map((other) => h("span", {}, h("code", {}, JSON.stringify(other.token)), shown(other.logprob)))));
}
