// Cards with a chart, drawn when they come into sight. Drawing is uPlot's; what is drawn can be saved.
import { cell, h, save, said, short } from "./dom.js";

export const COLOURS = ["#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#b91c1c", "#6b7280", "#a16207"];
export const colour = (n) => COLOURS[n % COLOURS.length];
const DASHES = { solid: [], dash: [8, 5], dot: [2, 4], dashdot: [8, 4, 2, 4] }; // for more curves than colours
export const dash = (n) => Object.keys(DASHES)[Math.floor(n / COLOURS.length) % 4];
const HEIGHT = 210;

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

/** A card. update({curves: [{name, x, y, low, high, colour, dash}]}, {x: axis title, smooth, stacked, legend}) draws. */
export class Chart {
  constructor(title, note, { file = title } = {}) {
    this.file = file.replaceAll(/[^\w.-]+/g, "_").slice(0, 80);
    this.plot = h("div", { class: "plot", role: "img", "aria-label": `Chart: ${title}` });
    this.legend = h("div", { class: "key" });
    const button = (text, action, what) => h("button", { class: "quiet", onclick: action, title: `Save ${title} as ${what}` }, text);
    const buttons = h("span", { class: "saves" }, button("PNG", () => this.picture(), "a PNG picture"), button("CSV", () => this.table(), "CSV, as drawn"));
    this.element = h("article", { class: "card" },
      h("header", {}, h("div", {}, h("h3", {}, said(title)), h("p", { class: "dim" }, note || " ")), buttons), this.legend, this.plot);
    this.element.card = this;
    this.title = title;
    this.inSight = this.dirty = false;
    seen.observe(this.element);
    this.resized = new ResizeObserver(() => this.chart?.setSize({ width: this.plot.clientWidth, height: HEIGHT }));
    this.resized.observe(this.plot);
  }

  update(data, options = {}) {
    [this.data, this.options, this.dirty] = [data, options, true];
    this.draw();
  }

  draw() {
    if (!this.dirty || !this.inSight || !this.data) return;
    this.dirty = false;
    const { curves } = this.data;
    const { smooth, stacked } = this.options;
    // Columns of each curve over its own x, joined over all: y, and the lowest and the highest where they are known.
    const tables = curves.map((curve) => [curve.x, smoothed(curve.y, smooth), ...(curve.low && !stacked ? [curve.low, curve.high] : [])]);
    const columns = uPlot.join(tables);
    const series = [{}], bands = [];
    this.shown = []; // the column of each curve's values, before they are stacked
    curves.forEach((curve, n) => {
      const tone = curve.colour ?? colour(n);
      const at = series.length;
      this.shown.push(columns[at]);
      series.push({ stroke: tone, width: 1.8, dash: DASHES[curve.dash ?? "solid"], spanGaps: true, points: { show: curve.x.length < 12, size: 6 }, ...(stacked ? { fill: `${tone}cc`, width: 0.5 } : {}) });
      if (tables[n].length > 2) {
        series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
        bands.push({ series: [at + 2, at + 1], fill: `${tone}22` });
      }
    });
    if (stacked) { // each on top of those behind it, so that filling down to 0 leaves its own share visible
      for (let n = columns.length - 2; n > 0; n--) columns[n] = columns[n].map((value, i) => (value ?? 0) + (columns[n + 1][i] ?? 0));
    }
    const ink = getComputedStyle(this.plot).getPropertyValue("--dim");
    const line = getComputedStyle(this.plot).getPropertyValue("--line");
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 30 };
    const whole = (this.options.x ?? "step") === "step"; // no half steps
    this.chart?.destroy();
    this.chart = new uPlot({
      width: this.plot.clientWidth || 400, height: HEIGHT, series, bands, legend: { show: false }, cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (u, low, high) => limits(low, high, stacked) } },
      axes: [{ ...axis, grid: { show: false }, incrs: whole ? [1, 2, 5].flatMap((n) => [0, 1, 2, 3, 4, 5, 6, 7].map((e) => n * 10 ** e)).sort((a, b) => a - b) : undefined },
        { ...axis, size: 52, values: (u, splits) => splits.map((value) => short(value)) }],
      hooks: { setCursor: [(u) => this.label(u.cursor.idx)] },
    }, columns, this.plot);
    this.label(null);
    this.element.dataset.drawn = String(curves.reduce((sum, curve) => sum + curve.x.length, 0));
  }

  /** The key: names, with the values under the pointer; of one curve its last value. */
  label(place) {
    const { curves } = this.data;
    const at = (n) => short(this.shown[n][place]);
    const x = place === null || place === undefined ? [] : [h("span", { class: "dim" }, `${this.options.x ?? "step"} ${short(this.chart.data[0][place])}`)];
    if (curves.length === 1 && this.options.legend === undefined) {
      this.legend.replaceChildren(...(x.length ? [...x, h("span", {}, at(0))] : [h("span", { class: "dim" }, `last ${short(curves[0].y.at(-1))}`)]));
      return;
    }
    this.legend.replaceChildren(...x, ...(this.options.legend ?? true ? curves : []).slice(0, 12).map((curve, n) => {
      const mark = h("i", { class: "line" });
      mark.style.borderTop = `3px ${{ dash: "dashed", dot: "dotted" }[curve.dash] ?? "solid"} ${curve.colour ?? colour(n)}`;
      return h("span", {}, mark, said(curve.name), x.length ? ` ${at(n)}` : "");
    }));
  }

  /** The chart as a file, with its title and names. */
  picture() {
    const drawn = this.chart.ctx.canvas;
    const scale = devicePixelRatio;
    const picture = h("canvas", { width: String(drawn.width), height: String(drawn.height + 60 * scale) });
    const pen = picture.getContext("2d");
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, picture.width, picture.height);
    pen.drawImage(drawn, 0, 30 * scale);
    pen.fillStyle = "#1f2937";
    pen.font = `${15 * scale}px system-ui`;
    pen.fillText(this.title, 10 * scale, 20 * scale);
    pen.font = `${11 * scale}px system-ui`;
    let left = 10 * scale;
    for (const [n, curve] of this.data.curves.slice(0, 12).entries()) {
      pen.fillStyle = curve.colour ?? colour(n);
      pen.fillText(curve.name, left, picture.height - 10 * scale);
      left += pen.measureText(curve.name).width + 14 * scale;
    }
    picture.toBlob((blob) => save(`${this.file}.png`, "image/png", blob));
  }

  table() {
    save(`${this.file}.csv`, "text/csv", csv(this.data.curves, this.options));
  }

  remove() {
    seen.unobserve(this.element);
    this.resized.disconnect();
    this.chart?.destroy();
    this.element.remove();
  }
}

/** The range of the vertical axis: with 0 in it where a curve has no ups and downs, since rounding would fill the chart. */
function limits(low, high, stacked) {
  if (low === null || low === undefined) return [0, 1];
  const most = Math.max(Math.abs(low), Math.abs(high));
  if (stacked) return [0, high * 1.05 || 1];
  if (high - low <= 1e-4 * most || most === 0) return most === 0 ? [-0.1, 1] : [Math.min(0, 1.5 * low), Math.max(0, 1.5 * high)];
  const air = 0.06 * (high - low);
  return [low - air, high + air];
}

/** As drawn: a line a point, the curve's name with it. */
export function csv(curves, options, title) {
  const head = [title === undefined ? null : "chart", "curve", options.x ?? "step", "value", "low", "high"].filter(Boolean);
  const lines = curves.flatMap((curve) => smoothed(curve.y, options.smooth).map((value, n) =>
    [...(title === undefined ? [] : [title]), curve.name, curve.x[n], value, curve.low?.[n], curve.high?.[n]].map(cell).join(",")));
  return [...(title === undefined ? [head.join(",")] : []), ...lines].join("\n") + "\n";
}
