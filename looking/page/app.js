// Which view is shown follows from the address: #/VIEW?what=is&chosen=in&it
import { h, inlined, link, said, tell, tick } from "./dom.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";
import { trajectoriesView } from "./trajectories.js";
import { trajectoryView } from "./trajectory.js";
import { tryView } from "./try.js";

const VIEWS = { runs: runsView, run: runView, trajectories: trajectoriesView, trajectory: trajectoryView, try: tryView };
// report.html is about one run, and holds some trajectories.
const RUN = inlined && new URLSearchParams(Object.keys(inlined)[0].split("?")[1]).get("run");
let leave = new AbortController();
let shown = "";

function navigation(view, parameters) {
  const runs = parameters.getAll("run");
  const item = (name, label, given, here) => h("a", { href: link(name, given), "aria-current": here ? "page" : undefined }, label);
  if (inlined) {
    const isHere = (place) => ["step", "row"].every((key) => parameters.get(key) === String(place[key]));
    const own = inlined.trajectories.map((place) => item("trajectory", `Step ${place.step}, completion ${place.row}`, place, isHere(place)));
    return [h("span", { class: "crumb" }, said(RUN)), item("run", "Curves", { run: RUN }, view === "run"), ...own];
  }
  const found = [item("runs", "Runs", {}, view === "runs")];
  if (document.body.dataset.try !== undefined) found.push(item("try", "Try", {}, view === "try"));
  if (view === "run" && runs.length > 1) found.push(item("run", `Compare ${runs.length}`, { run: runs }, true));
  else if (runs.length && view !== "runs") {
    const place = { run: runs[0], ...Object.fromEntries(["kind", "step", "row"].map((key) => [key, parameters.get(key)])) };
    found.push(h("span", { class: "crumb" }, said(runs[0])), item("run", "Curves", { run: runs[0] }, view === "run"),
      item("trajectories", "Trajectories", place, view === "trajectories"));
    if (place.row !== null) found.push(item("trajectory", "Turns and tokens", place, view === "trajectory"));
  }
  return found;
}

function route() {
  const first = RUN ? [null, "run", `run=${encodeURIComponent(RUN)}`] : [null, "runs", ""];
  const [, asked, query] = /^#\/(\w+)\??(.*)$/.exec(location.hash) ?? first;
  const name = asked in VIEWS ? asked : "runs";
  const parameters = new URLSearchParams(query);
  leave.abort();
  leave = new AbortController();
  tell("");
  document.getElementById("nav").replaceChildren(...navigation(name, parameters));
  document.title = [...parameters.getAll("run").slice(0, 2), name].join(" · ");
  const main = document.getElementById("main");
  const content = h("div", { class: `view ${name}` });
  main.replaceChildren(content);
  if (shown && shown !== name) main.focus({ preventScroll: true });
  if (shown !== name) scrollTo(0, 0);
  shown = name;
  Promise.resolve(VIEWS[name](content, parameters, leave.signal)).catch((error) => tell(error.message));
}

// The token does not stay in the address, where it would get into bookmarks and pictures.
const address = new URL(location.href);
if (address.searchParams.has("token")) {
  localStorage.setItem("token", address.searchParams.get("token"));
  history.replaceState(null, "", address.pathname + address.hash);
}
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says what is shown
  document.getElementById("main").focus();
});
addEventListener("hashchange", route);
addEventListener("unhandledrejection", (event) => {
  event.preventDefault();
  tell(event.reason.message);
});
setInterval(tick, 1000);
route();
