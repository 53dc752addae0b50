// One run while it trains: what stands out in words, its curves, where the time goes, its settings.
import { age, duration, h, inlined, link, nodes, poll, remember, said, short } from "./dom.js";
import { Chart } from "./charts.js";
import { AXES, axisChoice, smoothingChoice } from "./compare.js";
import { stateOf } from "./runs.js";

const tile = (label, value, note) => h("div", { class: "card tile" }, h("p", { class: "dim" }, label), h("div", { class: "big" }, value), h("p", { class: "dim" }, note));

function left(summary) {
  if (summary.state !== "running" || !summary.steps || !summary.step || !summary.pace) return age(summary.updated);
  return `${duration((summary.steps - summary.step) * summary.pace)} left`;
}

export function runView(content, parameters, signal) {
  const run = parameters.get("run");
  let axis = parameters.get("x") in AXES ? parameters.get("x") : "step";
  let smooth = Number(parameters.get("smooth") ?? 0);
  let data;
  const charts = new Map();
  const title = h("h1", {}, said(run));
  const state = h("span");
  const subtitle = h("p", { class: "dim" });
  const tiles = h("div", { class: "tiles" });
  const notes = h("section", { class: "notes", "aria-label": "What stands out" });
  const top = h("div", { class: "grid top-charts" });
  const grid = h("div", { class: "grid" });
  const domains = h("div");
  const details = h("div");
  const choose = axisChoice(axis, (value) => { axis = value; keep(); again(); });
  content.append(h("div", { class: "bar" }, title, state, h("span", { class: "space" }), h("label", {}, "x: ", choose),
    smoothingChoice(smooth, (value) => { smooth = value; keep(); draw(); }), inlined ? null : h("a", { class: "button", href: link("trajectories", { run }) }, "Trajectories")),
    subtitle, tiles, notes, top, grid, domains, details);
  const keep = () => remember("run", { run, x: axis, smooth: smooth || null });
  const again = poll("run", () => ({ run, x: axis }), 2000, (value) => { data = value; draw(); }, signal);
  poll("notes", () => ({ run }), 4000, (value) => warn(value.notes), signal);
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.remove()));

  function warn(found) {
    notes.replaceChildren(h("h2", {}, "What stands out"), ...(found.length ? found.map((note) =>
      h("div", { class: `note ${note.level}` }, h("b", {}, said(note.title)), " ", said(note.text), " ",
        h("span", { class: "dim" }, note.see === "state" ? "" : `See docs/looking.md, ${note.see.replaceAll("-", " ")}.`)))
      : [h("p", { class: "dim" }, "Nothing that the rules of thumb in runlog/advice.py know; most of them need 8 steps.")]));
  }

  function card(key, title, note, place) {
    if (!charts.has(key)) {
      charts.set(key, new Chart(title, note, { file: `${run}-${title}` }));
      place.append(charts.get(key).element);
    }
    return charts.get(key);
  }

  function draw() {
    if (!data) return;
    const { summary, config } = data;
    state.replaceChildren(stateOf(summary));
    subtitle.replaceChildren(nodes([summary.model, summary.task, summary.algorithm, data.stride > 1 && `curves show one step of ${data.stride}`].filter(Boolean).join(" · ")));
    const steps = `step ${summary.step}${summary.steps ? ` of ${summary.steps}` : ""}`;
    const moved = typeof summary.first === "number" && summary.first !== summary.last ? `${short(summary.first)} → ${short(summary.last)}` : short(summary.last);
    tiles.replaceChildren(tile(`held out, ${summary.metric || "score"}`, moved, `best ${short(summary.best)}${/^mean@/.test(summary.metric ?? "") ? "; share with a score of --eval_solved or more" : ""}`), tile("training reward", short(summary.reward), "last step"),
      tile("progress", steps, left(summary)), tile("time", duration(summary.seconds), ["from the first line to the last, ", age(summary.updated)]),
      tile("speed", `${short(summary.tokens_per_second)} tok/s`, "prompts and completions, whole step"));
    data.panels.forEach((panel, n) => {
      const curves = panel.curves.map((curve) => ({ ...curve }));
      const spread = n === 0 && panel.curves[0]?.name === "reward" && data.spread.x.length === curves[0].x.length && !smooth;
      const { y, low = y, high = y } = curves[0];
      if (spread) Object.assign(curves[0], { low: low.map((least, i) => Math.min(least, y[i] - data.spread.y[i])), high: high.map((most, i) => Math.max(most, y[i] + data.spread.y[i])) });
      if (n === 0 && curves[1]) curves[1].dash = "dash";
      card(panel.title, panel.title, n === 0 && spread ? "training reward, with reward_std as a band; held-out rows were never trained on" : panel.note, n === 0 ? top : grid).update({ curves }, { x: AXES[axis], smooth });
      if (n === 0 && data.times.length) {
        card("times", "Where the time goes", "seconds of a step, by phase", top).update({ curves: data.times }, { x: AXES[axis], stacked: true, legend: true });
      }
    });
    domains.replaceChildren(...(data.domains.length ? [h("h2", {}, "Domains"), h("div", { class: "card" }, h("table", {}, h("thead", {}, h("tr", {}, ["domain", "reward, first", "now", "held out"].map((name, n) => h("th", { class: n ? "n" : "" }, name)))),
      h("tbody", {}, data.domains.map((part) => h("tr", {}, h("td", {}, h("a", { href: link("trajectories", { run, domain: part.name }) }, said(part.name))), [part.first, part.now, part.held_out].map((value) => h("td", { class: "n" }, short(value))))))))] : []));
    if (!details.firstChild) details.append(h("h2", {}, "Details"), ...Object.entries(data.texts).filter(([, text]) => text).map(([name, text]) => h("details", {}, h("summary", {}, name), said(text, {}, "pre"))),
      h("details", {}, h("summary", {}, "settings", h("span", { class: "dim" }, `, ${data.differs.length} other than the defaults`)), h("table", {}, h("tbody", {}, Object.entries(config).map(([name, value]) => h("tr", { class: data.differs.includes(name) ? "differs" : "" }, h("td", {}, said(name)), h("td", {}, said(JSON.stringify(value)))))))));
  }
}
