// The completions of a step: a list that scrolls through thousands, and the group of the chosen one beside it.
import { get, h, link, long, poll, remember, said, score, short, tell } from "./dom.js";

const HEIGHT = 28; // of a line of the list, in pixels: as in style.css
const numbers = ([first, count, distance]) => Array.from({ length: count }, (_, n) => first + n * distance);
const KINDS = { completions: "training", evaluations: "held out" };

export async function trajectoriesView(content, parameters, signal) {
  const run = parameters.get("run");
  let steps = { completions: [], evaluations: [] };
  let kind = parameters.get("kind") ?? "completions";
  let step = parameters.has("step") ? Number(parameters.get("step")) : null;
  let sort = parameters.get("sort") ?? "";
  let row = parameters.has("row") ? Number(parameters.get("row")) : null;
  let linked = parameters.get("domain"); // of the first listing: from then on it is chosen here
  let all = [], shown = [], scores = [], listing = null, matches = null, typing;

  const kindSelect = h("select", { "aria-label": "Training or held out", onchange: () => { kind = kindSelect.value; step = null; row = null; open(); } },
    Object.entries(KINDS).map(([name, label]) => h("option", { value: name }, label)));
  const stepInput = h("input", { type: "number", min: "0", class: "step", "aria-label": "Step", onchange: () => go(Number(stepInput.value)) });
  const slider = h("input", { type: "range", min: "0", "aria-label": "Step, among those that were kept", oninput: () => go(steps[kind][Number(slider.value)]) });
  const domain = h("select", { "aria-label": "Domain", onchange: () => filter() });
  const text = h("input", { type: "search", placeholder: "text in prompt, turns, completion", "aria-label": "Search", value: parameters.get("text") ?? "", oninput: () => { clearTimeout(typing); typing = setTimeout(search, 250); } });
  const count = h("span", { class: "dim", role: "status" });
  const head = h("div", { class: "list-head", role: "row" });
  const spacer = h("div", { class: "spacer" });
  const list = h("div", { class: "list", tabIndex: 0, role: "table", "aria-label": "Completions. Up and down choose one, Enter opens it.", onscroll: () => paint() }, spacer);
  const group = h("div", { class: "group", "aria-live": "polite" });
  content.append(h("div", { class: "bar" }, h("h1", {}, "Trajectories"), kindSelect, h("label", {}, "step ", stepInput), slider, domain, text, count),
    h("div", { class: "columns" }, h("div", { class: "card flush" }, head, list), group));
  kindSelect.value = kind in KINDS ? kind : (kind = "completions");

  const keep = () => remember("trajectories", { run, kind, step, row, sort, domain: domain.value, text: text.value });
  const ask = (more = {}) => ({ run, kind, step, ...more });

  function columns() {
    const found = [["group", "group", 40], ["reward", "reward", 56], ...scores.slice(0, 3).map((name) => [`rewards/${name}`, name, 56])];
    if (listing.advantage) found.push(["advantage", "advantage", 70]);
    if (listing.length) found.push(["length", "length", 44]);
    if (listing.domain) found.push(["domain", "domain", 56]);
    found.push(["finish_reason", "ended by", 60], ["text", "completion", 0]);
    return found;
  }

  function go(to) {
    const known = steps[kind];
    if (!known.length || !Number.isFinite(to)) return;
    step = known.reduce((best, one) => (Math.abs(one - to) < Math.abs(best - to) ? one : best));
    row = null;
    open();
  }

  let asked = 0;
  async function open() {
    const known = steps[kind];
    slider.max = String(Math.max(0, known.length - 1));
    slider.disabled = stepInput.disabled = !known.length;
    if (!known.length) {
      [all, shown, listing] = [[], [], null];
      spacer.replaceChildren();
      head.replaceChildren();
      count.textContent = "";
      group.replaceChildren(h("p", { class: "dim" }, `There are no completions of this kind (${KINDS[kind]}) in the run's folder yet.`));
      return;
    }
    if (step === null || !known.includes(step)) step = step === null ? known.at(-1) : known.reduce((best, one) => (Math.abs(one - step) < Math.abs(best - step) ? one : best));
    stepInput.value = step;
    slider.value = String(known.indexOf(step));
    const mine = ++asked;
    try {
      const found = await get("listing", ask());
      if (mine !== asked || signal.aborted) return;
      take(found);
      tell("");
    } catch (error) {
      if (mine !== asked || signal.aborted) return;
      [all, shown, listing] = [[], [], null];
      spacer.replaceChildren();
      head.replaceChildren();
      count.textContent = "";
      group.replaceChildren(h("div", { class: "note watch" }, said(error.message)));
    }
  }

  function take(found) {
    listing = found;
    scores = Object.keys(found.rewards);
    all = found.group.map((number, n) => {
      const made = { n, group: number, text: found.text[n] };
      for (const name of ["reward", "advantage", "length", "domain", "finish_reason", "policy_version", "origin", "row_number"]) made[name] = found[name]?.[n];
      for (const name of scores) made[`rewards/${name}`] = found.rewards[name][n];
      return made;
    });
    const domains = [...new Set(found.domain ?? [])].filter((name) => name !== null);
    const wanted = domain.value || linked || "";
    linked = null;
    domain.replaceChildren(h("option", { value: "" }, "all domains"), ...domains.map((name) => h("option", { value: name }, said(name).textContent)));
    domain.value = domains.includes(wanted) ? wanted : "";
    domain.hidden = !domains.length;
    matches = null;
    search();
  }

  let searched = 0;
  async function search() {
    const mine = ++searched;
    let found = null;
    if (text.value) {
      try {
        found = new Set((await get("search", ask({ text: text.value }))).rows);
      } catch (error) {
        if (mine === searched && !signal.aborted) tell(error.message);
        return;
      }
      if (mine !== searched || signal.aborted) return; // something else was asked for meanwhile
    }
    matches = found;
    filter();
  }

  function filter() {
    if (!listing) return;
    shown = all.filter((one) => (!domain.value || one.domain === domain.value) && (!matches || matches.has(one.n)));
    const key = sort.replace(/^-/, "");
    if (key) {
      const sign = sort.startsWith("-") ? -1 : 1;
      shown.sort((a, b) => typeof a[key] === "string" || typeof b[key] === "string" ? sign * String(a[key]).localeCompare(String(b[key])) : sign * ((a[key] ?? -Infinity) - (b[key] ?? -Infinity)));
    }
    count.textContent = shown.length === all.length ? `${all.length} completions` : `${shown.length} of ${all.length} completions`;
    if (row === null || !shown.some((one) => one.n === row)) row = shown[0]?.n ?? null;
    const known = columns();
    list.style.setProperty("--columns", known.map(([, , width]) => (width ? `${width}px` : "minmax(90px, 1fr)")).join(" "));
    head.style.setProperty("--columns", list.style.getPropertyValue("--columns"));
    head.replaceChildren(...known.map(([name, label]) => {
      const direction = sort === name ? "ascending" : sort === `-${name}` ? "descending" : undefined;
      return h("span", { role: "columnheader", "aria-sort": direction }, h("button", { class: "sort", title: label, onclick: () => {
        sort = sort === `-${name}` ? name : sort === name ? "" : `-${name}`;
        filter();
      } }, direction ? (direction === "ascending" ? "▲ " : "▼ ") : "", said(label)));
    }));
    list.setAttribute("aria-rowcount", String(shown.length));
    spacer.style.height = `${shown.length * HEIGHT}px`;
    paint();
    choose(row, false);
  }

  const span = (name) => {
    const values = all.map((one) => one[name]).filter((value) => typeof value === "number");
    return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  };

  let spans = new Map(), spansOf = null;
  function paint() {
    if (!listing) return;
    if (spansOf !== all) [spans, spansOf] = [new Map(["reward", "advantage", ...scores.map((name) => `rewards/${name}`)].map((name) => [name, span(name)])), all];
    const first = Math.max(0, Math.floor(list.scrollTop / HEIGHT) - 10);
    const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / HEIGHT) + 10);
    const known = columns();
    spacer.replaceChildren(...shown.slice(first, last).map((one, n) => {
      const line = h("div", { class: "line", role: "row", "aria-rowindex": String(first + n + 1), "aria-selected": one.n === row ? "true" : undefined, onclick: () => choose(one.n), ondblclick: () => enter() },
        known.map(([name]) => h("span", { role: "cell", class: name === "text" ? "text" : "" }, spans.has(name) ? score(one[name], ...spans.get(name)) : name === "text" ? said(one.text?.replaceAll("\n", " ⏎ ")) : typeof one[name] === "number" ? short(one[name]) : said(one[name] ?? ""))));
      line.style.top = `${(first + n) * HEIGHT}px`;
      return line;
    }));
  }

  let asking = 0;
  async function choose(n, scroll = true) {
    row = n;
    keep();
    paint();
    if (n === null) {
      group.replaceChildren(h("p", { class: "dim" }, "No completion fits."));
      return;
    }
    const place = shown.findIndex((one) => one.n === n);
    if (scroll) {
      if (place * HEIGHT < list.scrollTop) list.scrollTop = place * HEIGHT;
      else if ((place + 1) * HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = (place + 1) * HEIGHT - list.clientHeight;
    }
    const number = all[n].group;
    const members = all.filter((one) => one.group === number).slice(0, 64);
    const mine = ++asking;
    try {
      const { rows } = await get("rows", ask({ rows: members.map((one) => one.n).join(",") }));
      if (mine === asking && !signal.aborted) showGroup(number, members, rows);
    } catch (error) {
      if (mine === asking && !signal.aborted) group.replaceChildren(h("div", { class: "note watch" }, said(error.message)));
    }
  }

  function showGroup(number, members, rows) {
    const total = all.filter((one) => one.group === number).length;
    const cards = members.map((one, n) => card(one, rows[n]));
    group.replaceChildren(h("div", { class: "card prompt" }, h("h2", {}, `Group ${number}`, h("span", { class: "dim" }, ` of ${new Set(all.map((one) => one.group)).size} · ${total} completions` + (total > members.length ? `, the first ${members.length} are shown` : ""))),
      long(rows[0].prompt, 1200), rows[0].other.answer === undefined ? [] : h("p", {}, h("span", { class: "dim" }, "answer in the data: "), h("b", {}, said(rows[0].other.answer)))), h("div", { class: "beside" }, cards));
    group.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  }

  function card(one, found) {
    const numbers = [["advantage", short(one.advantage)], ["length", found.length ?? "–"], ["ended by", found.finish_reason ?? "–"]];
    if (typeof found.policy_version === "number") numbers.push(["version", found.policy_version]);
    if (found.origin) numbers.push(["origin", found.origin]);
    const parts = Object.entries(found.rewards).map(([name, value]) => [name, short(value)]);
    const calls = found.turns.flatMap((turn) => turn.calls);
    if (calls.length) numbers.push(["calls", `${calls.length}${calls.some((call) => call.failed) ? `, ${calls.filter((call) => call.failed).length} failed` : ""}`]);
    const terms = (pairs) => h("dl", { class: "pairs" }, pairs.map(([term, value]) => h("div", {}, h("dt", {}, said(term)), h("dd", {}, said(value)))));
    return h("article", { class: "card completion", "aria-current": one.n === row ? "true" : undefined },
      h("header", {}, h("span", {}, "reward ", score(one.reward, ...spans.get("reward"))), h("a", { href: link("trajectory", ask({ row: one.n })) }, "turns and tokens")),
      terms([...parts, ...numbers]), found.turns.length > 1 ? found.turns.map((turn) => [long(turn.text, 1500, { class: "own" }), turn.observation.map((part) => long(part, 600, { class: "answer" }))]) : long(found.completion, 3000, { class: "own" }));
  }

  const enter = () => { if (row !== null) location.hash = link("trajectory", ask({ row })); };
  list.addEventListener("keydown", (event) => {
    const place = shown.findIndex((one) => one.n === row);
    const page = Math.max(1, Math.floor(list.clientHeight / HEIGHT) - 1);
    const to = { ArrowDown: place + 1, ArrowUp: place - 1, PageDown: place + page, PageUp: place - page, Home: 0, End: shown.length - 1 }[event.key];
    if (event.key === "Enter") enter();
    else if (to === undefined || !shown.length) return;
    else choose(shown[Math.max(0, Math.min(shown.length - 1, to))].n);
    event.preventDefault();
  });
  new ResizeObserver(() => paint()).observe(list);

  let begun = false;
  poll("steps", () => ({ run }), 4000, (value) => {
    const newest = begun && step === steps[kind].at(-1) && document.activeElement === document.body;
    steps = Object.fromEntries(Object.entries(value).map(([name, parts]) => [name, parts.flatMap(numbers)]));
    if (!begun && !steps[kind].length && !parameters.has("kind") && steps.evaluations.length) kindSelect.value = kind = "evaluations";
    if (!begun || !steps[kind].includes(step)) open();
    else if (newest && steps[kind].at(-1) !== step) go(steps[kind].at(-1)); // follow a run, unless somebody is reading
    slider.max = String(Math.max(0, steps[kind].length - 1));
    begun = true;
  }, signal);
}
