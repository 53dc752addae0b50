// Cards with a chart, drawn when they come into sight. Drawing is plotly's; what is drawn can be saved.
import { cell, h, save, said, short } from "./dom.js";
import { spelled } from "./text.js";

export const COLOURS = ["#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#b91c1c", "#4b5563", "#a16207"];
export const colour = (n) => COLOURS[n % COLOURS.length];
const DASHES = ["solid", "dash", "dot", "dashdot"]; // for more curves than colours
export const dash = (n) => DASHES[Math.floor(n / COLOURS.length) % DASHES.length];

let loading;
function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: "/page/plotly.js" });
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => {
      loading = undefined;
      reject(new Error("the chart library could not be loaded"));
    };
    document.head.append(script);
  });
  return loading;
}

// plotly reads some HTML in names: others' text may have none.
const harmless = (text) => spelled(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").slice(0, 80);

const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
  entry.target.card.inSight = entry.isIntersecting;
  entry.target.card.draw();
}), { rootMargin: "300px" });

/** Exponential smoothing, 0 for none; the first values count no less than later ones. */
export function smoothed(y, share) {
  if (!share) return y;
  let sum = 0, weight = 0;
  return y.map((value) => {
    if (value === null) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

function trace(curve, n, options) {
  const tone = curve.colour ?? colour(n);
  const few = curve.x.length < 12;
  const made = {
    x: curve.x, y: smoothed(curve.y, options.smooth), name: harmless(curve.name), type: "scatter",
    mode: few ? "lines+markers" : "lines", hovertemplate: `%{y:.4~g}<extra>${harmless(curve.name)}</extra>`,
    line: { color: tone, width: 1.8, dash: curve.dash ?? "solid" }, marker: { size: 5 },
  };
  if (options.stacked) Object.assign(made, { stackgroup: "all", mode: "lines", line: { width: 0.5, color: tone }, fillcolor: tone + "cc" });
  return made;
}

function bandOf(curve, n) {
  const tone = curve.colour ?? colour(n);
  return {
    x: [...curve.x, ...curve.x.toReversed()], y: [...curve.high, ...curve.low.toReversed()], type: "scatter", fill: "toself",
    fillcolor: tone + "22", line: { width: 0 }, hoverinfo: "skip", showlegend: false, mode: "lines", name: "",
  };
}

/** A card. update({curves: [{name, x, y, low, high, colour, dash}]}, {x: axis title, smooth, stacked, legend}) draws. */
export class Chart {
  constructor(title, note, { file = title } = {}) {
    this.file = file.replaceAll(/[^\w.-]+/g, "_").slice(0, 80);
    this.plot = h("div", { class: "plot", role: "img", "aria-label": `Chart: ${title}` });
    this.legend = h("div", { class: "key" });
    const button = (text, action, what) => h("button", { class: "quiet", onclick: action, title: `Save ${title} as ${what}` }, text);
    const buttons = h("span", { class: "saves" }, button("PNG", () => this.picture("png"), "a PNG picture"),
      button("SVG", () => this.picture("svg"), "an SVG picture"), button("CSV", () => this.table(), "CSV, as drawn"));
    this.element = h("article", { class: "card" },
      h("header", {}, h("div", {}, h("h3", {}, said(title)), h("p", { class: "dim" }, note || " ")), buttons), this.legend, this.plot);
    this.element.card = this;
    this.title = title;
    this.inSight = this.dirty = false;
    seen.observe(this.element);
  }

  update(data, options = {}) {
    [this.data, this.options, this.dirty] = [data, options, true];
    const curves = data.curves;
    this.legend.replaceChildren(...(options.legend ?? curves.length > 1 ? curves : []).slice(0, 12).map((curve, n) => {
      const line = h("i", { class: "line" });
      line.style.borderTop = `3px ${{ dash: "dashed", dot: "dotted" }[curve.dash] ?? "solid"} ${curve.colour ?? colour(n)}`;
      return h("span", {}, line, said(curve.name));
    }));
    if (curves.length === 1 && options.legend === undefined) this.legend.replaceChildren(h("span", { class: "dim" }, `last ${short(curves[0].y.at(-1))}`));
    this.draw();
  }

  traces() {
    const { curves } = this.data;
    const bands = this.options.stacked ? [] : curves.flatMap((curve, n) => (curve.low ? [bandOf(curve, n)] : []));
    return [...bands, ...curves.map((curve, n) => trace(curve, n, this.options))];
  }

  /** Whether so few steps are shown that the axis would have half ones. */
  whole() {
    const ends = this.data.curves.flatMap((curve) => [curve.x[0], curve.x.at(-1)]).filter((x) => x !== undefined);
    return (this.options.x ?? "step") === "step" && Math.max(...ends) - Math.min(...ends) < 8;
  }

  /** Of curves without ups and downs a range with 0 in it: else rounding would fill the chart. */
  flat() {
    const values = this.data.curves.flatMap((curve) => curve.y).filter((value) => value !== null);
    const [low, high] = values.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    const most = Math.max(Math.abs(low), Math.abs(high));
    if (this.options.stacked || !(high - low <= 1e-4 * most)) return {};
    return { range: most === 0 ? [-0.1, 1] : [Math.min(0, 1.5 * low), Math.max(0, 1.5 * high)] };
  }

  layout() {
    const axis = { gridcolor: "#eef0f3", zerolinecolor: "#d1d5db", tickfont: { color: "#4b5563", size: 11 }, automargin: true };
    return {
      margin: { l: 8, r: 8, t: 6, b: 20 }, showlegend: false, hovermode: "x unified", paper_bgcolor: "#fff", plot_bgcolor: "#fff",
      hoverlabel: { font: { size: 11 }, namelength: 40 }, font: { family: "system-ui, sans-serif", size: 11, color: "#1f2937" },
      xaxis: { ...axis, showgrid: false, ...(this.whole() ? { tickformat: "d", dtick: 1 } : {}) },
      yaxis: { ...axis, rangemode: this.options.stacked ? "tozero" : "normal", ...this.flat() },
    };
  }

  async draw() {
    if (!this.dirty || !this.inSight || !this.data) return;
    this.dirty = false;
    try {
      const library = await plotly();
      await library.react(this.plot, this.traces(), this.layout(), { displayModeBar: false, responsive: true, doubleClick: "reset" });
      this.element.dataset.drawn = String(this.data.curves.reduce((sum, curve) => sum + curve.x.length, 0));
    } catch (error) {
      this.plot.textContent = `Not drawn: ${error.message}`;
    }
  }

  /** The chart as a file, with title and legend in it. */
  async picture(format) {
    const library = await plotly();
    const legend = { orientation: "h", y: -0.22, x: 0 };
    const layout = this.layout();
    Object.assign(layout, {
      title: { text: harmless(this.title), font: { size: 15 }, x: 0.02 }, showlegend: true, legend,
      margin: { l: 50, r: 20, t: 44, b: 60 }, width: 1000, height: 500, xaxis: { ...layout.xaxis, title: { text: this.options.x ?? "step" } },
    });
    const url = await library.toImage({ data: this.traces(), layout }, { format, width: 1000, height: 500, scale: format === "png" ? 2 : 1 });
    const [kind, body] = [url.slice(5, url.indexOf(",")), url.slice(url.indexOf(",") + 1)];
    const bytes = kind.endsWith(";base64") ? Uint8Array.from(atob(body), (letter) => letter.charCodeAt(0)) : decodeURIComponent(body);
    save(`${this.file}.${format}`, kind.split(";")[0], bytes);
  }

  table() {
    save(`${this.file}.csv`, "text/csv", csv(this.data.curves, this.options));
  }

  remove() {
    seen.unobserve(this.element);
    window.Plotly?.purge(this.plot);
    this.element.remove();
  }
}

/** As drawn: a line a point, the curve's name with it. */
export function csv(curves, options, title) {
  const head = [title === undefined ? null : "chart", "curve", options.x ?? "step", "value", "low", "high"].filter(Boolean);
  const lines = curves.flatMap((curve) => smoothed(curve.y, options.smooth).map((value, n) =>
    [...(title === undefined ? [] : [title]), curve.name, curve.x[n], value, curve.low?.[n], curve.high?.[n]].map(cell).join(",")));
  return [...(title === undefined ? [head.join(",")] : []), ...lines].join("\n") + "\n";
}
