// Curves of several runs over each other.
import { cell, h, link, poll, remember, said, save, short } from "./dom.js";
import { Chart, colour, csv, dash } from "./charts.js";
import { stateOf } from "./runs.js";

export const AXES = { step: "step", tokens: "sampled and prompt tokens", seconds: "seconds of training steps" };

export function axisChoice(value, change) {
  const select = h("select", { "aria-label": "Horizontal axis", onchange: () => change(select.value) },
    Object.entries(AXES).map(([name, label]) => h("option", { value: name }, label)));
  select.value = value in AXES ? value : "step";
  return select;
}

export function smoothingChoice(value, change) {
  const shown = h("output", {}, value || "none");
  const slider = h("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: String(value), "aria-label": "Smoothing", oninput: () => {
    shown.textContent = Number(slider.value) ? slider.value : "none";
    change(Number(slider.value));
  } });
  return h("label", { class: "smoothing" }, "smoothing ", slider, " ", shown);
}

export function compareView(content, parameters, signal) {
  let runs = parameters.getAll("run");
  let axis = parameters.get("x") in AXES ? parameters.get("x") : "step";
  let smooth = Number(parameters.get("smooth") ?? 0);
  let data;
  const charts = new Map();
  const seeds = h("input", { type: "checkbox", checked: parameters.get("seeds") === "1", onchange: () => changed() });
  const key = h("div", { class: "chosen-runs" });
  const grid = h("div", { class: "grid" });
  const settings = h("div", { class: "card scroll settings" });
  const choose = axisChoice(axis, (value) => { axis = value; changed(); });
  content.append(
    h("div", { class: "bar" }, h("h1", {}, "Compare"), h("label", {}, "x: ", choose), smoothingChoice(smooth, (value) => { smooth = value; draw(); keep(); }),
      h("label", { title: "Runs whose settings differ in nothing but the seed become one curve: their mean, and the lowest and highest as a band." }, seeds, " mean over seeds"),
      h("span", { class: "space" }), h("button", { onclick: everything }, "All curves as CSV")),
    key, h("h2", {}, "Settings that differ"), settings, grid);
  const keep = () => remember("compare", { run: runs, x: axis, smooth: smooth || null, seeds: seeds.checked ? 1 : null });
  const again = poll("compare", () => ({ run: runs, x: axis, seeds: seeds.checked ? 1 : 0 }), 3000, (value) => { data = value; draw(); }, signal);
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.remove()));
  function changed() {
    keep();
    again();
  }

  function named(curve) {
    const [first] = curve.runs;
    const name = data.runs[first].name;
    const alone = curve.runs.length === 1;
    return { ...curve, name: alone ? name : `${name} and ${curve.runs.length - 1} more, mean`, colour: colour(first), dash: dash(first) };
  }

  function draw() {
    if (!data) return;
    key.replaceChildren(...data.runs.map((run, n) => {
      const swatch = h("i", { class: "line" });
      swatch.style.borderTop = `3px ${dash(n) === "solid" ? "solid" : "dashed"} ${colour(n)}`;
      const away = h("button", { class: "quiet", "aria-label": `Take ${run.name} out`, onclick: () => { runs = runs.filter((name) => name !== run.name); changed(); } }, "×");
      return h("span", { class: "chosen" }, swatch, h("a", { href: link("run", { run: run.name }) }, said(run.name)), " ", stateOf(run), " ", h("b", {}, short(run.last)), away);
    }), ...data.gone.map((name) => h("span", { class: "chosen gone" }, said(name), " is gone")));
    const wanted = new Set(data.panels.map((panel) => panel.name));
    for (const [name, chart] of charts) if (!wanted.has(name)) { chart.remove(); charts.delete(name); }
    for (const panel of data.panels) {
      if (!charts.has(panel.name)) {
        charts.set(panel.name, new Chart(panel.title, panel.name, { file: panel.name }));
        grid.append(charts.get(panel.name).element);
      }
      charts.get(panel.name).update({ curves: panel.curves.map(named) }, { x: AXES[axis], smooth, legend: false });
    }
    const rows = Object.entries(data.settings);
    const value = (given) => h("td", {}, said(given === undefined || given === null ? "–" : typeof given === "string" ? given : JSON.stringify(given)));
    settings.replaceChildren(!rows.length ? h("p", { class: "dim" }, "None.") : h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "setting"), data.runs.map((run) => h("th", {}, said(run.name))))),
      h("tbody", {}, rows.map(([name, values]) => h("tr", {}, h("td", {}, h("code", {}, said(name))), values.map(value))))),
      h("button", { class: "quiet", onclick: () => save("settings.csv", "text/csv", [["setting", ...data.runs.map((run) => run.name)], ...rows.map(([name, values]) => [name, ...values.map((given) => JSON.stringify(given))])].map((line) => line.map(cell).join(",")).join("\n") + "\n") }, "CSV"));
  }

  function everything() {
    if (!data) return;
    const options = { x: AXES[axis], smooth };
    save("curves.csv", "text/csv", `chart,curve,${options.x},value,low,high\n` + data.panels.map((panel) => csv(panel.curves.map(named), options, panel.name)).join(""));
  }
}
