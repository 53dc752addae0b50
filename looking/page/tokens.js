// The token view: every token of a trajectory, coloured by a quantity; hovering or the arrow keys give its numbers.
import { h, nodes, said, short } from "./dom.js";

// name: [label, what its colours mean, kind of scale, the least end of the scale]
const QUANTITIES = {
  trained: ["trained or masked", "blue: in the loss; grey: masked, not learned from", "trained"],
  advantage: ["advantage", "blue: more of this; orange: less", "signed", 1e-6],
  weight: ["weight in the loss", "minus the derivative of the loss by the token's log-prob, after clipping and correction: " +
    "blue: pushed up; orange: pushed down; white: 0, as where it is clipped", "signed", 1e-6],
  logprob: ["log-prob", "the trainer's; the darker, the less likely", "down", 0.5],
  entropy: ["entropy", "of the policy at this token; the darker, the less certain", "up", 0.1],
  difference: ["trainer minus sampler", "of the log-probs of the same token; blue: the trainer finds it likelier; white: they agree", "signed", 0.05],
  teacher_logprob: ["teacher's log-prob", "the darker, the less likely the teacher finds it", "down", 0.5],
  gap: ["teacher minus policy", "of the log-probs of the same token; blue: the teacher finds it likelier; orange: less likely", "signed", 0.5],
  version: ["policy version", "the weights that sampled it, a colour each", "kinds"],
};
const TRAINED = "hsl(214 95% 88%)", MASKED = "hsl(220 13% 91%)";

/** [(value) -> a CSS colour, light enough for dark text; colours and words for the legend] */
function scale(name, values) {
  const [, , kind, least] = QUANTITIES[name];
  if (kind === "trained") return [(value) => (value ? TRAINED : MASKED), [[TRAINED, "trained"], [MASKED, "masked"]]];
  const known = values.filter((value) => value !== null);
  if (kind === "kinds") {
    const versions = [...new Set(known)].filter((value) => value !== 0).sort((a, b) => a - b); // 0: not sampled, or the first
    const colour = (value) => `hsl(${(versions.indexOf(value) * 67 + 210) % 360} 80% 86%)`;
    return [colour, versions.slice(0, 12).map((value) => [colour(value), String(value)])];
  }
  const sizes = known.map(Math.abs).sort((a, b) => a - b);
  const top = Math.max(sizes[Math.floor(0.98 * sizes.length)] ?? 0, least); // a few extremes do not pale the others
  const hues = { up: "270 85%", down: "350 90%" };
  const colour = (value) => {
    const hue = kind === "signed" ? (value < 0 ? "28 95%" : "214 95%") : hues[kind];
    return `hsl(${hue} ${100 - 28 * Math.min(Math.abs(value) / top, 1)}%)`;
  };
  const ends = { signed: [-top, 0, top], down: [0, -top / 2, -top], up: [0, top / 2, top] }[kind];
  return [colour, ends.map((value) => [colour(value), short(value)])];
}

/** A token of {text, special, bytes}; blanks and the parts of a character are made visible. */
function tokenNode(side, place) {
  const text = side.text[place];
  const made = h("span", { class: side.special.includes(place) ? "token special" : "token", "data-place": String(place) });
  if (text === "") made.append(h("span", { class: "hidden-mark" }, side.bytes[place] ?? "empty"));
  else if (/^[^\S\n]+$/.test(text)) made.append(text.replaceAll(" ", "␣").replaceAll("\t", "⇥"));
  else text.replaceAll("\t", "⇥").split("\n").forEach((part, n) => {
    if (n) made.append(h("span", { class: "newline" }, "⏎"), "\n");
    made.append(nodes(part));
  });
  return made;
}

/** The view as an element. data: `tokens` of runfiles/samples.py. chosen: the quantity to begin with; onChoice(name): called with another one. */
export function tokenView(data, chosen, onChoice = () => {}) {
  const side = data.completion;
  const count = side.ids.length;
  const columns = { ...data.columns };
  const sampler = columns.sampler_logprob;
  for (const [name, of] of [["difference", columns.logprob], ["gap", columns.teacher_logprob]]) {
    if (of && sampler) columns[name] = of.map((value, n) => (value === null || sampler[n] === null ? null : value - sampler[n]));
  }
  const known = Object.keys(QUANTITIES).filter((name) => columns[name]);
  let at = -1;

  const select = h("select", { onchange: () => { paint(); onChoice(select.value); } },
    known.map((name) => h("option", { value: name }, QUANTITIES[name][0])));
  if (known.length) select.value = known.includes(chosen) ? chosen : known[0];
  const legend = h("span", { class: "legend" });
  const meaning = h("p", { class: "dim meaning" });
  const prompt = h("details", { class: "prompt-tokens", ontoggle: () => {
    if (prompt.children.length < 2) prompt.append(h("div", { class: "tokens" }, data.prompt.ids.map((_, n) => tokenNode(data.prompt, n))));
  } }, h("summary", {}, `Prompt, ${data.prompt.ids.length} tokens, never trained on`));
  const box = h("div", { class: "tokens", tabIndex: 0, role: "group", "aria-label": `${count} tokens. Arrow keys go from token to token.` });
  const numbers = h("div", { class: "numbers", role: "status" }, h("p", { class: "dim" }, "Hover over a token, or press Tab and the arrow keys, for its numbers."));

  const starts = new Map(); // where a turn or an answer begins
  for (const [n, [start, end]] of data.turns.entries()) {
    if (n && data.turns[n - 1][1] < start) starts.set(data.turns[n - 1][1], `answer to turn ${n}`);
    starts.set(start, `turn ${n + 1}, the model's`);
    if (n === data.turns.length - 1 && end < count) starts.set(end, `answer to turn ${n + 1}`);
  }

  const spans = side.ids.map((_, place) => tokenNode(side, place));
  for (const [place, span] of spans.entries()) {
    if (starts.has(place)) box.append(h("div", { class: "turn-mark" }, starts.get(place)));
    box.append(span);
  }

  function paint() {
    const name = select.value;
    if (!name) return;
    const [colour, ends] = scale(name, columns[name]);
    for (let place = 0; place < count; place++) {
      const masked = columns.trained?.[place] === false;
      const value = columns[name][place];
      spans[place].style.backgroundColor = value === null || (masked && name !== "trained") ? "" : colour(value);
      spans[place].classList.toggle("masked", masked);
    }
    meaning.textContent = QUANTITIES[name][1] + (name === "trained" ? "" : "; masked tokens are grey and underlined");
    legend.replaceChildren(...ends.map(([tone, text]) => {
      const made = h("span", { class: "swatch" }, text);
      made.style.backgroundColor = tone;
      return made;
    }));
  }

  function look(place, scroll) {
    spans[at]?.classList.remove("at");
    at = place;
    spans[at].classList.add("at");
    if (scroll) spans[at].scrollIntoView({ block: "nearest" });
    const shown = [["token", `${place + 1} of ${count}`], ["text", JSON.stringify(side.text[place])], ["id", side.ids[place]]];
    if (side.bytes[place]) shown.push(["bytes", side.bytes[place]]);
    for (const name of known) {
      const value = columns[name][place];
      shown.push([QUANTITIES[name][0], name === "trained" ? (value ? "trained" : "masked") : short(value)]);
    }
    numbers.replaceChildren(h("dl", {}, shown.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, said(value))))));
  }

  box.addEventListener("mouseover", (event) => {
    const span = event.target.closest("[data-place]");
    if (span) look(Number(span.dataset.place), false);
  });
  box.addEventListener("focus", () => at < 0 && count && look(0, false));
  box.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100, PageUp: -100, Home: -count, End: count };
    if (!(event.key in moves) || !count) return;
    look(Math.max(0, Math.min(count - 1, at + moves[event.key])), true);
    event.preventDefault();
  });
  paint();
  const bar = known.length ? [h("label", {}, "Colour by ", select), legend] : h("span", { class: "dim" }, "Of these tokens the ids were kept, and no numbers.");
  return h("section", { class: "token-view", "aria-label": "Tokens" }, h("div", { class: "bar" }, bar), meaning, prompt, box, numbers);
}
