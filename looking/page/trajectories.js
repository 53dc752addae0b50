// The completions of a step: a list to sort, search and filter, and the group of the chosen one beside it.
import { about, get, h, link, long, pairs, poll, remember, said, score, short } from "./dom.js";
import { by, heading } from "./runs.js";

const KINDS = { completions: "training", evaluations: "held out" };
const SHOWN = 1000; // lines of the list; sorting and searching see all of them

const nearest = (steps, wanted) => steps.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));

export async function trajectoriesView(content, parameters, signal) {
  const run = parameters.get("run");
  const given = (name) => (parameters.has(name) ? Number(parameters.get(name)) : null);
  let [step, row, sort] = [given("step"), given("row"), parameters.get("sort") ?? ""];
  let steps = { completions: [], evaluations: [] };
  let all = [], found = [], columns = [], spans = {}, lines = new Map(), begun = false, typing;

  const kind = h("select", { "aria-label": "Training or held out", onchange: () => open(null) },
    Object.entries(KINDS).map(([name, label]) => h("option", { value: name }, label)));
  kind.value = parameters.get("kind") in KINDS ? parameters.get("kind") : "completions";
  const among = h("select", { class: "step", "aria-label": "Step", onchange: () => open(Number(among.value)) });
  const domain = h("select", { "aria-label": "Domain", onchange: () => filter() });
  const text = h("input", { type: "search", placeholder: "text of prompt or turns", "aria-label": "Search", value: parameters.get("text") ?? "",
    oninput: () => { clearTimeout(typing); typing = setTimeout(filter, 250); } });
  const count = h("span", { class: "dim", role: "status" });
  const head = h("tr");
  const body = h("tbody");
  const list = h("div", { class: "list", tabIndex: 0, "aria-label": "Completions. Up and down choose one, Enter opens it." }, h("table", {}, h("thead", {}, head), body));
  const group = h("div", { class: "group", "aria-live": "polite" });
  content.append(h("div", { class: "bar" }, h("h1", {}, "Trajectories"), kind, h("label", {}, "step ", among), domain, text, count),
    h("div", { class: "columns" }, h("div", { class: "card flush" }, list), group));

  const place = (more = {}) => ({ run, kind: kind.value, step, ...more });
  const keep = () => remember("trajectories", place({ row, sort, domain: domain.value, text: text.value }));

  /** Shows a step: the nearest that there is, or the last one. */
  async function open(wanted) {
    const known = steps[kind.value];
    among.replaceChildren(...known.map((one) => h("option", { value: String(one) }, String(one))));
    if (!known.length) {
      [all, found] = [[], []];
      body.replaceChildren();
      group.replaceChildren(h("p", { class: "dim" }, `There are no completions of this kind (${KINDS[kind.value]}) in the run's folder yet.`));
      return;
    }
    const to = wanted === null ? known.at(-1) : nearest(known, wanted);
    if (begun && to !== step) row = null;
    step = to;
    among.value = String(step);
    const listing = await get("listing", place());
    if (signal.aborted || step !== to) return;
    take(listing);
    await filter();
  }

  function take(listing) {
    const { rewards, ...known } = listing;
    const named = { ...known, ...Object.fromEntries(Object.entries(rewards).map(([name, values]) => [`rewards/${name}`, values])) };
    all = listing.group.map((_, n) => ({ n, ...Object.fromEntries(Object.entries(named).map(([name, values]) => [name, values[n]])) }));
    const functions = Object.keys(rewards).slice(0, 3).map((name) => `rewards/${name}`);
    columns = ["group", "reward", ...functions, "advantage", "length", "domain", "finish_reason", "text"].filter((name) => named[name]);
    spans = Object.fromEntries(["reward", "advantage", ...functions].map((name) => {
      const values = (named[name] ?? []).filter((value) => typeof value === "number");
      return [name, values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity])];
    }));
    const domains = [...new Set(listing.domain ?? [])].filter((name) => name !== null);
    const wanted = domain.value || parameters.get("domain") || "";
    domain.replaceChildren(h("option", { value: "" }, "all domains"), ...domains.map((name) => h("option", { value: name }, said(name).textContent)));
    domain.value = domains.includes(wanted) ? wanted : "";
    domain.hidden = !domains.length;
  }

  async function filter() {
    if (!all.length) return;
    const wanted = text.value;
    const hits = wanted ? new Set((await get("search", place({ text: wanted }))).rows) : null;
    if (signal.aborted || wanted !== text.value) return; // something else was asked for meanwhile
    found = all.filter((one) => (!domain.value || one.domain === domain.value) && (!hits || hits.has(one.n)));
    if (sort) found.sort(by(sort));
    const some = found.slice(0, SHOWN);
    count.textContent = (found.length === all.length ? `${all.length}` : `${found.length} of ${all.length}`) + " completions"
      + (found.length > SHOWN ? `, the first ${SHOWN} are shown` : "");
    head.replaceChildren(...columns.map((name) => heading(name, name.replace("rewards/", "").replace("finish_reason", "ended by").replace("text", "completion"), sort, (next) => { sort = next; filter(); })));
    lines = new Map(some.map((one) => [one.n, line(one)]));
    body.replaceChildren(...lines.values());
    await choose(some.some((one) => one.n === row) ? row : some[0]?.n ?? null);
  }

  function line(one) {
    const cell = (name) => (name in spans ? score(one[name], ...spans[name]) : typeof one[name] === "number" ? short(one[name])
      : said(String(one[name] ?? "").replaceAll("\n", " ⏎ ")));
    return h("tr", { class: "line", onclick: () => choose(one.n), ondblclick: () => enter() },
      columns.map((name) => h("td", { class: name === "text" ? "text" : "" }, cell(name))));
  }

  async function choose(n) {
    lines.get(row)?.removeAttribute("aria-selected");
    row = n;
    keep();
    if (n === null) {
      group.replaceChildren(h("p", { class: "dim" }, "No completion fits."));
      return;
    }
    lines.get(n).setAttribute("aria-selected", "true");
    const wide = matchMedia("(min-width: 1001px)").matches; // list and group beside each other: they scroll by themselves
    if (wide) lines.get(n).scrollIntoView({ block: "nearest" });
    const members = all.filter((one) => one.group === all[n].group).slice(0, 64);
    const { rows } = await get("rows", place({ rows: members.map((one) => one.n).join(",") }));
    if (signal.aborted || n !== row) return;
    const answer = rows[0].other.answer;
    group.replaceChildren(
      h("div", { class: "card prompt" }, h("h2", {}, `Group ${all[n].group}`, h("span", { class: "dim" }, ` · ${members.length} completions`)), long(rows[0].prompt, 1200),
        answer === undefined ? null : h("p", {}, h("span", { class: "dim" }, "answer in the data: "), h("b", {}, said(answer)))),
      h("div", { class: "beside" }, members.map((one, place) => card(one, rows[place]))));
    group.scrollTop = 0;
    if (wide && members[0].n !== n) group.querySelector("[aria-current]").scrollIntoView({ block: "nearest" });
  }

  function card(one, found) {
    const calls = found.turns.flatMap((turn) => turn.calls);
    const failed = calls.filter((call) => call.failed).length;
    const called = ["calls", calls.length ? `${calls.length}${failed ? `, ${failed} failed` : ""}` : null];
    const turn = (one) => [long(one.text, 1500, { class: "own" }), one.observation.map((part) => long(part, 600, { class: "answer" }))];
    return h("article", { class: "card completion", "aria-current": one.n === row ? "true" : undefined },
      h("header", {}, h("span", {}, "reward ", score(one.reward, ...spans.reward)), h("a", { href: link("trajectory", place({ row: one.n })) }, "turns and tokens")),
      pairs([...about(found), called]),
      found.turns.length > 1 ? found.turns.map(turn) : long(found.completion, 3000, { class: "own" }));
  }

  const enter = () => { if (row !== null) location.hash = link("trajectory", place({ row })); };
  list.addEventListener("keydown", (event) => {
    const at = found.findIndex((one) => one.n === row);
    const last = Math.min(found.length, SHOWN) - 1;
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + 15, PageUp: at - 15, Home: 0, End: last }[event.key];
    if (event.key === "Enter") enter();
    else if (to === undefined || last < 0) return;
    else choose(found[Math.max(0, Math.min(last, to))].n);
    event.preventDefault();
  });

  poll("steps", () => ({ run }), 4000, async (value) => {
    const follows = begun && step === steps[kind.value].at(-1) && document.activeElement === document.body; // nobody is reading
    steps = value;
    if (!begun && !steps[kind.value].length && steps.evaluations.length) kind.value = "evaluations";
    if (!begun || !steps[kind.value].includes(step) || follows) await open(follows ? null : step);
    begun = true;
  }, signal);
}
