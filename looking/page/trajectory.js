// One trajectory: its scores, turn by turn with calls and answers, then token by token.
import { about, get, h, link, long, pairs, remember, said, short } from "./dom.js";
import { tokenView } from "./tokens.js";

function call(one) {
  const seconds = typeof one.seconds === "number" ? ` ${one.seconds.toFixed(2)} s` : "";
  return h("div", { class: one.failed ? "call failed" : "call" }, h("b", {}, said(one.name)), one.failed ? h("strong", {}, " failed") : null,
    h("span", { class: "dim" }, seconds), long(one.arguments, 2000, { class: "code" }),
    h("span", { class: "dim" }, "result "), long(one.result, 2000, { class: "code" }));
}

function turn(one, n) {
  const state = one.state === null ? null : h("details", {}, h("summary", {}, "state of the environment"), long(one.state, 4000, { class: "code" }));
  const reward = one.reward ? h("span", { class: "dim" }, ` reward ${short(one.reward)}`) : null;
  return h("section", { class: "turn" }, h("h3", {}, `Turn ${n + 1}`, reward), long(one.text, 8000, { class: "own" }), one.calls.map(call),
    one.observation.length ? h("p", { class: "dim" }, "answered:") : null, one.observation.map((part) => long(part, 4000, { class: "answer" })), state);
}

export async function trajectoryView(content, parameters, signal) {
  const place = { run: parameters.get("run"), kind: parameters.get("kind") ?? "completions", step: parameters.get("step"), row: Number(parameters.get("row") ?? 0) };
  const found = await get("row", place);
  if (signal.aborted) return;
  const to = (row) => link("trajectory", { ...place, row, colour: parameters.get("colour") });
  const exists = (row) => row >= 0 && row < found.total;
  const other = (row, label, key) => h("a", { class: "button", href: to(row), title: `key ${key}`, "aria-disabled": exists(row) ? undefined : "true" }, label);
  const turns = found.turns.length;
  const tokens = h("div", {}, h("p", { class: "dim" }, "The tokens of this step were not kept. See docs/looking.md."));
  content.append(
    h("div", { class: "bar" }, h("h1", {}, `${place.kind === "evaluations" ? "Held-out completion" : "Completion"} ${place.row}`, h("span", { class: "dim" }, ` of step ${place.step}`)),
      other(place.row - 1, "← previous", "k"), other(place.row + 1, "next →", "j")),
    h("div", { class: "card" }, pairs([["reward", short(found.reward)], ...about(found)])),
    h("div", { class: "columns even" },
      h("div", {},
        h("div", { class: "card" }, h("h2", {}, "Prompt"), found.picture ? h("img", { class: "picture", alt: "the row's image, as it was kept", src: found.picture }) : null, long(found.prompt, 4000)),
        h("div", { class: "card" }, h("h2", {}, turns ? `${turns} turns` : "Completion"), turns ? found.turns.map(turn) : long(found.completion, 8000, { class: "own" }),
          Object.keys(found.other).length ? h("details", {}, h("summary", {}, "more columns"), pairs(Object.entries(found.other))) : null)),
      h("div", { class: "card" }, h("h2", {}, "Tokens"), tokens)));
  addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const row = place.row + { j: 1, k: -1 }[event.key];
    if (exists(row)) location.hash = to(row);
  }, { signal });
  if (!found.tokens) return;
  const data = await get("tokens", place);
  if (signal.aborted) return;
  tokens.replaceChildren(tokenView(data, parameters.get("colour") ?? "trained", (colour) => {
    parameters.set("colour", colour);
    remember("trajectory", { ...place, colour });
  }));
}
