// The table of runs: filter, sort, choose some to compare.
import { age, duration, h, link, poll, remember, said, short } from "./dom.js";

const COLUMNS = [
  ["name", "run"], ["state", "state"], ["task", "task"], ["algorithm", "algorithm"], ["step", "step"], ["note", "stands out"],
  ["last", "held out"], ["reward", "reward"], ["seconds", "time"], ["updated", "last line"],
];
const TEXT = new Set(["name", "state", "task", "algorithm", "note"]);

export function stateOf(run) {
  const why = run.why.length > 90 ? `${run.why.slice(0, 90)} …` : run.why;
  return h("span", { class: `state ${run.state}`, title: run.why }, run.state, why ? h("span", { class: "why" }, " ", said(why)) : null);
}

/** Compares two rows by a column; `key` with a minus: from the largest. */
export function by(key) {
  const sign = key.startsWith("-") ? -1 : 1, name = key.replace(/^-/, "");
  return (a, b) => sign * (typeof a[name] === "string" || typeof b[name] === "string"
    ? String(a[name]).localeCompare(String(b[name])) : (a[name] ?? -Infinity) - (b[name] ?? -Infinity));
}

/** A heading that sorts: once, the other way, and not. */
export function heading(name, label, sort, change) {
  const direction = sort === name ? "ascending" : sort === `-${name}` ? "descending" : undefined;
  const next = sort === `-${name}` ? name : sort === name ? "" : `-${name}`;
  return h("th", { "aria-sort": direction }, h("button", { class: "sort", onclick: () => change(next) }, said(label),
    direction === "ascending" ? " ▲" : direction ? " ▼" : ""));
}

export function runsView(content, parameters, signal) {
  let runs = [];
  let sort = parameters.get("sort") ?? "";
  const chosen = new Set(parameters.getAll("run"));
  const filter = h("input", { type: "search", placeholder: "name, task, algorithm, state …", value: parameters.get("text") ?? "", "aria-label": "Filter", oninput: () => show() });
  const compare = h("button", { class: "primary", onclick: () => { location.hash = link("run", { run: [...chosen] }); } });
  const count = h("span", { class: "dim" });
  const head = h("tr");
  const body = h("tbody");
  const where = h("p", { class: "dim" });
  content.append(h("div", { class: "bar" }, h("h1", {}, "Runs"), filter, count, h("span", { class: "space" }), compare), where,
    h("div", { class: "card scroll" }, h("table", { class: "runs" }, h("thead", {}, head), body)));

  function line(run) {
    const box = h("input", { type: "checkbox", checked: chosen.has(run.name), "aria-label": `Compare ${run.name}`, onchange: () => {
      chosen[box.checked ? "add" : "delete"](run.name);
      kept();
    } });
    const address = link("run", { run: run.name });
    const number = (...value) => h("td", { class: "n" }, value);
    const gained = typeof run.first === "number" && run.first !== run.last;
    const more = run.notes > 1 ? ` +${run.notes - 1}` : "";
    return h("tr", { "data-run": run.name }, h("td", {}, box), h("td", { class: "name" }, h("a", { href: address }, said(run.name))),
      h("td", {}, stateOf(run)), h("td", {}, said(run.task)), h("td", {}, said(run.algorithm)), number(run.steps ? `${run.step} / ${run.steps}` : String(run.step ?? "–")),
      h("td", { class: "stands-out" }, run.note ? h("a", { class: run.level, href: address }, said(run.note), more) : null),
      number(gained ? h("span", { class: "dim" }, `${short(run.first)} → `) : null, h("b", { title: run.metric }, short(run.last))),
      number(short(run.reward)), number(duration(run.seconds)), number(age(run.updated)));
  }

  function kept() {
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
    compare.disabled = chosen.size < 2;
    remember("runs", { text: filter.value, sort, run: [...chosen] });
  }

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = runs.filter((run) => {
      const text = `${run.name} ${run.task} ${run.algorithm} ${run.model} ${run.state}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    if (sort) found.sort(by(sort));
    const focused = document.activeElement?.getAttribute("aria-label"); // a new table would lose it
    head.replaceChildren(h("th", {}, h("span", { class: "unseen" }, "compare")), ...COLUMNS.map(([key, label]) => {
      const made = heading(key, label, sort, (next) => { sort = next; show(); });
      made.className = TEXT.has(key) ? "" : "n";
      return made;
    }));
    body.replaceChildren(...found.map(line));
    if (focused) [...body.querySelectorAll("input")].find((box) => box.getAttribute("aria-label") === focused)?.focus();
    const none = runs.length ? "No run fits." : "There is no run in this folder yet. One that starts shows up here within seconds.";
    if (!found.length) body.append(h("tr", {}, h("td", { colspan: "11", class: "dim" }, none)));
    count.textContent = found.length === runs.length ? `${runs.length}` : `${found.length} of ${runs.length}`;
    kept();
  }

  poll("runs", () => ({}), 3000, (value) => {
    runs = value.runs;
    where.replaceChildren(said(value.root));
    for (const name of chosen) if (!runs.some((run) => run.name === name)) chosen.delete(name);
    show();
  }, signal);
}
