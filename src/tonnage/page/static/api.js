// Questions to the server. The token comes with the address, behind "#", and goes into a header of each.

const KEEP = "tonnage-token";

export function takeToken() {
  const match = /^#token=([\w-]+)$/.exec(location.hash);
  if (!match) return;
  localStorage.setItem(KEEP, match[1]);
  history.replaceState(null, "", "#/runs");
}

function headers(more = {}) {
  return { Authorization: `Bearer ${localStorage.getItem(KEEP) || ""}`, ...more };
}

export function query(path, values) {
  const words = Object.entries(values).flatMap(([key, value]) => [value].flat().map((inner) => [key, inner]));
  return `${path}?${new URLSearchParams(words)}`;
}

export class Refused extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

async function ask(path, signal, more = {}) {
  const response = await fetch(path, { headers: headers(), signal, ...more });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try { const { error } = await response.json(); message = error.message || error; } catch { /* no JSON: the status says it */ }
  throw new Refused(message, response.status);
}

export async function get(path, signal) { return (await ask(path, signal)).json(); }

export async function getText(path, signal) { return (await ask(path, signal)).text(); }

export async function post(path, value) { return (await postStream(path, value)).json(); }

// The answer as a response, whose body comes piece by piece.
export function postStream(path, value, signal) {
  return ask(path, signal, { method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(value) });
}

// The values of a stream of server-sent events.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    waiting += value;
    const parts = waiting.split("\n\n");
    waiting = parts.pop();
    for (const part of parts)
      if (part.startsWith("data: ")) yield part.slice(6);
  }
}

// Hear what is new until `close()`. Begins again after a loss, and rests while nobody looks at the page.
export function listen(path, onNews, onLost) {
  let controller = null, closed = false, pause = 1000, timer = 0;
  async function begin() {
    if (closed || document.hidden || controller) return;
    const mine = controller = new AbortController();
    try {
      const response = await ask(path, mine.signal);
      onLost("");
      pause = 1000;
      for await (const text of events(response)) if (!closed) onNews(JSON.parse(text));
      if (!closed) onLost("The server has ended. What trains goes on; begin the page again to see it.");
    } catch (error) {
      if (closed || mine.signal.aborted) return;
      if (error.status === 403 || error.status === 400) { onLost(error.message); closed = true; return; }
      onLost("The server does not answer. What trains goes on; begin the page again to see it.");
    } finally {
      if (controller === mine) controller = null;
    }
    timer = setTimeout(begin, pause);
    pause = Math.min(10000, pause * 2);
  }
  function onVisible() {
    if (document.hidden) { if (controller) controller.abort(); controller = null; clearTimeout(timer); }
    else begin();
  }
  document.addEventListener("visibilitychange", onVisible);
  begin();
  return () => {
    closed = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", onVisible);
    if (controller) controller.abort();
  };
}
