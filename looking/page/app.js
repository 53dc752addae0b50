// Which view is shown follows from the address: #/VIEW?what=is&chosen=in&it
import { h, inlined, link, said, tell, tick } from "./dom.js";
import { compareView } from "./compare.js";
import { rowView } from "./row.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";
import { trajectoriesView } from "./trajectories.js";
import { trajectoryView } from "./trajectory.js";
import { trying, tryView } from "./try.js";

const VIEWS = {
  runs: runsView, compare: compareView, run: runView, trajectories: trajectoriesView, trajectory: trajectoryView, row: rowView, try: tryView,
};
let leave = new AbortController();

function navigation(view, parameters) {
  if (inlined) return contents(parameters);
  const runs = parameters.getAll("run");
  const item = (name, label, given) => h("a", { href: link(name, given), "aria-current": name === view ? "page" : undefined }, label);
  const found = [item("runs", "Runs", {}), ...(trying() ? [item("try", "Try", {})] : [])];
  if (view === "compare") found.push(item("compare", `Compare ${runs.length}`, { run: runs }));
  else if (runs.length && view !== "runs") {
    const run = { run: runs[0] };
    const place = { ...run, kind: parameters.get("kind"), step: parameters.get("step"), row: parameters.get("row") };
    found.push(h("span", { class: "crumb" }, said(runs[0])), item("run", "Curves", run), item("trajectories", "Trajectories", place));
    if (parameters.get("row") !== null) found.push(item("trajectory", "Turns and tokens", place), item("row", "Over time", place));
  }
  document.getElementById("nav").replaceChildren(...found);
  document.title = [...runs.slice(0, 2), view].join(" · ");
}

/** Of report.html: its run, and the trajectories that it holds. */
function contents(parameters) {
  const places = [["run", { run: RUN }, "Curves"], ...inlined.trajectories.map((place) => ["trajectory", place, `Step ${place.step}, completion ${place.row}`])];
  const here = (place) => ["step", "row"].every((key) => (parameters.get(key) ?? undefined) === (place[key] === undefined ? undefined : String(place[key])));
  document.getElementById("nav").replaceChildren(h("span", { class: "crumb" }, said(RUN)),
    ...places.map(([view, place, label]) => h("a", { href: link(view, place), "aria-current": here(place) ? "page" : undefined }, label)));
}

const RUN = inlined && new URLSearchParams(Object.keys(inlined)[0].split("?")[1]).get("run");
let shown = "";
function route() {
  const first = RUN ? [null, "run", `run=${encodeURIComponent(RUN)}`] : [null, "runs", ""];
  const [, name, query] = /^#\/(\w+)\??(.*)$/.exec(location.hash) ?? first;
  leave.abort();
  leave = new AbortController();
  const parameters = new URLSearchParams(query);
  const view = VIEWS[name] ?? runsView;
  const main = document.getElementById("main");
  tell("");
  navigation(name in VIEWS ? name : "runs", parameters);
  const content = h("div", { class: `view ${name}` });
  main.replaceChildren(content);
  if (shown && shown !== name) main.focus({ preventScroll: true });
  if (shown !== name) scrollTo(0, 0);
  shown = name;
  Promise.resolve(view(content, parameters, leave.signal)).catch((error) => tell(error.message));
}

// The token is in a cookie by now: it need not stand in the address, where it would get into bookmarks and pictures.
const address = new URL(location.href);
if (address.searchParams.has("token")) history.replaceState(null, "", address.pathname + address.hash);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says what is shown
  document.getElementById("main").focus();
});
addEventListener("hashchange", route);
setInterval(tick, 1000);
route();
