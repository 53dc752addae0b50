// Before a run: a row as the model reads it, and what completions are worth. scripts/try.py computes it.
import { get, h, said, score, short } from "./dom.js";

const tokens = (pieces, trained) => h("p", { class: "try-tokens" },
  pieces.map((piece, n) => h("span", { class: `token${trained && !trained[n] ? " dim" : ""}`, title: `token ${n}` }, said(piece.replaceAll("\n", "\u23ce\n")))));

function group(found) {
  const rewards = found.completions.map((one) => one.reward);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const names = Object.keys(found.completions[0].rewards);
  const head = h("tr", {}, ["reward", "advantage", ...names, "tokens", "end", "completion"].map((name) => h("th", {}, said(name))));
  const rows = found.completions.map((one) => h("tr", {}, h("td", { class: "n" }, score(one.reward, low, high)), h("td", { class: "n" }, short(one.advantage)),
    names.map((name) => h("td", { class: "n" }, short(one.rewards[name]))), h("td", { class: "n" }, String(one.tokens.length)), h("td", {}, said(one.finish_reason)),
    h("td", {}, tokens(one.tokens, one.trained))));
  return h("div", { class: "card scroll" }, h("h2", {}, "Completions"), h("table", {}, h("thead", {}, head), h("tbody", {}, rows)));
}

function shown(found) {
  const { median, longest, limit } = found.prompt_tokens;
  const columns = Object.entries(found.row).map(([name, value]) => h("tr", {}, h("th", {}, said(name)), h("td", {}, said(value))));
  return [
    h("p", {}, `${found.rows} rows, ${found.held_out} held out. Tokens of the first 100 prompts: median ${median}, longest ${longest}, limit ${limit}.`),
    h("div", { class: "card scroll" }, h("h2", {}, "The row"), h("table", {}, h("tbody", {}, columns)), h("h3", {}, `The prompt, ${found.prompt.length} tokens`), tokens(found.prompt)),
    found.completions ? group(found) : null,
    h("p", { class: "dim" }, "To train: ", said(found.command)),
  ].filter(Boolean);
}

export async function tryView(content) {
  const row = h("input", { type: "number", min: "0", value: "0", "aria-label": "Row" });
  const sample = h("input", { type: "number", min: "0", value: "0", "aria-label": "Completions to sample" });
  const texts = h("textarea", { rows: "4", "aria-label": "Completions", placeholder: "completions to score; an empty line between two" });
  const result = h("div", { role: "status" });
  async function ask(event) {
    event?.preventDefault();
    result.replaceChildren(h("p", { class: "dim" }, "Working; loading the model's tokenizer takes some seconds ..."));
    const completion = texts.value.trim() ? texts.value.split(/\n\s*\n/) : [];
    const asked = { row: row.value, sample: Number(sample.value) || null, completion };
    const found = await get("try", asked).catch((error) => [h("pre", { class: "error" }, said(error.message))]);
    result.replaceChildren(...(Array.isArray(found) ? found : shown(found)));
  }
  content.append(h("h1", {}, "Try"), h("form", { class: "card try", onsubmit: ask },
    h("label", {}, "Row ", row), h("label", {}, "Sample ", sample, " completions"), texts, h("button", {}, "Try")), result);
  await ask();
}
