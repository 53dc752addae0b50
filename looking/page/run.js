// Runs while they train. Of one: what stands out in words, its curves, where the time goes, its settings. Of several:
// their curves over each other, and the settings that differ.
import { age, duration, h, link, poll, remember, said, short } from "./dom.js";
import { Chart, swatch } from "./charts.js";
import { stateOf } from "./runs.js";

const AXES = { step: "step", tokens: "tokens, prompts included", seconds: "seconds of steps" };

const tile = (label, value, note) =>
  h("div", { class: "card tile" }, h("p", { class: "dim" }, label), h("div", { class: "big" }, value), h("p", { class: "dim" }, note));

function tiles(run) {
  const moved = typeof run.first === "number" && run.first !== run.last;
  const left = run.state === "running" && run.pace ? `${duration((run.steps - run.step) * run.pace)} left` : age(run.updated);
  return [
    tile(`held out, ${run.metric || "score"}`, moved ? `${short(run.first)} → ${short(run.last)}` : short(run.last), "first and last"),
    tile("training reward", short(run.reward), "last step"),
    tile("progress", `step ${run.step}${run.steps ? ` of ${run.steps}` : ""}`, left),
    tile("time", duration(run.seconds), "from the first line to the last"),
    tile("speed", `${short(run.tokens_per_second)} tok/s`, "prompts and completions, whole step"),
  ];
}

const noteOf = (note) => h("div", { class: `note ${note.level}` }, h("b", {}, said(note.title)), " ", said(note.text), " ",
  h("span", { class: "dim" }, `See docs/looking.md, ${note.see.replaceAll("-", " ")}.`));

const value = (given) => h("td", {}, said(given === undefined || given === null ? "–" : JSON.stringify(given)));

export function runView(content, parameters, signal) {
  let names = parameters.getAll("run");
  const alone = names.length === 1;
  let smooth = Number(parameters.get("smooth") ?? 0);
  let data;
  const charts = new Map();
  const axis = h("select", { "aria-label": "Horizontal axis", onchange: () => { keep(); again(); } },
    Object.entries(AXES).map(([name, label]) => h("option", { value: name }, label)));
  axis.value = parameters.get("x") in AXES ? parameters.get("x") : "step";
  const slider = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: String(smooth), "aria-label": "Smoothing",
    oninput: () => { smooth = Number(slider.value); keep(); draw(); } });
  const amount = h("output");
  const state = h("span");
  const head = h("div");
  const notes = h("section", { class: "notes", "aria-label": "What stands out" });
  const top = h("div", { class: "grid top-charts" });
  const grid = h("div", { class: "grid" });
  const constants = h("p", { class: "dim" });
  const settings = h("div");
  content.append(
    h("div", { class: "bar" }, h("h1", {}, alone ? said(names[0]) : "Runs over each other"), state, h("span", { class: "space" }),
      h("label", {}, "x: ", axis), h("label", {}, "smoothing ", slider, " ", amount)),
    head, notes, ...(alone ? [top, grid, constants, settings] : [settings, top, grid, constants]));
  const keep = () => remember("run", { run: names, x: axis.value, smooth: smooth || null });
  const again = poll("run", () => ({ run: names, x: axis.value }), 2000, (found) => { data = found; draw(); }, signal);
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.remove()));

  function card(title, note, place) {
    const key = `${title} ${note}`;
    if (!charts.has(key)) {
      charts.set(key, new Chart(title, note));
      place.append(charts.get(key).element);
    }
    return charts.get(key);
  }

  function draw() {
    if (!data) return;
    amount.textContent = smooth || "none";
    const options = { x: AXES[axis.value], smooth, legend: alone };
    const still = data.panels.slice(1).filter((panel) => panel.curves.every(({ y }) => // of several runs: equal in all
      y.length > 1 && y.every((value) => value === (alone ? y : panel.curves[0].y)[0])));
    const values = still.flatMap((panel) => panel.curves.map(({ name, y }) => `${name} ${short(y[0])}`));
    constants.replaceChildren(said(values.length ? `The same at each step: ${[...new Set(values)].join(", ")}` : ""));
    for (const [n, panel] of data.panels.entries()) {
      const curves = alone ? panel.curves : panel.curves.map((curve) => ({ ...curve, n: curve.run }));
      const made = card(panel.title, panel.note, alone && n === 0 ? top : grid);
      made.element.hidden = still.includes(panel);
      made.update(curves, options);
      if (alone && n === 0 && data.times.length) {
        card("Where the time goes", "seconds of a step, by phase", top).update(data.times, { ...options, stacked: true });
      }
    }
    (alone ? drawOne : drawSeveral)();
  }

  function drawOne() {
    const [run] = data.runs;
    state.replaceChildren(stateOf(run));
    const about = [run.model, run.task, run.algorithm, data.stride > 1 && `curves show one step of ${data.stride}`];
    head.replaceChildren(said(about.filter(Boolean).join(" · "), { class: "dim" }, "p"), h("div", { class: "tiles" }, tiles(run)));
    notes.replaceChildren(h("h2", {}, "What stands out"), ...(data.notes.length ? data.notes.map(noteOf)
      : [h("p", { class: "dim" }, "Nothing that the rules of thumb in runfiles/advice.py know; most of them need 8 steps.")]));
    if (settings.firstChild) return;
    const texts = Object.entries(data.texts).filter(([, text]) => text);
    settings.append(h("h2", {}, "Details"),
      ...texts.map(([name, text]) => h("details", {}, h("summary", {}, name), said(text, {}, "pre"))),
      h("details", {}, h("summary", {}, "settings"),
        h("table", {}, h("tbody", {}, Object.entries(data.config).map(([name, given]) => h("tr", {}, h("td", {}, said(name)), value(given)))))));
  }

  function drawSeveral() {
    head.replaceChildren(h("div", { class: "chosen-runs" }, data.runs.map((run, n) => {
      const out = () => { location.hash = link("run", { run: names.filter((name) => name !== run.name), x: axis.value }); };
      return h("span", { class: "chosen" }, swatch(n), h("a", { href: link("run", { run: run.name }) }, said(run.name)), " ", stateOf(run), " ",
        h("b", {}, short(run.last)), h("button", { class: "quiet", "aria-label": `Take ${run.name} out`, onclick: out }, "×"));
    })));
    const rows = Object.entries(data.settings);
    settings.replaceChildren(h("h2", {}, "Settings that differ"), !rows.length ? h("p", { class: "dim" }, "None.")
      : h("div", { class: "card settings" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "setting"), data.runs.map((run) => h("th", {}, said(run.name))))),
        h("tbody", {}, rows.map(([name, values]) => h("tr", {}, h("td", {}, h("code", {}, said(name))), values.map(value)))))));
  }
}
