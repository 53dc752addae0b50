// What can be seen before a run: rows as the model will see them, rewards of completions, tools and environments.
import { h, long, post, said, short } from "./dom.js";
import { doer, failure, printedBy } from "./prepare.js";
import { tokenView } from "./tokens.js";

const pairs = (list) => h("dl", { class: "pairs" }, list.map(([term, value]) => h("div", {}, h("dt", {}, said(term)), h("dd", {}, said(value)))));
const tile = (label, value, note) => h("div", { class: "card tile" }, h("p", { class: "dim" }, label), h("div", { class: "big" }, value), h("p", { class: "dim" }, note));
const number = (label, value, change, attributes = {}) => {
  const input = h("input", { type: "number", class: "step", min: "0", value: String(value), "aria-label": label, onchange: () => change(Number(input.value)), ...attributes });
  return input;
};

// ---- rows ----

/** Before a number of tokens: of very many rows on disk, an upper bound is known of those that fit. */
const atMost = (part, tokens) => (part.bounds && tokens <= part.limit ? "at most " : "");

/** Prompt lengths, and where --max_prompt_length cuts. */
function histogram(part) {
  const most = Math.max(...part.counts, 1);
  const end = part.edges.at(-1);
  const bars = h("div", { class: "histogram", role: "img", "aria-label": `Prompts by tokens: median ${atMost(part, part.median)}${part.median}, longest ${atMost(part, part.longest)}${part.longest}, limit ${part.limit}` });
  part.counts.forEach((count, n) => {
    const bar = h("i", { class: part.edges[n] > part.limit ? "out" : "", title: `${part.edges[n]} to ${part.edges[n + 1] - 1} tokens: ${count}` });
    bar.style.left = `${(100 * part.edges[n]) / end}%`;
    bar.style.width = `${(100 * (part.edges[n + 1] - part.edges[n])) / end}%`;
    bar.style.height = count ? `${Math.max(2, (100 * count) / most)}%` : "0";
    bars.append(bar);
  });
  if (part.limit < end) {
    const line = h("b", {}, h("span", {}, String(part.limit)));
    line.style.left = `${(100 * part.limit) / end}%`;
    bars.append(line);
  }
  return h("div", {}, bars, h("p", { class: "dim axis" }, h("span", {}, "0"), h("span", {}, part.bounds ? "tokens of the prompt, at most: most of those that fit are known by their bytes" : "tokens of the prompt"), h("span", {}, String(end - 1))));
}

/** A file whose rows have no prompt: a python file that makes one of a column. */
function mapping(work, found, again) {
  const names = Object.keys(found.file.first);
  const guess = names.find((name) => /prompt|question|problem|input|instruction/i.test(name)) ?? names[0];
  const column = h("select", { "aria-label": "Column with the question" }, names.map((name) => h("option", {}, name)));
  column.value = guess;
  const target = h("div");
  const make = doer(work, "Write a python file that does this", target, () => work.send("write", { kind: "rows", file: found.file.path, prompt: column.value }), (made) => {
    work.set("dataset_id", made.spec);
    work.listeners.forEach((listener) => listener(work.told));
    again();
    return h("p", {}, h("code", {}, made.path), " is written, and read.");
  }, { class: "primary" });
  return h("div", { class: "card" }, h("h2", {}, "Which column is the question?"), h("p", {}, "Each row needs a column ", h("code", {}, "prompt"), ". A python file that is written for you can make it from yours; it also keeps every tenth row out of training, so that ", h("code", {}, "--eval_steps"), " can tell whether the model learns."),
    pairs(Object.entries(found.file.first)), h("div", { class: "bar" }, column, make), target);
}

export function rowsTab(work, result, card) {
  const detail = h("div");
  const list = h("div");
  let parts = [];
  const open = doer(work, "Read the rows", list, () => work.ask("rows"), (found) => {
    parts = found.parts;
    detail.replaceChildren();
    const made = [found.error ? h("div", { class: "note bad", role: "alert" }, said(found.error)) : null, ...parts.map(partOf),
      found.file ? mapping(work, found, () => open.run()) : null, printedBy(found)];
    if (parts.length) showRow(Math.min(work.row, parts[0].count - 1), 0);
    return made;
  }, { class: "primary" });
  const drop = h("label", { class: "drop" }, "or drop a .jsonl, .csv, .json or .parquet file here ", h("input", { type: "file", accept: ".jsonl,.csv,.json,.parquet", onchange: (event) => take(event.target.files[0]) }));
  async function take(file) {
    if (!file) return;
    try {
      const made = await post(`drop?name=${encodeURIComponent(file.name)}`, file, "application/octet-stream");
      work.set("dataset_id", made.path);
      work.listeners.forEach((listener) => listener(work.told));
      open.run();
    } catch (error) {
      list.replaceChildren(failure(error));
    }
  }
  for (const name of ["dragover", "drop"]) card.addEventListener(name, (event) => {
    event.preventDefault();
    if (name === "drop") take(event.dataTransfer.files[0]);
  });
  card.actions.append(open, drop);
  result.append(list, detail);

  function partOf(part) {
    const steps = part.first_step.length ? h("button", { type: "button", class: "quiet", onclick: () => showRow(part.first_step[0], part.part) }, `the first step takes rows ${part.first_step.slice(0, 6).join(", ")}${part.first_step.length > 6 ? " …" : ""}`) : null;
    return h("div", { class: "card" }, h("h2", {}, said(`${part.use === "train" ? "Trained on" : "Held out"}: ${part.name}`)),
      h("div", { class: "tiles" }, tile("rows", part.count.toLocaleString("en"), part.columns.join(", ")), tile("left out", part.left_out.toLocaleString("en"), `longer than --max_prompt_length ${part.limit}`),
        tile("tokens, median", `${atMost(part, part.median)}${short(part.median)}`, `longest ${atMost(part, part.longest)}${part.longest}`)), histogram(part), steps,
      h("div", { class: "rows-list scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["row", "tokens", "prompt"].map((name, n) => h("th", { class: n < 2 ? "n" : "" }, name)))),
        h("tbody", {}, part.rows.map((row) => h("tr", { class: row.tokens > part.limit ? "out" : "" }, h("td", { class: "n" }, h("button", { type: "button", class: "sort", "aria-label": `Show row ${row.row}`, onclick: () => showRow(row.row, part.part) }, String(row.row))),
          h("td", { class: "n" }, String(row.tokens), row.tokens > part.limit ? h("span", { class: "fault" }, " left out") : null), h("td", {}, said(row.text))))))));
  }

  function showRow(row, part) {
    const count = parts[part].count;
    work.row = row;
    work.keep();
    const target = h("div");
    const go = (other) => showRow(Math.max(0, Math.min(count - 1, other)), part);
    detail.replaceChildren(h("div", { class: "card" }, h("div", { class: "bar" }, h("h2", {}, "Row "), number("Row", row, go, { max: String(count - 1) }), h("span", { class: "dim" }, `of ${count}, as the model will see it`),
      h("button", { type: "button", onclick: () => go(row - 1) }, "←"), h("button", { type: "button", onclick: () => go(row + 1) }, "→"), h("button", { type: "button", onclick: () => go(Math.floor(Math.random() * count)) }, "random")), target));
    doer(work, "", target, () => work.ask("row", { row, part }), (found) => [
      h("p", { class: "dim" }, `${found.length} tokens of at most ${found.limit}; ${found.generations} completions will be sampled of it.`),
      ...found.images.map((source) => h("img", { class: "picture", alt: "an image of the row, as the model gets it", src: source })),
      tokenView({ ...found.tokens, note: "Special tokens are bold. The model's answer begins at the end." }),
      h("h3", {}, "Columns, which rewards get by name"), h("dl", { class: "columns-of" }, Object.entries(found.columns).flatMap(([name, value]) => [h("dt", {}, said(name)), h("dd", {}, long(value, 1500))]))]).run();
  }
  if (work.settings.dataset_id || work.settings.config) work.begin(open, list);
}

// ---- rewards ----

export function rewardsTab(work, result, card) {
  let completions = (work.completions ??= [{ text: "" }, { text: "" }]); // they stay while other tabs are looked at
  const boxes = h("div");
  const prompt = h("div");
  const target = h("div");
  const size = number("How many to sample", 4, () => {}, { min: "1", max: "64" });
  const about = () => ({ row: work.row, part: 0 });
  function draw() {
    boxes.replaceChildren(...completions.map((one, n) => {
      const area = h("textarea", { rows: "3", "aria-label": `Completion ${n + 1}`, spellcheck: "false", oninput: () => { completions[n] = { text: area.value }; } });
      area.value = one.text;
      return h("div", { class: "typed" }, h("span", { class: "dim" }, String(n + 1)), area, h("button", { type: "button", class: "quiet", "aria-label": `Take completion ${n + 1} out`, onclick: () => { completions.splice(n, 1); draw(); } }, "×"));
    }));
  }
  draw();
  const show = (found) => {
    if (!found.several) {
      completions = work.completions = found.completions.map(({ text, ids, finish }) => ({ text, ids, finish }));
      draw();
    }
    return [...found.notes.map((note) => h("p", { class: "note watch" }, said(note))), functionsOf(found.functions, found.completions), ...(found.functions.some((one) => one.error) ? [] : found.completions).map((one, n) => scoredCard(one, n, found)), printedBy(found)];
  };
  const score = doer(work, "Score them", target, () => work.ask("score", { ...about(), completions }), show, { class: "primary" });
  const sample = doer(work, "Sample", target, () => work.ask("score", { ...about(), sample: { n: Number(size.value) } }), show);
  const peek = doer(work, "show its prompt", prompt, () => work.ask("row", about()), (found) => [long(found.text, 1500, { class: "answer" }), h("dl", { class: "columns-of" }, Object.entries(found.columns).filter(([name]) => name !== "prompt").flatMap(([name, value]) => [h("dt", {}, said(name)), h("dd", {}, long(value, 600))]))]);
  const begun = h("div");
  const begin = doer(work, "Begin a reward of my own", begun, async () => {
    const { columns, text } = await work.ask("row", about());
    const asked = (name) => (text.includes(String(columns[name])) ? String(columns[name]).length : 0);
    const others = Object.keys(columns).filter((name) => name !== "prompt").sort((a, b) => asked(a) - asked(b)); // the question last
    const answer = others.find((name) => /answer|solution|target|label/i.test(name)) ?? others[0];
    return work.send("write", { kind: "reward", answer });
  }, (made) => {
    work.set("reward_funcs", made.spec);
    work.listeners.forEach((listener) => listener(work.told));
    return h("p", { class: "note" }, h("code", {}, made.path), ` is written, for an answer in the column ${made.answer}: open it in your editor and change it. It is read again each time you press “Score them”.`);
  });
  card.actions.append(begin, begun);
  result.append(h("div", { class: "card" }, h("div", { class: "bar" }, h("h2", {}, "Row"), number("Row", work.row, (value) => { work.row = value; work.keep(); peek.run(); }), peek), prompt,
    h("h2", {}, "Completions"), boxes, h("div", { class: "bar" }, h("button", { type: "button", onclick: () => { completions.push({ text: "" }); draw(); boxes.lastChild.querySelector("textarea").focus(); } }, "one more"), score, h("span", { class: "space" }),
      h("label", {}, "or sample some from the model as it is now: ", size, " "), sample)), target);
  if (work.settings.dataset_id || work.settings.config) work.begin(peek, prompt);
}

function functionsOf(functions, completions) {
  const cell = (value) => h("td", { class: "n" }, value === null ? h("span", { class: "dim" }, "none") : short(value));
  const table = h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "function"), h("th", { class: "n" }, "weight"), h("th", { class: "n" }, "seconds"), completions.map((_, n) => h("th", { class: "n" }, String(n + 1))))),
    h("tbody", {}, functions.map((one) => h("tr", {}, h("td", {}, h("code", {}, said(one.name)), one.late ? h("span", { class: "fault" }, " over --reward_timeout") : null), h("td", { class: "n" }, short(one.weight)), h("td", { class: "n" }, one.seconds.toFixed(3)), completions.map((_, n) => (one.error ? h("td", { class: "n fault" }, "–") : cell(one.values[n]))))),
      functions.some((one) => one.error) ? null : [["reward", "reward"], ["advantage", "advantage"]].map(([key, label]) => h("tr", { class: "sum" }, h("td", {}, h("b", {}, label)), h("td"), h("td"), completions.map((one) => cell(one[key]))))));
  return h("div", { class: "card" }, h("h2", {}, "Rewards"), h("div", { class: "scroll" }, table), functions.map((one) => [one.error ? h("div", { class: "note bad", role: "alert" },
    one.where ? h("p", {}, h("b", {}, said(`${one.where.file}, line ${one.where.line}: `)), h("code", {}, said(one.where.text ?? ""))) : null, said(one.error), one.where?.trace ? h("details", {}, h("summary", {}, "how it came there"), said(one.where.trace, {}, "pre")) : null) : null,
    one.said?.trim() ? h("details", { open: true }, h("summary", {}, said(`${one.name} printed`)), said(one.said, {}, "pre")) : null]));
}

function scoredCard(one, n, found) {
  const parts = found.functions.flatMap((f) => Object.entries(f.components[n] ?? {}).map(([name, value]) => [`${f.name}: ${name}`, short(value)]));
  return h("details", { class: "card" }, h("summary", {}, `completion ${n + 1}: reward ${short(one.reward)}`, one.advantage === null ? "" : `, advantage ${short(one.advantage)}`, h("span", { class: "dim" }, ` ${one.length} tokens, ended by ${one.finish}`)),
    pairs(parts), one.turns.map((turn) => [long(turn.text, 3000, { class: "own" }), turn.observation.map((text) => long(text, 2000, { class: "answer" }))]), one.tokens ? tokenView(one.tokens, "trained") : null);
}

// ---- tools and environments ----

export function toolsTab(work, result, card) {
  const list = h("div");
  const stage = h("div");
  const about = () => ({ row: work.row, part: 0 });
  let actions = [];
  const look = doer(work, "Show what the model is told", list, () => work.ask("tools", about()), (found) => {
    if (!found.several) return h("p", { class: "note watch" }, "There is no --env, --tools or --mcp_config: the model answers once.");
    return [found.tools.length ? h("div", { class: "card" }, h("h2", {}, "Tools"), found.tools.map((tool) => toolCard(tool)), h("h3", {}, "How it is told"), long(found.told, 1500, { class: "answer" })) : h("p", { class: "dim" }, "No tools: the environment reads the text."), printedBy(found)];
  }, { class: "primary" });
  const begin = doer(work, "Play it as the model", stage, () => work.ask("play", about()), (found) => {
    actions = found.actions;
    return turnOf(found);
  });
  card.actions.append(...[h("label", {}, "row ", number("Row", work.row, (value) => { work.row = value; work.keep(); })), look, begin]);
  result.append(list, stage);

  function toolCard(tool) {
    const properties = Object.entries(tool.parameters.properties ?? {});
    const needed = new Set(tool.parameters.required ?? []);
    const area = h("textarea", { rows: "2", "aria-label": `Arguments of ${tool.name}, as JSON`, spellcheck: "false" });
    area.value = JSON.stringify(Object.fromEntries(properties.filter(([name]) => needed.has(name)).map(([name, about]) => [name, about.type === "string" ? "" : about.type === "boolean" ? false : about.type === "array" ? [] : 0])));
    const target = h("div");
    const run = doer(work, "Call it", target, () => work.ask("call", { ...about(), name: tool.name, arguments: area.value }), (found) => h("div", { class: found.failed ? "call failed" : "call" }, h("span", { class: "dim" }, `${found.seconds.toFixed(2)} s`), found.failed ? h("strong", {}, " failed") : null, long(found.content, 4000, { class: "code" })));
    return h("section", { class: "turn" }, h("h3", {}, h("code", {}, said(tool.name))), said(tool.description), h("table", {}, h("tbody", {}, properties.map(([name, about]) => h("tr", {}, h("td", {}, h("code", {}, said(name))), h("td", { class: "dim" }, said([].concat(about.type ?? "any").join(" or ") + (needed.has(name) ? "" : ", optional"))), h("td", {}, said(about.description ?? "")))))),
      h("div", { class: "typed" }, area, run), target);
  }

  function turnOf(found) {
    if (found.over) return [h("div", { class: "card" }, h("h2", {}, `Over: reward ${short(found.reward)}`), h("p", { class: "dim" }, `ended by ${found.finish}, ${found.turns.length} turns`), tokenView(found.tokens, "trained")), functionsOf(found.functions, [{ reward: found.reward, advantage: null }]), printedBy(found)];
    const area = h("textarea", { rows: "3", "aria-label": "Your turn, as the model", spellcheck: "false" });
    const send = doer(work, "Say it", stage, () => work.ask("say", { text: area.value }), turnOf, { class: "primary" });
    area.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send.run(); });
    setTimeout(() => area.focus());
    const first = !found.tokens.completion.ids.length;
    const view = first ? { ...found.tokens, prompt: { ids: [], text: [], special: [], bytes: {} }, completion: found.tokens.prompt, columns: {}, turns: [], note: "the prompt" } : found.tokens;
    return [h("div", { class: "card" }, h("h2", {}, first ? "The prompt" : "So far"), first ? null : long(found.answer, 3000, { class: "answer" }), tokenView(view, "trained")),
      h("div", { class: "card" }, h("h2", {}, "Your turn"), h("div", { class: "bar" }, actions.map((text) => h("button", { type: "button", onclick: () => { area.value = text; send.run(); } }, said(text)))), h("div", { class: "typed" }, area, send), h("p", { class: "dim" }, `at most ${found.left} tokens are left; Ctrl-Enter sends`))];
  }
  work.begin(look, list);
}
