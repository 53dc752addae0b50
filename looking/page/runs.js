// The table of runs: filter, sort, choose some to compare.
import { age, duration, h, link, poll, remember, said, short } from "./dom.js";

const COLUMNS = [
  ["name", "run"], ["state", "state"], ["task", "task"], ["algorithm", "algorithm"], ["step", "step"],
  ["note", "stands out"], ["last", "held out: last"], ["best", "best"], ["reward", "reward"], ["seconds", "time"], ["tokens_per_second", "tokens/s"],
  ["updated", "last line"],
];
const TEXT = new Set(["name", "state", "task", "algorithm", "note"]);

export function stateOf(run) {
  return h("span", { class: `state ${run.state}`, title: run.why }, run.state,
    run.why ? h("span", { class: "why" }, " ", said(run.why.length > 90 ? run.why.slice(0, 90) + " …" : run.why)) : null);
}

function progress(run) {
  const made = h("span", { class: "steps" }, run.steps ? `${run.step} / ${run.steps}` : String(run.step ?? "–"));
  if (run.steps) made.style.backgroundSize = `${Math.min(100, (100 * run.step) / run.steps)}% 2px`;
  return made;
}

export function runsView(content, parameters, signal) {
  let runs = [];
  const chosen = new Set(parameters.getAll("run"));
  let sort = parameters.get("sort") ?? "";
  const filter = h("input", { type: "search", placeholder: "name, task, algorithm …", value: parameters.get("text") ?? "", "aria-label": "Filter", oninput: () => show() });
  const state = h("select", { "aria-label": "State", onchange: () => show() }, h("option", { value: "" }, "all states"),
    ["running", "finished", "failed", "killed", "interrupted", "ended", "silent"].map((name) => h("option", { value: name }, name)));
  state.value = parameters.get("state") ?? "";
  const compare = h("button", { class: "primary", onclick: () => { location.hash = link("compare", { run: [...chosen] }); } }, "Compare");
  const none = h("button", { class: "quiet", onclick: () => { chosen.clear(); show(); } }, "choose none");
  const count = h("span", { class: "dim" });
  const head = h("tr");
  const body = h("tbody");
  const where = h("p", { class: "dim" });
  content.append(h("div", { class: "bar" }, h("h1", {}, "Runs"), filter, state, count, h("span", { class: "space" }), none, compare), where,
    h("div", { class: "card scroll" }, h("table", { class: "runs" }, h("thead", {}, head), body)));

  function headings() {
    head.replaceChildren(h("th", {}, h("span", { class: "unseen" }, "compare")), ...COLUMNS.map(([key, label]) => {
      const direction = sort === key ? "ascending" : sort === `-${key}` ? "descending" : undefined;
      const click = () => {
        sort = sort === `-${key}` ? key : sort === key ? "" : TEXT.has(key) ? key : `-${key}`;
        show();
      };
      return h("th", { class: TEXT.has(key) ? "" : "n", "aria-sort": direction }, h("button", { class: "sort", onclick: click }, label, direction === "ascending" ? " ▲" : direction ? " ▼" : ""));
    }));
  }

  function line(run) {
    const box = h("input", { type: "checkbox", checked: chosen.has(run.name), "aria-label": `Compare ${run.name}`, onchange: () => {
      chosen[box.checked ? "add" : "delete"](run.name);
      buttons();
    } });
    const number = (value) => h("td", { class: "n" }, value);
    const gained = typeof run.first === "number" && typeof run.last === "number" && run.first !== run.last;
    return h("tr", { "data-run": run.name }, h("td", {}, box), h("td", { class: "name" }, h("a", { href: link("run", { run: run.name }) }, said(run.name))),
      h("td", {}, stateOf(run)), h("td", {}, said(run.task)), h("td", {}, said(run.algorithm)), number(progress(run)),
      h("td", { class: "stands-out" }, run.note ? h("a", { class: run.level, href: link("run", { run: run.name }), title: run.notes > 1 ? `and ${run.notes - 1} more` : undefined }, said(run.note), run.notes > 1 ? ` +${run.notes - 1}` : "") : null),
      h("td", { class: "n", title: run.metric }, gained ? h("span", { class: "dim" }, `${short(run.first)} → `) : null, h("b", {}, short(run.last))),
      number(short(run.best)), number(short(run.reward)), number(duration(run.seconds)),
      number(typeof run.tokens_per_second === "number" ? Math.round(run.tokens_per_second).toLocaleString("en") : "–"), number(age(run.updated)));
  }

  function buttons() {
    compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
    compare.disabled = chosen.size < 1;
    none.hidden = !chosen.size;
    remember("runs", { text: filter.value, state: state.value, sort, run: [...chosen] });
  }

  function show() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (run) => {
      const text = `${run.name} ${run.task} ${run.algorithm} ${run.model} ${run.state}`.toLowerCase();
      return words.every((word) => text.includes(word)) && (!state.value || run.state === state.value);
    };
    const found = runs.filter(fits);
    const key = sort.replace(/^-/, "");
    if (key) found.sort((a, b) => {
      const [x, y] = sort.startsWith("-") ? [b[key], a[key]] : [a[key], b[key]];
      if (typeof x === "string" || typeof y === "string") return String(x).localeCompare(String(y));
      return (x ?? -Infinity) - (y ?? -Infinity);
    });
    const row = body.contains(document.activeElement) ? document.activeElement.closest("tr") : null;
    const focused = row ? [...row.querySelectorAll("input, a")].indexOf(document.activeElement) : -1;
    headings();
    body.replaceChildren(...found.map(line));
    if (focused >= 0) [...body.children].find((one) => one.dataset.run === row.dataset.run)?.querySelectorAll("input, a")[focused]?.focus();
    if (!found.length) body.append(h("tr", {}, h("td", { colspan: "13", class: "dim" }, runs.length ? "No run fits." : ["There is no run in this folder yet. One that starts shows up here within seconds."])));
    count.textContent = found.length === runs.length ? `${runs.length}` : `${found.length} of ${runs.length}`;
    buttons();
  }

  poll("runs", () => ({}), 3000, (value) => {
    runs = value.runs;
    where.replaceChildren(said(value.root));
    for (const name of chosen) if (!runs.some((run) => run.name === name)) chosen.delete(name);
    show();
  }, signal);
}
