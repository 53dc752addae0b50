// Cards with a chart, drawn when they come into sight. Drawing is uPlot's.
import { h, said, short } from "./dom.js";

const COLOURS = ["#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#b91c1c", "#6b7280", "#a16207"];
const DASHES = [[], [8, 5], [2, 4], [8, 4, 2, 4]]; // for more curves than colours
const HEIGHT = 210;

export const colour = (n) => COLOURS[n % COLOURS.length];

/** A line as curve number n is drawn. */
export function swatch(n) {
  const made = h("i", { class: "line" });
  made.style.borderTop = `3px ${n < COLOURS.length ? "solid" : "dashed"} ${colour(n)}`;
  return made;
}

const seen = new IntersectionObserver((entries) => entries.forEach((entry) => {
  entry.target.card.inSight = entry.isIntersecting;
  entry.target.card.draw();
}), { rootMargin: "300px" });

/** Exponential smoothing, 0 for none; the first values count no less than later ones. */
function smoothed(y, share) {
  if (!share) return y;
  let sum = 0, weight = 0;
  return y.map((value) => {
    if (value === null) return null;
    sum = share * sum + (1 - share) * value;
    weight = share * weight + (1 - share);
    return sum / weight;
  });
}

/** A card. update([{name, x, y, n}], {x: axis title, smooth, stacked, legend}) draws; n chooses the colour. */
export class Chart {
  constructor(title, note) {
    this.plot = h("div", { class: "plot", role: "img", "aria-label": `Chart: ${title}` });
    const head = h("header", {}, h("h3", {}, said(title)), h("p", { class: "dim" }, said(note || " ")));
    this.element = h("article", { class: "card" }, head, this.plot);
    this.element.card = this;
    this.inSight = this.dirty = false;
    seen.observe(this.element);
    this.resized = new ResizeObserver(() => this.chart?.setSize({ width: this.plot.clientWidth, height: HEIGHT }));
    this.resized.observe(this.plot);
  }

  update(curves, options = {}) {
    [this.curves, this.options, this.dirty] = [curves.map((curve, n) => ({ n, ...curve })), options, true];
    this.draw();
  }

  draw() {
    if (!this.dirty || !this.inSight) return;
    this.dirty = false;
    const { smooth, stacked, x, legend } = this.options;
    const columns = uPlot.join(this.curves.map((curve) => [curve.x, smoothed(curve.y, smooth)]));
    const values = columns.slice(1); // each curve's, before they are stacked
    const series = [{ label: x, value: (u, place) => short(place) }, ...this.curves.map((curve, n) => {
      const stroke = colour(curve.n), dash = DASHES[Math.floor(curve.n / COLOURS.length) % DASHES.length];
      const points = { show: curve.x.length < 12, size: 6 };
      const fill = stacked ? { fill: `${stroke}cc`, width: 0.5 } : {};
      const value = (u, y, s, at) => short(at === null ? curve.y.at(-1) : values[n][at]); // under the pointer, or the last
      return { label: said(curve.name), value, stroke, width: 1.8, dash, spanGaps: true, points, ...fill };
    })];
    if (stacked) { // each on top of those behind it, so that filling down to 0 leaves its own share visible
      for (let n = columns.length - 2; n > 0; n--) {
        columns[n] = columns[n].map((value, i) => (value ?? 0) + (columns[n + 1][i] ?? 0));
      }
    }
    const style = getComputedStyle(this.plot);
    const grid = { stroke: style.getPropertyValue("--line"), width: 1 };
    const axis = { stroke: style.getPropertyValue("--dim"), grid, ticks: { show: false }, font: "11px system-ui", size: 30 };
    const whole = [0, 1, 2, 3, 4, 5, 6, 7].flatMap((e) => [1, 2, 5].map((n) => n * 10 ** e)); // no half steps
    this.chart?.destroy();
    this.chart = new uPlot({
      width: this.plot.clientWidth || 400, height: HEIGHT, series,
      legend: { show: legend }, cursor: { drag: { x: true, y: false } },
      scales: { x: { time: false }, y: stacked ? { range: (u, low, high) => [0, high * 1.05 || 1] } : {} },
      axes: [
        { ...axis, grid: { show: false }, incrs: x === "step" ? whole : undefined },
        { ...axis, size: 60, values: (u, splits) => splits.map((value) => short(value, splits[1] - splits[0])) },
      ],
    }, columns, this.plot);
    this.element.dataset.drawn = String(this.curves.reduce((sum, curve) => sum + curve.x.length, 0));
  }

  remove() {
    seen.unobserve(this.element);
    this.resized.disconnect();
    this.chart?.destroy();
    this.element.remove();
  }
}
