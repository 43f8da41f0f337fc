// Elements from plain values. Text from the server only ever becomes text nodes, but for `escaped`.

export function h(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked") made[key] = value;
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// HTML that the server's own template has made of the report's parts, in which it has escaped everything.
export function escaped(html) {
  const made = document.createElement("div");
  made.innerHTML = html;
  return made;
}

// What is there in place of a view's content: a sentence, and what to do about it.
export function empty(sentence, ...more) {
  return h("div", { class: "empty" }, h("p", {}, sentence), more);
}

// What went wrong.
export function failed(message) {
  return h("p", { class: "message failed", role: "alert" }, message);
}

// What may be wider than the window, and is then moved sideways by itself.
export function wide(label, ...content) {
  return h("div", { class: "wide", tabindex: "0", role: "region", "aria-label": label }, content);
}

// The lines of a field that have words.
export function linesOf(control) {
  return control.value.split("\n").map((line) => line.trim()).filter(Boolean);
}

// A command line to look at and to copy.
export function commandLine(line) {
  const button = h("button", { type: "button", class: "small", onclick: () => copy(line, button) }, "Copy");
  return h("div", { class: "command" }, h("code", {}, line), button);
}

export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Press Ctrl-C";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

export function field(label, control, hint) {
  const name = h("span", { class: "label" }, label);
  return h("label", { class: "field" }, name, control, hint ? h("span", { class: "hint" }, hint) : null);
}
