// Before a run: a row as the model reads it, and what completions are worth, in the words of scripts/try.py.
import { get, h, said } from "./dom.js";

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
    const [text, kind] = await get("try", asked).then((found) => [found.text, "card"], (error) => [error.message, "error"]);
    result.replaceChildren(said(text, { class: kind }, "pre"));
  }
  content.append(h("h1", {}, "Try"), h("form", { class: "card try", onsubmit: ask },
    h("label", {}, "Row ", row), h("label", {}, "Sample ", sample, " completions"), texts, h("button", {}, "Try")), result);
  await ask();
}
