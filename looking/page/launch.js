// Whether it fits, and starting it: the whole form, the command, and what was started from here.
import { age, get, h, link, long, poll, said, tell } from "./dom.js";
import { colour } from "./charts.js";
import { copier, doer, failure, fieldOf, printedBy } from "./prepare.js";

// ---- fit ----

export function fitTab(work, result, card) {
  const fields = work.form.plan.map((field) => fieldOf(work, field, "plan"));
  card.append(h("h3", {}, "The machine"), ...fields.slice(0, 5), h("details", {}, h("summary", {}, "more of it"), fields.slice(5)));
  const target = h("div");
  const ask = doer(work, "Will it fit?", target, () => work.ask("fit", { plan: work.plan }), (found) => {
    const kinds = [...new Set(found.bars.flatMap((bar) => Object.keys(bar.parts)))];
    const most = Math.max(...found.bars.flatMap((bar) => [bar.used, bar.limit]));
    return [h("div", { class: "card" }, h("h2", {}, found.fits ? "It fits" : "It does not fit"), h("p", { class: "dim" }, said(found.text.split("\n")[0]), ": set your machine's at the left"), found.bars.map((bar) => barOf(bar, kinds, most)),
      h("p", { class: "key" }, kinds.map((kind, n) => { const line = h("i", { class: "line" }); line.style.borderTop = `8px solid ${colour(n)}`; return h("span", {}, line, said(kind)); }))),
    h("div", { class: "card" }, h("div", { class: "bar" }, h("h2", {}, "What plan.py says, and what to type"), h("span", { class: "space" }), copier(() => found.text)), said(found.text, { tabindex: "0" }, "pre")), printedBy(found)];
  }, { class: "primary" });
  card.actions.append(ask);
  result.append(target);
}

function barOf(bar, kinds, most) {
  const parts = Object.entries(bar.parts).map(([kind, size]) => {
    const part = h("i", { title: `${kind}: ${size.toFixed(1)} GiB` });
    part.style.width = `${(100 * size) / most}%`;
    part.style.backgroundColor = colour(kinds.indexOf(kind));
    return part;
  });
  const limit = h("b", { title: `${bar.limit.toFixed(1)} GiB can be used` });
  limit.style.left = `${(100 * bar.limit) / most}%`;
  const words = Object.entries(bar.parts).map(([kind, size]) => `${kind} ${size.toFixed(1)}`).join(", ");
  return h("div", { class: "memory" }, h("p", {}, said(bar.title), h("span", { class: bar.used > bar.limit ? "fault" : "dim" }, ` ${bar.used.toFixed(1)} of ${bar.limit.toFixed(1)} GiB`)), h("div", { class: "memory-bar", role: "img", "aria-label": `${bar.title}, in GiB: ${words}` }, parts, limit));
}

// ---- launch ----

export function launchTab(work, result) {
  const search = h("input", { type: "search", placeholder: "a word of a name or help text", "aria-label": "Filter settings", oninput: () => filter() });
  const only = h("input", { type: "checkbox", onchange: () => filter() });
  const form = h("form", { class: "knobs", "aria-label": "All settings", onsubmit: (event) => event.preventDefault() });
  const first = Object.entries(work.form.first).map(([wish, names]) => [wish, names]);
  const shown = new Set(first.flatMap(([, names]) => names));
  const groups = new Map([["file", ["config"]], ...first]);
  for (const field of work.form.fields) if (!shown.has(field.name)) groups.set(field.group, [...(groups.get(field.group) ?? []), field.name]);
  const sections = [...groups].map(([group, names]) => {
    const fields = names.filter((name) => work.fields.has(name)).map((name) => fieldOf(work, work.fields.get(name)));
    const count = h("span", { class: "dim" });
    const section = h("details", { class: "card", open: shown.has(names[0]) || group === "file" }, h("summary", {}, said(group), " ", count), h("div", { class: "fields" }, fields));
    return { section, fields, count, open: section.open };
  });
  form.append(...sections.map(({ section }) => section));
  function filter() {
    const word = search.value.toLowerCase();
    for (const { section, fields, open } of sections) {
      let seen = 0;
      for (const made of fields) {
        const field = work.fields.get(made.dataset.field);
        made.hidden = !(`${field.name} ${field.help}`.toLowerCase().includes(word) && (!only.checked || made.classList.contains("differs")));
        seen += !made.hidden;
      }
      section.hidden = !seen;
      section.open = word || only.checked ? Boolean(seen) : open;
    }
  }

  const command = said("", { tabindex: "0", class: "command" }, "pre");
  const yaml = said("", { tabindex: "0" }, "pre");
  const fault = h("div", { class: "note bad", role: "status", hidden: true });
  const started = h("div");
  const ranks = h("input", { type: "number", class: "step", min: "1", value: "1", "aria-label": "Processes", onchange: () => { work.ranks = Number(ranks.value); work.check(); } });
  const serves = h("input", { type: "checkbox", onchange: () => { work.serves = serves.checked; work.check(); } });
  const needs = h("p", { class: "dim", hidden: true });
  const beside = h("label", { title: "scripts/serve_and_train.sh: a server of the model on this machine, which ends with the training" }, serves, " start its server, too");
  let launched = [];
  const go = doer(work, "Start it", started, () => work.send("launch", { ranks: work.ranks, serves: work.serves, settings: { ...work.settings, run_name: work.settings.run_name ?? work.told.run_name } }), (made) => {
    look();
    return h("p", { class: "note" }, h("code", {}, said(made.name)), " is started. It goes on when this page is closed.");
  }, { class: "primary" });
  work.listeners.push((told) => {
    fault.hidden = !told.error;
    fault.replaceChildren(...(told.error ? [said(told.error)] : []));
    go.disabled = Boolean(told.error);
    beside.hidden = told.error ? beside.hidden : told.generator !== "vllm";
    needs.hidden = beside.hidden || serves.checked;
    needs.replaceChildren("Sampling is a server's (--generator vllm), which must run at ", said(told.values?.server_urls), ", or be started too. On one GPU or a CPU --generator hf needs none.");
    for (const { fields, count } of sections) {
      const number = fields.filter((made) => made.classList.contains("differs")).length;
      count.textContent = number ? `${number} set` : "";
    }
    if (told.error) {
      command.replaceChildren("first correct what is marked");
      yaml.replaceChildren("first correct what is marked");
      return;
    }
    const flags = told.command.split(/ (?=--)/).flatMap((words) => [said(words, { class: "unbroken" }), " "]);
    command.replaceChildren(told.serves ? `SERVER: bash scripts/serve_and_train.sh ${told.run_name} ${told.model_id} ${told.window} …\n` : "", ...flags);
    yaml.replaceChildren(said(told.yaml || "# nothing differs from the defaults"));
    filter();
  });

  // What was started: drawn anew where something changed, but for the log, which stays where it is read.
  const list = h("div", { "aria-label": "Started from here" });
  let open = null;
  let end = 0;
  let following = 0;
  const log = said("", { tabindex: "0", class: "log", "aria-label": "Log" }, "pre");
  const act = (one, label, action, attributes = {}) => h("button", { type: "button", ...attributes, onclick: async () => {
    try {
      await work.send(action, { name: one.name });
    } catch (error) {
      tell(error.message);
    }
    look();
  } }, label);
  function line(one) {
    const mark = h("span", { class: `state ${one.state === "stopping" ? "running" : one.state}` }, one.state + (one.state === "failed" ? `, status ${one.status}` : one.state === "stopping" ? " …" : one.step ? `, step ${one.step}` : ""));
    const show = h("button", { type: "button", "aria-expanded": String(open === one.name), onclick: () => { open = open === one.name ? null : one.name; end = 0; log.replaceChildren(); draw(); follow(++following); } }, "log");
    return h("div", {}, h("div", { class: "bar" }, h("b", { title: one.command }, said(one.name)), mark, h("span", { class: "dim" }, age(one.time)), h("span", { class: "space" }),
      one.has_run ? h("a", { class: "button", href: link("run", { run: one.run }) }, "curves") : null,
      one.settings ? h("a", { class: "button", title: "what it was started with, in the form", href: link("prepare", { tab: "launch", script: one.script, ...Object.fromEntries(Object.entries(one.settings).map(([name, text]) => [`s.${name}`, text])) }) }, "settings") : null, show, one.state === "stopping" ? act(one, "end at once", "kill") : one.alive ? act(one, "stop", "stop", { title: "as Ctrl-C: what there is, is written" }) : one.can_resume ? act(one, "resume", "resume") : null),
      one.why && open !== one.name ? h("p", { class: "fault" }, said(one.why)) : null);
  }
  let drawn = "";
  const lines = new Map(); // name: its element, with the line and, where it is open, the log
  function draw() {
    const text = JSON.stringify([launched, open]);
    if (text === drawn) return;
    drawn = text;
    const focused = [...list.querySelectorAll("button, a")].indexOf(document.activeElement);
    const shown = launched.map((one) => {
      if (!lines.has(one.name)) lines.set(one.name, h("div", { class: "launched" }, h("div")));
      const made = lines.get(one.name);
      made.firstChild.replaceWith(line(one));
      if (open === one.name && log.parentNode !== made) made.append(log);
      return made;
    });
    if (open === null) log.remove();
    if (!shown.length) list.replaceChildren(h("p", { class: "dim" }, "Nothing yet."));
    else if (shown.length !== list.childNodes.length || shown.some((made, n) => made !== list.childNodes[n])) {
      const top = log.scrollTop;
      list.replaceChildren(...shown);
      log.scrollTop = top;
    }
    if (focused >= 0) [...list.querySelectorAll("button, a")][focused]?.focus();
  }
  const look = poll("prepare", () => ({}), 2000, (about) => { launched = about.launched; draw(); }, work.signal);
  async function follow(turn) {
    if (!open || turn !== following || work.signal.aborted) return;
    try {
      const found = await get("launch_log", { name: open, from: end });
      if (turn !== following) return;
      if (found.from < end) log.replaceChildren();
      const bottom = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      if (found.text) log.append(said(found.text));
      while (log.childNodes.length > 200) log.firstChild.remove();
      end = found.end;
      if (bottom) log.scrollTop = log.scrollHeight;
    } catch (error) {
      tell(error.message);
    }
    setTimeout(() => follow(turn), 1000);
  }
  result.append(h("div", { class: "columns even" }, h("div", {}, h("div", { class: "bar" }, search, h("label", {}, only, " what differs from the defaults")), form),
    h("div", { class: "beside-form" }, h("div", { class: "card" }, h("h2", {}, "Start"), fault, h("div", { class: "bar" }, h("label", {}, "processes ", ranks), beside, h("span", { class: "space" }), go), needs, started),
      h("div", { class: "card" }, h("div", { class: "bar" }, h("h2", {}, "Command"), h("span", { class: "space" }), copier(() => work.told.command ?? "")), command,
        h("details", {}, h("summary", {}, "as a --config file"), copier(() => work.told.yaml ?? ""), yaml)),
      h("div", { class: "card" }, h("h2", {}, "Started from here"), list))));
}
