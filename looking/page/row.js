// One prompt over time: its completions at each step that has some.
import { get, h, link, long, said, score, short } from "./dom.js";

export async function rowView(content, parameters, signal) {
  const place = { run: parameters.get("run"), kind: parameters.get("kind") ?? "completions", step: parameters.get("step"), row: Number(parameters.get("row") ?? 0) };
  const prompt = h("div", { class: "card" });
  const body = h("tbody");
  const count = h("span", { class: "dim", role: "status" }, "looking …");
  content.append(h("div", { class: "bar" }, h("h1", {}, "The same prompt over time"), count), prompt,
    h("div", { class: "card" }, h("table", { class: "over-time" }, h("thead", {}, h("tr", {}, ["step", "reward", "length", "completion"].map((name) => h("th", {}, name)))), body)));
  let next = 0, number = 0, steps = 0;
  while (next !== null && !signal.aborted) {
    let found;
    try {
      found = await get("over_time", { ...place, from: next });
    } catch (error) {
      count.replaceChildren(said(error.message));
      return;
    }
    if (signal.aborted) return;
    for (const { step, rows } of found.found) {
      steps += 1;
      number += rows.length;
      rows.forEach((one, n) => body.append(h("tr", {}, h("td", { class: "n" }, n ? "" : String(step)), h("td", { class: "n" }, score(one.reward, 0, 1)), h("td", { class: "n" }, short(one.length)),
        h("td", {}, h("a", { class: "aside", href: link("trajectory", { ...place, step, row: one.row }) }, "open"), one.turns.length > 1 ? one.turns.map((turn) => [long(turn.text, 700, { class: "own" }), turn.observation.map((part) => long(part, 300, { class: "answer" }))]) : long(one.completion, 1500, { class: "own" })))));
    }
    if (found.prompt !== undefined) prompt.replaceChildren(h("h2", {}, "Prompt"), long(found.prompt, 3000));
    next = found.next;
    count.textContent = `${number} completions in ${steps} of ${found.files} files` + (next === null ? "" : `, looked at ${next}`);
  }
}
