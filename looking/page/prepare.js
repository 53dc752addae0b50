// Preparing a run: the settings, which stand in the address, as a form made from the script's own TrainConfig, and a tab
// for each thing that can be seen before anything is trained. Served with --prepare alone.
import { get, h, link, post, remember, said, tell } from "./dom.js";
import { fitTab, launchTab } from "./launch.js";
import { rewardsTab, rowsTab, toolsTab } from "./tryout.js";

export const preparing = () => "prepare" in document.body.dataset;
const number = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
const SESSIONS = { check: `check-${number()}`, work: `work-${number()}` }; // of this page, as long as it is open

const TABS = {
  rows: ["Rows", rowsTab, "config model_id dataset_id dataset_config dataset_split eval_dataset_id eval_steps system_prompt max_prompt_length"],
  rewards: ["Rewards", rewardsTab, "reward_funcs reward_weights reward_timeout advantage scale_rewards max_completion_length generator server_urls temperature"],
  tools: ["Tools and environments", toolsTab, "env tools mcp_config tool_parser max_turns max_completion_length max_prompt_length tool_timeout"],
  fit: ["Fit", fitTab, "model_id use_peft prompts_per_step num_generations max_prompt_length max_completion_length"],
  launch: ["Launch", launchTab, ""],
};
let address = {}; // of the last visit, for the link that leads back
export const prepareLink = () => link("prepare", address);

/** What a tab works with: settings, requests, and what the last check said. */
class Work {
  constructor(parameters, signal) {
    this.signal = signal;
    this.tab = parameters.get("tab") in TABS ? parameters.get("tab") : "rows";
    this.script = parameters.get("script") ?? "train_grpo.py";
    this.settings = Object.fromEntries([...parameters].filter(([key]) => key.startsWith("s.")).map(([key, value]) => [key.slice(2), value]));
    this.plan = Object.fromEntries([...parameters].filter(([key]) => key.startsWith("p.")).map(([key, value]) => [key.slice(2), value]));
    this.row = Number(parameters.get("row") ?? 0);
    this.listeners = [];
    this.told = {};
    this.keep();
  }

  place(tab = this.tab) {
    const named = (prefix, values) => Object.entries(values).filter(([, value]) => value !== "").map(([key, value]) => [prefix + key, value]);
    return { tab, script: this.script, row: this.row || null, ...Object.fromEntries([...named("s.", this.settings), ...named("p.", this.plan)]) };
  }

  keep() {
    address = this.place();
    remember("prepare", address);
    document.querySelectorAll("nav.tabs a").forEach((one) => { one.href = link("prepare", this.place(one.dataset.tab)); });
  }

  /** Whether these very settings were entered in this tab; those of a link may be anybody's. */
  entered() {
    return !Object.keys(this.settings).length || sessionStorage.getItem("entered") === JSON.stringify(this.settings);
  }

  enter() {
    sessionStorage.setItem("entered", JSON.stringify(this.settings));
  }

  /** What a tab starts when it is come to. Of settings that a link brought it shows what it would run, and a button. */
  begin(action, target) {
    if (this.entered()) return action.run();
    const named = Object.entries(this.settings).map(([name, value]) => h("div", {}, said(`--${name}=${value}`)));
    target.replaceChildren(h("div", { class: "note watch" }, h("p", {}, h("b", {}, "These settings came with a link."), " Files and commands that they name will be run as you:"), h("code", {}, named),
      h("p", { class: "bar" }, h("button", { type: "button", onclick: () => action.click() }, "Run it"))));
  }

  set(name, value, kind = "settings") {
    const entered = this.entered();
    if (value === "") delete this[kind][name];
    else this[kind][name] = value;
    if (entered) this.enter();
    this.keep();
    if (kind === "settings") this.checkSoon();
  }

  ask(action, more = {}, session = "work") {
    return post(action, { session: SESSIONS[session], script: this.script, settings: this.settings, runs: this.about?.runs, ...more });
  }

  /** For what changes something: a form of its own, which is sent once. */
  send(action, more = {}) {
    return this.ask(action, { ...more, form: number() }, "check");
  }

  stop() {
    return post("close", { session: SESSIONS.work });
  }

  checkSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.check(), 350);
  }

  async check(more = {}) {
    const turn = (this.turn = (this.turn ?? 0) + 1);
    let found;
    try {
      found = await this.ask("check", { ranks: this.ranks, serves: this.serves, ...more }, "check");
    } catch (error) {
      found = { error: error.message };
    }
    if (this.signal.aborted || turn !== this.turn) return;
    this.told = found;
    this.listeners.forEach((listener) => listener(found));
  }
}

/** One setting: its name, what it is, an input made from its kind. Marked where it differs from the default. */
export function fieldOf(work, field, kind = "settings") {
  const id = `${kind}-${field.name}`;
  const value = work[kind][field.name] ?? "";
  const options = field.kind === "bool" ? ["true", "false"] : field.choices;
  const change = () => {
    work.set(field.name, input.value, kind);
    mark();
  };
  const aside = { id, name: field.name, "aria-describedby": `${id}-help ${id}-fault` };
  let input, list, usual;
  if (options.length) {
    usual = h("option", { value: "" }, field.default);
    input = h("select", { ...aside, onchange: change }, usual, options.map((one) => h("option", { value: one }, one)));
    input.value = value;
  } else {
    const names = field.known.length ? field.known : [];
    list = names.length ? h("datalist", { id: `${id}-names` }, names.map((name) => h("option", { value: name }))) : null;
    const numeric = field.kind === "int" || field.kind === "float";
    input = h("input", { ...aside, type: "text", value, placeholder: field.default === "" ? "none" : field.default, oninput: change, autocomplete: "off", spellcheck: "false",
      list: list ? `${id}-names` : undefined, inputmode: numeric ? "decimal" : undefined });
  }
  const back = h("button", { class: "quiet", type: "button", "aria-label": `${field.name}: back to the default`, title: "back to the default", onclick: () => {
    input.value = "";
    change();
    input.focus();
  } }, "×");
  const fault = h("p", { class: "fault", id: `${id}-fault` });
  const made = h("div", { class: "field" }, h("label", { for: id }, h("code", {}, field.name)), h("span", { class: "entry" }, input, back), list,
    h("p", { class: "dim help", id: `${id}-help` }, said(field.help)), fault);
  function mark() {
    const given = input.value !== "";
    const told = kind === "settings" ? work.told : {};
    const differs = told.differs ? told.differs.includes(field.name) || (given && field.name === "config") : given && input.value !== field.default;
    const now = given ? field.default : (told.values?.[field.name] ?? field.default); // as a file or a preset has it
    if (usual) usual.textContent = now;
    else input.placeholder = now === "" ? "none" : now;
    made.classList.toggle("differs", Boolean(differs));
    back.hidden = !given;
    const wrong = kind === "settings" && work.told.field === field.name;
    input.setAttribute("aria-invalid", wrong ? "true" : "false");
    fault.replaceChildren(...(wrong ? [said(work.told.error)] : []));
  }
  made.dataset.field = field.name;
  made.refresh = () => {
    const now = work[kind][field.name] ?? "";
    if (input.value !== now && document.activeElement !== input) input.value = now;
    mark();
  };
  if (kind === "settings") work.listeners.push(made.refresh);
  mark();
  return made;
}

/** What the settings' check said, for a fault that belongs to no field in sight. */
export function faultLine(work, card) {
  const line = h("div", { class: "note bad", role: "status", hidden: true });
  work.listeners.push((told) => {
    const seen = told.field && card.querySelector(`[data-field="${told.field}"]`)?.offsetParent;
    line.hidden = !told.error || Boolean(seen);
    line.replaceChildren(...(told.error ? [said(told.error)] : []));
  });
  return line;
}

/** A button that asks for something that may take a while; what comes is shown, or why nothing came. */
export function doer(work, label, target, ask, show, attributes = {}) {
  let begun = null;
  const button = h("button", { type: "button", ...attributes, onclick: () => {
    work.enter(); // they stand in the form
    run();
  } }, label);
  async function run() {
    if (begun) return;
    begun = performance.now();
    button.disabled = true;
    const seconds = h("span", {}, "");
    const away = h("button", { type: "button", class: "quiet", onclick: () => work.stop().catch((error) => tell(error.message)) }, "stop");
    const wait = h("p", { class: "dim wait", role: "status" }, "… ", seconds, " ", away);
    const tick = setInterval(() => { seconds.textContent = `${Math.round((performance.now() - begun) / 1000)} s`; }, 500);
    target.setAttribute("aria-busy", "true");
    target.prepend(wait);
    try {
      const value = await ask();
      if (!work.signal.aborted) target.replaceChildren(...[show(value)].flat().filter(Boolean));
    } catch (error) {
      if (!work.signal.aborted) target.replaceChildren(failure(error, work, run));
    }
    clearInterval(tick);
    wait.remove();
    target.removeAttribute("aria-busy");
    begun = null;
    button.disabled = false;
    if (button === document.activeElement || document.activeElement === document.body) target.scrollIntoView({ block: "nearest" });
  }
  button.run = run;
  return button;
}

/** Why nothing came; where it is about a setting whose names are known, these to choose from. */
export function failure(error, work, again) {
  const field = work?.fields?.get(/--(\w+)/.exec(error.message)?.[1]);
  const names = again && field?.known.length && field.known.length < 13 ? field.known : [];
  return h("div", { class: "note bad", role: "alert" }, said(error.message), names.length ? h("p", { class: "bar" }, `${field.name}: `, names.map((name) => h("button", { type: "button", onclick: () => {
    work.set(field.name, name);
    work.listeners.forEach((listener) => listener(work.told));
    again();
  } }, name))) : null, printedBy(error));
}

export function printedBy({ said: text }) {
  return text?.trim() ? h("details", {}, h("summary", {}, "what it printed"), said(text, {}, "pre")) : null;
}

export function copier(text) {
  const button = h("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "copied";
    } catch {
      button.textContent = "select it and copy"; // not allowed here
    }
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  } }, "copy");
  return button;
}

const forms = new Map(); // script: its fields

export async function prepareView(content, parameters, signal) {
  const work = new Work(parameters, signal);
  const body = h("div");
  const scripts = h("select", { "aria-label": "Script", onchange: () => { work.script = scripts.value; location.hash = link("prepare", work.place()); } });
  const tabs = h("nav", { class: "tabs", "aria-label": "Prepare" }, Object.entries(TABS).map(([name, [label]]) =>
    h("a", { href: link("prepare", work.place(name)), "data-tab": name, "aria-current": name === work.tab ? "page" : undefined }, label)));
  content.append(h("div", { class: "bar" }, h("h1", {}, "Prepare"), tabs, h("span", { class: "space" }), h("label", {}, "script ", scripts)), body);
  body.append(h("p", { class: "dim wait", role: "status" }, "… the script is imported, torch with it: some seconds, once"));
  try {
    work.about = await get("prepare");
    if (!work.about.scripts.includes(work.script) && work.about.scripts.length) work.script = work.about.scripts[0];
    scripts.append(...work.about.scripts.map((name) => h("option", { value: name }, name)));
    scripts.value = work.script;
    work.form = forms.get(work.script) ?? await work.ask("form", {}, "check");
    forms.set(work.script, work.form);
  } catch (error) {
    body.replaceChildren(failure(error));
    return;
  }
  if (signal.aborted) return;
  const config = { name: "config", group: "file", help: "a file of settings to start from, such as a recipe's; what is set here wins over it", kind: "str", default: "none", choices: [], known: work.form.files };
  work.fields = new Map([["config", config], ...work.form.fields.map((field) => [field.name, field])]);
  const [, show, names] = TABS[work.tab];
  const given = names.split(" ").filter((name) => work.fields.has(name)).map((name) => fieldOf(work, work.fields.get(name)));
  const card = h("form", { class: "card settings-form", "aria-label": "Settings", onsubmit: (event) => event.preventDefault() });
  const result = h("section", { class: "result", "aria-label": "Result" });
  if (given.length) {
    card.append(...given);
    body.replaceChildren(h("div", { class: "columns prepare-columns" }, card, result));
  } else body.replaceChildren(result);
  card.prepend(faultLine(work, card));
  card.actions = h("div", { class: "bar actions" });
  card.prepend(card.actions);
  show(work, result, card);
  work.check();
}
