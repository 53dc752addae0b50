// Small functions: elements, requests, links. Strings become text nodes; there is no way to HTML here.
import { nodes, short } from "./text.js";
export { nodes, short };

/** h("p", {class: "dim", onclick: f}, "text", node, [nodes]) */
export function h(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made && typeof value !== "string") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Text of others: hidden characters are spelled out, and its direction stays inside. */
export function said(text, attributes = {}, name = "span") {
  const made = h(name, { ...attributes, class: `said ${attributes.class ?? ""}`, dir: "auto" });
  made.append(nodes(String(text ?? "")));
  return made;
}

/** A long text: its beginning, and a button for more of it. */
export function long(text, limit = 4000, attributes = {}) {
  text = String(text ?? "");
  const made = h("div", { ...attributes, class: `said long ${attributes.class ?? ""}`, dir: "auto" });
  let shown = 0;
  const button = h("button", { class: "more", onclick: () => grow(20000) });
  function grow(more) {
    button.remove();
    made.append(nodes(text.slice(shown, shown + more)));
    shown += more;
    if (shown < text.length) {
      button.textContent = `… show more: ${(text.length - shown).toLocaleString("en")} characters are left`;
      made.append(button);
    }
  }
  grow(limit);
  return made;
}

export class Failure extends Error {
  constructor(message, status, printed) {
    super(message);
    this.status = status;
    this.said = printed;
  }
}

// In report.html the answers stand in the page itself.
export const inlined = JSON.parse(document.getElementById("inlined")?.textContent ?? "null");

const known = new Map(); // url: [ETag, value], of the last few

/** The answer of /api/NAME; the value of before, the same object, where nothing is new. */
export async function get(name, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== undefined && one !== null) query.append(key, one);
  }
  if (inlined) {
    const found = inlined[`${name}?${query}`];
    if (found === undefined) throw new Failure("The report does not hold this; python look.py shows all of the run.", 404);
    return found;
  }
  const url = `/api/${name}?${query}`;
  const before = known.get(url);
  const headers = before ? { "If-None-Match": before[0] } : {};
  let answer;
  try {
    answer = await fetch(url, { headers, cache: "no-store" });
  } catch {
    throw new Failure("look.py does not answer; was it ended? Trying again.", 0);
  }
  if (answer.status === 304) return before[1];
  const value = await answer.json().catch(() => ({ error: `status ${answer.status}` }));
  if (!answer.ok) throw new Failure(value.error ?? `status ${answer.status}`, answer.status);
  const tag = answer.headers.get("ETag");
  if (tag) {
    known.delete(url);
    known.set(url, [tag, value]);
    if (known.size > 12) known.delete(known.keys().next().value);
  }
  return value;
}

/** Asks again and again, and calls `show` with each new value. Goes on after failures, which it reports. */
export function poll(name, parameters, milliseconds, show, signal) {
  let last, timer;
  async function ask() {
    if (signal.aborted) return;
    if (!document.hidden) {
      try {
        const value = await get(name, parameters());
        if (signal.aborted) return;
        tell("");
        if (value !== last) await show((last = value));
      } catch (error) {
        if (signal.aborted) return;
        if (!(error instanceof Failure)) console.error(error);
        tell(error.message);
      }
    }
    timer = setTimeout(ask, milliseconds);
  }
  signal.addEventListener("abort", () => clearTimeout(timer));
  ask();
  return () => {
    clearTimeout(timer);
    last = undefined;
    ask();
  };
}

/** A line at the foot of the page: what cannot be had at the moment. */
export function tell(text) {
  const line = document.getElementById("notice");
  if (line.textContent !== text) line.replaceChildren(nodes(text));
  line.hidden = !text;
}

export function link(view, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== undefined && one !== null && one !== "") query.append(key, one);
  }
  return `#/${view}?${query}`;
}

/** Keeps what is chosen in the address, without going anywhere; where one is on the way to another view, it stays so. */
export function remember(view, parameters) {
  if ((/^#\/(\w+)/.exec(location.hash)?.[1] ?? view) === view) history.replaceState(null, "", link(view, parameters));
}

export function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function ago(unix) {
  if (!unix) return "–";
  const seconds = Date.now() / 1000 - unix;
  return seconds < 86400 * 2 ? `${duration(Math.max(0, seconds))} ago` : new Date(unix * 1000).toISOString().slice(0, 10);
}

/** `ago`, which `tick` draws anew each second: of a run that hangs nothing new comes. */
export const age = (unix) => h("span", { "data-unix": unix ? String(unix) : undefined }, ago(unix));

export function tick() {
  for (const one of document.querySelectorAll("[data-unix]")) {
    const text = ago(Number(one.dataset.unix));
    if (one.textContent !== text) one.textContent = text;
  }
}

/** A score on a background from red (lowest) to green (highest). */
export function score(value, low, high) {
  if (typeof value !== "number") return h("span", { class: "dim" }, "–");
  const made = h("span", { class: "score" }, short(value));
  const place = Math.min(1, Math.max(0, (value - low) / (high - low)));
  made.style.backgroundColor = high > low ? `hsl(${120 * place} 65% 88%)` : "#eef0f3"; // all are the same: no colour
  return made;
}

export function save(name, type, content) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const anchor = h("a", { href: url, download: name, hidden: true });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** A cell for CSV; one that a spreadsheet would run as a formula begins with '. */
export function cell(value) {
  if (typeof value === "number") return String(value);
  const text = String(value ?? "").replace(/^(?=[=+\-@\t\r])/, "'");
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
