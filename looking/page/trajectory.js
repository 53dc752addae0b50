// One trajectory: its scores, turn by turn with calls and answers, then token by token.
import { get, h, link, long, remember, said, short } from "./dom.js";
import { tokenView } from "./tokens.js";

const pairs = (list) => h("dl", { class: "pairs" }, list.map(([term, value]) => h("div", {}, h("dt", {}, said(term)), h("dd", {}, said(value)))));

function call(one) {
  const known = new Set(["name", "arguments", "result", "seconds", "failed"]);
  const more = Object.entries(one).filter(([name, value]) => !known.has(name) && value !== null);
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  return h("div", { class: one.failed ? "call failed" : "call" }, h("b", {}, said(one.name)), one.failed ? h("strong", {}, " failed") : null,
    h("span", { class: "dim" }, typeof one.seconds === "number" ? ` ${one.seconds.toFixed(2)} s` : ""),
    one.arguments === undefined || one.arguments === null ? null : long(text(one.arguments), 2000, { class: "code" }),
    one.result === undefined || one.result === null ? null : h("div", {}, h("span", { class: "dim" }, "result "), long(text(one.result), 2000, { class: "code" })),
    more.length ? pairs(more.map(([name, value]) => [name, text(value)])) : null);
}

function turn(one, n) {
  const reward = one.reward ? h("span", { class: "dim" }, ` reward ${short(one.reward)}`) : null;
  const state = one.state === null || one.state === undefined ? null : h("details", {}, h("summary", {}, "state of the environment"), long(typeof one.state === "string" ? one.state : JSON.stringify(one.state, null, 1), 4000, { class: "code" }));
  return h("section", { class: "turn" }, h("h3", {}, `Turn ${n + 1}`, reward), long(one.text, 8000, { class: "own" }), one.calls.map(call),
    one.observation.length ? [h("p", { class: "dim" }, "answered:"), one.observation.map((part) => long(part, 4000, { class: "answer" }))] : null, state);
}

export async function trajectoryView(content, parameters, signal) {
  const place = { run: parameters.get("run"), kind: parameters.get("kind") ?? "completions", step: parameters.get("step"), row: Number(parameters.get("row") ?? 0) };
  content.append(h("p", { class: "dim" }, "…"));
  let found;
  try {
    found = await get("row", place);
  } catch (error) {
    content.replaceChildren(h("div", { class: "note watch" }, said(error.message)), h("p", {}, h("a", { href: link("trajectories", { run: place.run }) }, "Other trajectories")));
    return;
  }
  if (signal.aborted) return;
  const other = (row, label, key) => h("a", { class: "button", href: link("trajectory", { ...place, row, colour: parameters.get("colour") }), title: `key ${key}`, "aria-disabled": row < 0 || row >= found.total ? "true" : undefined }, label);
  const about = [["reward", short(found.reward)], ...Object.entries(found.rewards).map(([name, value]) => [name, short(value)]), ["advantage", short(found.advantage)],
    ["length", found.length ?? "–"], ["ended by", found.finish_reason ?? "–"], ["domain", found.domain], ["policy version", found.policy_version], ["row", found.row_number], ["origin", found.origin]];
  const several = found.turns.length > 0;
  const picture = found.picture ? h("img", { class: "picture", alt: "the row's image, as it was kept", src: `/api/picture?${new URLSearchParams(place)}` }) : null;
  const tokens = h("div");
  content.replaceChildren(
    h("div", { class: "bar" }, h("h1", {}, `${place.kind === "evaluations" ? "Held-out completion" : "Completion"} ${place.row}`, h("span", { class: "dim" }, ` of step ${place.step}`)),
      other(place.row - 1, "← previous", "k"), other(place.row + 1, "next →", "j"), h("span", { class: "space" }),
      h("a", { class: "button", href: link("row", place) }, "The same prompt over time")),
    h("div", { class: "card" }, pairs(about.filter(([, value]) => value !== null && value !== undefined))),
    h("div", { class: "columns even" }, h("div", {}, h("div", { class: "card" }, h("h2", {}, "Prompt"), picture, long(found.prompt, 4000)),
      h("div", { class: "card" }, h("h2", {}, several ? `${found.turns.length} turns` : "Completion"), several ? found.turns.map(turn) : long(found.completion, 8000, { class: "own" }),
        Object.keys(found.other).length ? h("details", {}, h("summary", {}, "more columns"), pairs(Object.entries(found.other))) : null)),
      h("div", { class: "card" }, h("h2", {}, "Tokens"), tokens)));

  const keys = (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const to = { j: place.row + 1, k: place.row - 1 }[event.key];
    if (to >= 0 && to < found.total) location.hash = link("trajectory", { ...place, row: to, colour: parameters.get("colour") });
  };
  addEventListener("keydown", keys, { signal });

  if (!found.tokens) {
    tokens.append(h("p", { class: "dim" }, "The tokens of this step were not kept. See docs/looking.md."));
    return;
  }
  try {
    const data = { ...(await get("tokens", place)), scales: () => get("scales", place) };
    if (signal.aborted) return;
    tokens.append(data.completion ? tokenView(data, parameters.get("colour") ?? "trained", (colour) => {
      parameters.set("colour", colour);
      remember("trajectory", { ...place, colour });
    }) : h("p", { class: "dim" }, "The tokens of this row were not kept."));
  } catch (error) {
    if (!signal.aborted) tokens.append(h("div", { class: "note watch" }, said(error.message)));
  }
}
