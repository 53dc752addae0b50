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

/** A long text: its beginning, and a button for the rest. */
export function long(text, limit = 4000, attributes = {}) {
  text = String(text ?? "");
  const made = said(text.slice(0, limit), { ...attributes, class: `long ${attributes.class ?? ""}` }, "div");
  const left = text.length - limit;
  if (left > 0) {
    const grow = (event) => event.target.replaceWith(nodes(text.slice(limit)));
    made.append(h("button", { class: "more", onclick: grow }, `… show ${left.toLocaleString("en")} more characters`));
  }
  return made;
}

/** Terms and what they are, beside one another; without those that are unknown. */
export function pairs(list) {
  const known = list.filter(([, value]) => value !== null && value !== undefined);
  return h("dl", { class: "pairs" }, known.map(([term, value]) => h("div", {}, h("dt", {}, said(term)), h("dd", {}, said(value)))));
}

/** Terms about a completion. */
export const about = (found) => [
  ...Object.entries(found.rewards).map(([name, value]) => [name, short(value)]), ["advantage", short(found.advantage)], ["length", found.length],
  ["ended by", found.finish_reason], ["domain", found.domain], ["policy version", found.policy_version], ["row", found.row_number], ["origin", found.origin],
];

// In report.html the answers stand in the page itself.
export const inlined = JSON.parse(document.getElementById("inlined")?.textContent ?? "null");

function query(parameters) {
  const made = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    for (const one of [value].flat()) if (one !== undefined && one !== null && one !== "") made.append(key, one);
  }
  return made;
}

const known = new Map(); // name: the last answer

/** The answer of /api/NAME; the value of before, the same object, where nothing is new. */
export async function get(name, parameters = {}) {
  const asked = `${name}?${query(parameters)}`;
  if (inlined) {
    if (asked in inlined) return inlined[asked];
    throw new Error("The report does not hold this; python look.py shows all of the run.");
  }
  const answer = await fetch(`/api/${asked}`, { headers: { Authorization: `Bearer ${localStorage.getItem("token") ?? ""}` } }).catch(() => {
    throw new Error("look.py does not answer; was it ended? Trying again.");
  });
  const text = await answer.text();
  if (!answer.ok) throw new Error(text.startsWith("{") ? JSON.parse(text).error : text);
  const before = known.get(name);
  if (before?.asked === asked && before.text === text) return before.value;
  known.set(name, { asked, text, value: JSON.parse(text) });
  return known.get(name).value;
}

/** Asks again and again, and calls `show` with each new value. Goes on after failures, which it reports. */
export function poll(name, parameters, milliseconds, show, signal) {
  let last, timer, failed;
  async function ask() {
    try {
      if (!document.hidden) {
        const value = await get(name, parameters());
        if (signal.aborted) return;
        if (failed) tell("");
        failed = false;
        if (value !== last) await show((last = value));
      }
    } catch (error) {
      if (signal.aborted) return;
      failed = true;
      tell(error.message);
    }
    if (!inlined) timer = setTimeout(ask, milliseconds);
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
  line.replaceChildren(nodes(text));
  line.hidden = !text;
}

export const link = (view, parameters = {}) => `#/${view}?${query(parameters)}`;

/** Keeps what is chosen in the address, without going anywhere; where one is on the way to another view, it stays so. */
export function remember(view, parameters) {
  if ((/^#\/(\w+)/.exec(location.hash)?.[1] ?? view) === view) history.replaceState(null, "", link(view, parameters));
}

export function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function ago(unix) {
  const seconds = Date.now() / 1000 - unix;
  return seconds < 86400 * 2 ? `${duration(Math.max(0, seconds))} ago` : new Date(unix * 1000).toISOString().slice(0, 10);
}

/** How long ago something was, which `tick` draws anew each second: of a run that hangs nothing new comes. */
export const age = (unix) => (unix ? h("span", { "data-unix": String(unix) }, ago(unix)) : "–");

export function tick() {
  for (const one of document.querySelectorAll("[data-unix]")) one.textContent = ago(Number(one.dataset.unix));
}

/** A score on a background from red (lowest) to green (highest). */
export function score(value, low, high) {
  if (typeof value !== "number") return h("span", { class: "dim" }, "–");
  const made = h("span", { class: "score" }, short(value));
  const place = Math.min(1, Math.max(0, (value - low) / (high - low)));
  made.style.backgroundColor = high > low ? `hsl(${120 * place} 65% 88%)` : "#eef0f3"; // all are the same: no colour
  return made;
}
