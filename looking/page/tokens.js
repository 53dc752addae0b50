// The token view: every token of a trajectory, coloured by a quantity; hovering or the arrow keys give its numbers.
// report.html carries this file, too: it imports nothing but text.js.
import { nodes, short } from "./text.js";

const CHUNK = 4000; // tokens in the document at first, and with each "more"

const minusSampler = (values, sampler) =>
  values && sampler
    ? values.map((value, n) => (value === null || sampler[n] === null ? null : value - sampler[n]))
    : undefined;

// name: [label, what it is, its colours]
export const QUANTITIES = {
  trained: ["trained or masked", "blue: in the loss; grey: masked, not learned from", "trained"],
  advantage: ["advantage", "blue: more of this; orange: less", "signed"],
  weight: ["weight in the loss", "minus the derivative of the loss by the token's log-prob, after clipping and " +
    "correction: blue: pushed up; orange: pushed down; white: 0, as where it is clipped", "signed"],
  logprob: ["log-prob", "the trainer's; the darker, the less likely", "down"],
  entropy: ["entropy", "of the policy at this token; the darker, the less certain", "up"],
  difference: ["trainer minus sampler", "of the log-probs of the same token; blue: the trainer finds it likelier; " +
    "white: they agree", "signed"],
  teacher_logprob: ["teacher's log-prob", "the darker, the less likely the teacher finds it", "down"],
  gap: ["teacher minus policy", "of the log-probs of the same token; blue: the teacher finds it likelier; orange: less " +
    "likely, and it is pushed down where that is learned from", "signed"],
  version: ["policy version", "the weights that sampled it, a colour each", "kinds"],
};

function quantile(values, share) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : 0;
}

/** (value) -> a CSS colour, light enough for dark text; and the ends of the scale in words. */
function scale(kind, values, name, trained, whole) {
  if (kind === "trained") return [(value) => (value ? "hsl(214 95% 88%)" : "hsl(220 13% 91%)"), null];
  if (kind === "kinds") {
    const known = [...new Set(values.filter((value, n) => value !== null && trained?.[n] !== false))].sort((a, b) => a - b);
    const colour = (value) => `hsl(${(known.indexOf(value) * 67 + 210) % 360} 80% 86%)`;
    return [colour, known.slice(0, 12).map((value) => [colour(value), String(value)])];
  }
  const sizes = values.map((value) => (value === null ? null : Math.abs(value)));
  const least = { difference: 0.05, gap: 0.5, logprob: 0.5, teacher_logprob: 0.5, entropy: 0.1 }[name] ?? 1e-6;
  const top = Math.max(whole ?? quantile(sizes, 0.98), least);
  const part = (value) => Math.min(Math.abs(value) / top, 1);
  const hue = { up: "270 85%", down: "350 90%" }[kind];
  const colour = (value) => {
    const tone = kind === "signed" ? (value < 0 ? "28 95%" : "214 95%") : hue;
    return `hsl(${tone} ${100 - 28 * part(value)}%)`;
  };
  const ends = kind === "signed" ? [-top, -top / 2, 0, top / 2, top] : kind === "down" ? [0, -top / 2, -top] : [0, top / 2, top];
  return [colour, ends.map((value) => [colour(value), short(value)])];
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function tokenNode(side, place) {
  const text = side.text[place];
  const made = element("span", side.specials.has(place) ? "token special" : "token");
  if (text === "") made.append(element("span", "hidden-mark", side.bytes[place] ?? "empty"));
  else if (/^[^\S\n]+$/.test(text)) made.append(text.replaceAll(" ", "␣").replaceAll("\t", "⇥"));
  else {
    const parts = text.split("\n");
    parts.forEach((part, n) => {
      made.append(nodes(part.replaceAll("\t", "⇥")));
      if (n < parts.length - 1) made.append(element("span", "newline", "⏎"), "\n");
    });
  }
  return made;
}

/**
 * The view as an element. data: token_view of runlog/samples.py.
 * chosen: the quantity to begin with; onChoice(name): called with another one.
 */
export function tokenView(data, chosen, onChoice = () => {}) {
  const side = data.completion;
  side.specials = new Set(side.special);
  data.prompt.specials = new Set(data.prompt.special);
  const sampler = data.columns.sampler_logprob;
  const columns = {
    ...data.columns,
    difference: minusSampler(data.columns.logprob, sampler),
    gap: minusSampler(data.columns.teacher_logprob, sampler),
  };
  const known = Object.keys(QUANTITIES).filter((name) => columns[name]);
  const count = side.ids.length;
  const view = element("section", "token-view");
  view.setAttribute("aria-label", "Tokens");

  // What is chosen, and what its colours mean.
  const bar = element("div", "bar");
  const label = element("label", "", "Colour by ");
  const select = element("select");
  known.forEach((name) => {
    const option = element("option", "", QUANTITIES[name][0]);
    option.value = name;
    select.append(option);
  });
  label.append(select);
  const legend = element("span", "legend");
  const whole = element("label", "", "");
  const byStep = element("input");
  byStep.type = "checkbox";
  whole.append(byStep, " scaled by the whole step");
  whole.title = "Colours of the same quantity mean the same in all completions of the step.";
  let tops = null; // of the step, by quantity
  byStep.addEventListener("change", async () => {
    tops = byStep.checked ? await data.scales().catch(() => null) : null;
    byStep.checked = Boolean(tops);
    painted = null;
    paint();
  });
  bar.append(label, legend, ...(data.scales ? [whole] : []));
  const meaning = element("p", "dim meaning");

  // The prompt, folded; the tokens; the numbers of the one that is looked at.
  const prompt = element("details", "prompt-tokens");
  prompt.append(element("summary", "", `Prompt, ${data.prompt.ids.length} tokens, never trained on`));
  const promptText = element("div", "tokens");
  prompt.append(promptText);
  prompt.addEventListener("toggle", () => {
    if (!promptText.firstChild) data.prompt.ids.forEach((_, n) => promptText.append(tokenNode(data.prompt, n)));
  });
  const box = element("div", "tokens");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", `${count} tokens. Arrow keys go from token to token.`);
  const more = element("button", "more");
  const numbers = element("div", "numbers");
  numbers.setAttribute("role", "status");
  view.append(bar, meaning, ...(data.prompt.ids.length ? [prompt] : []), box, more, numbers);

  const spans = [];
  const starts = new Map(data.turns.map(([start, end], n) => [start, `turn ${n + 1}, the model's`]));
  data.turns.forEach(([, end], n) => {
    if (!starts.has(end) && end < count) starts.set(end, `answer to turn ${n + 1}`);
  });

  function show(until) {
    const made = document.createDocumentFragment();
    for (let place = spans.length; place < Math.min(until, count); place++) {
      if (starts.has(place)) made.append(element("div", "turn-mark", starts.get(place)));
      const span = tokenNode(side, place);
      span.dataset.place = place;
      spans.push(span);
      made.append(span);
    }
    box.append(made);
    more.hidden = spans.length >= count;
    more.textContent = `Show ${Math.min(CHUNK, count - spans.length)} more of ${count} tokens`;
    paint();
  }

  let painted = null;
  function paint() {
    const name = select.value;
    const values = columns[name];
    if (!values) return;
    const [colour, ends] = scale(QUANTITIES[name][2], values, name, columns.trained, tops?.[name]);
    const from = painted === name ? Number(box.dataset.painted ?? 0) : 0;
    for (let place = from; place < spans.length; place++) {
      const masked = columns.trained && !columns.trained[place];
      spans[place].style.backgroundColor = values[place] === null || (masked && name !== "trained") ? "" : colour(values[place]);
      spans[place].classList.toggle("masked", Boolean(masked));
    }
    painted = name;
    box.dataset.painted = spans.length;
    meaning.textContent = QUANTITIES[name][1] + (name === "trained" || !columns.trained ? "" : "; masked tokens are grey and underlined");
    legend.replaceChildren(...(ends ?? [["hsl(214 95% 88%)", "trained"], ["hsl(220 13% 91%)", "masked"]]).map(([tone, text]) => {
      const swatch = element("span", "swatch", text);
      swatch.style.backgroundColor = tone;
      return swatch;
    }));
  }

  let at = -1;
  function look(place, scroll) {
    if (place < 0 || place >= count) return;
    if (place >= spans.length) show(place + CHUNK);
    spans[at]?.classList.remove("at");
    at = place;
    spans[at].classList.add("at");
    if (scroll) spans[at].scrollIntoView({ block: "nearest" });
    const list = element("dl");
    const add = (term, value) => {
      const made = element("dd");
      made.append(value);
      const pair = element("div");
      pair.append(element("dt", "", term), made);
      list.append(pair);
    };
    add("token", `${place + 1} of ${count}`);
    const text = element("span", "token");
    text.append(nodes(JSON.stringify(side.text[place])));
    add("text", text);
    add("id", `${side.ids[place]}${side.specials.has(place) ? ", special" : ""}`);
    if (side.bytes[place]) add("bytes", side.bytes[place]);
    known.forEach((name) => {
      const value = columns[name][place];
      add(QUANTITIES[name][0], name === "trained" ? (value ? "trained" : "masked") : short(value));
    });
    numbers.replaceChildren(list);
  }

  box.addEventListener("mouseover", (event) => {
    const span = event.target.closest("[data-place]");
    if (span) look(Number(span.dataset.place), false);
  });
  box.addEventListener("focus", () => at < 0 && look(0, false));
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100, PageUp: -100 };
    if (event.key in moves) look(Math.max(0, Math.min(count - 1, at + moves[event.key])), true);
    else if (event.key === "Home") look(0, true);
    else if (event.key === "End") look(count - 1, true);
    else return;
    event.preventDefault();
  });
  more.addEventListener("click", () => show(spans.length + CHUNK));
  select.addEventListener("change", () => {
    paint();
    onChoice(select.value);
  });
  if (known.length) select.value = known.includes(chosen) ? chosen : known[0];
  else bar.replaceChildren(element("span", "dim", data.note ?? "Of these tokens the ids were kept, and no numbers."));
  show(CHUNK);
  numbers.append(element("p", "dim", "Hover over a token, or press Tab and the arrow keys, for its numbers."));
  return view;
}
