"""report.html: one self-contained page about a run, from whatever is in its folder so far.

    python -m runlog runs/NAME

A metric that a run does not have has no plot; one that PANELS does not know is listed at the end.
"""

import base64
import hashlib
import html
import io
import json
import math
import re
import warnings
from pathlib import Path

from cli import ConfigError
from runlog import advice, disk, samples
from runlog.curves import SOLVED, Curves, domains, duration, is_number
from runlog.curves import panels as panels_of
from runlog.reading import call_text, metrics_lines, readable_prompt
from safety.storable import visible

COLORS = ["#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#9ca3af"]

VIEWED_TOKENS = 2000  # of a trajectory in the token view
PAGE_SCRIPTS = ("text.js", "tokens.js")
DRAW_VIEWS = """
for (const { title, view } of JSON.parse(document.getElementById("tokens").textContent)) {
  const card = document.createElement("div");
  card.className = "card";
  card.append(Object.assign(document.createElement("h3"), { textContent: title }), tokenView(view, "trained"));
  document.getElementById("views").append(card);
}
"""

STYLE = """
:root { color: #1f2937; background: #f3f4f6; font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif }
body { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px }
h1 { font-size: 26px; margin: 0 } h2 { font-size: 18px; margin: 36px 0 10px } .dim { color: #566070 }
.tiles, .grid { display: grid; gap: 14px } .tiles { grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)) }
.grid { grid-template-columns: repeat(auto-fill, minmax(350px, 1fr)) }
.card { background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; padding: 12px 14px; overflow: hidden }
.card h3 { font-size: 14px; margin: 0 } .card p { font-size: 12px; margin: 0; color: #566070 } .card img { width: 100% }
.big { font-size: 26px; font-weight: 650; white-space: nowrap } .hero { border-left: 5px solid #2563eb }
table { border-collapse: collapse; width: 100%; font-size: 13px } td, th { padding: 5px 9px; text-align: left;
vertical-align: top; border-bottom: 1px solid #eef0f3 } th { color: #566070; font-weight: 500 }
td.n { text-align: right; font-variant-numeric: tabular-nums } td.t { white-space: pre-wrap; overflow-wrap: anywhere;
font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; max-width: 420px }
.said { border-left: 3px solid #2563eb; padding-left: 7px }
.pill { border-radius: 9px; padding: 0 8px; font-variant-numeric: tabular-nums }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px } details { margin-top: 10px }
summary { cursor: pointer; font-weight: 600 } .card img.seen { width: 192px; image-rendering: pixelated }
"""


def escape(value) -> str:
    """Text for the page, whatever a model or a data set put into it."""
    return html.escape(visible(str(value)))


def label(name: str) -> str:
    """A metric's name in a plot: in one line, not a formula, and one that legends do not leave out, as they do an empty
    one or one that begins with an underscore."""
    text = shorten(visible(name.lstrip("_")).replace("\n", " ").replace("\t", " "), 40)
    return text.replace("$", r"\$") or "(no name)"


# ---- plots ----------------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float):
    from matplotlib.figure import Figure  # here, as it takes a second; no pyplot: nothing global, no display needed

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eef0f3")
    axes.set_axisbelow(True)
    axes.xaxis.get_major_locator().set_params(integer=True)  # steps
    axes.spines[["left", "bottom"]].set_color("#d1d5db")
    axes.tick_params(labelsize=9, color="#9ca3af", labelcolor="#6b7280")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value + 0.0:.6g}")  # nothing written above, where the legend is
    return figure, axes


def widen(axes) -> None:
    """No axis of less than a thousandth of its values: ratios that are 1 up to rounding are a line at 1."""
    low, high = axes.get_ylim()
    least = 1e-3 * max(abs(low), abs(high))
    if high - low < least:
        middle = (low + high) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)


def image(figure) -> str:
    """The figure as an <img> that carries its own data."""
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name in letters that the font lacks: drawn as a box
        figure.savefig(out, format="svg")
    return f'<img alt="" src="data:image/svg+xml;base64,{base64.b64encode(out.getvalue()).decode()}">'


def label_end(axes, x, y, text, color) -> None:
    axes.annotate(text, (x, y), xytext=(5, 0), textcoords="offset points", fontsize=9, color=color, va="center")


def legend(axes, columns: int) -> None:
    """Above the axes, where it covers no curve."""
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    axes.legend(fontsize=8, frameon=False, ncols=columns, labelcolor="#374151", columnspacing=1.2, **place)


def plot_reward(curves: Curves) -> str:
    """Training reward with its band of one standard deviation within groups; held-out accuracy as dots."""
    figure, axes = new_figure(11, 3.6)
    x, reward = curves.series("reward")
    spread_x, spread = curves.series("reward_std")
    if x:
        axes.plot(x, reward, color=COLORS[0], lw=2, label="training reward", marker="o" if len(x) < 3 else None)
        label_end(axes, x[-1], reward[-1], f"{reward[-1]:.2f}", COLORS[0])
    if x and spread_x == x:
        low, high = ([r + sign * s for r, s in zip(reward, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=COLORS[0], alpha=0.12, lw=0, label="± reward_std")
    for key in curves.matching(SOLVED)[:1]:
        eval_x, solved = curves.series(key)
        axes.plot(eval_x, solved, color=COLORS[1], lw=1.5, ls="--", marker="o", ms=7, label="held-out, share solved")
        label_end(axes, eval_x[-1], solved[-1], f"{solved[-1]:.2f}", COLORS[1])
    axes.set_xlabel("step", fontsize=9, color="#6b7280")
    legend(axes, 3)
    return image(figure)


def plot_panel(curves: Curves, labels: dict[str, str]) -> str:
    figure, axes = new_figure(4.6, 2.5)
    for (key, name), color in zip(labels.items(), COLORS, strict=False):
        x, y = curves.series(key)
        axes.plot(x, y, color=color, lw=1.6, label=label(name), marker="o" if len(x) < 12 else None, ms=4)
    widen(axes)
    if len(labels) > 1:
        legend(axes, 3)
    return image(figure)


def plot_times(curves: Curves) -> str:
    """Seconds of each step, stacked by phase."""
    steps, split = curves.phases(curves.size())
    figure, axes = new_figure(11, 2.8)
    axes.stackplot(
        steps,
        [*split.values()],
        labels=[label(name) for name in split],
        colors=COLORS,
        alpha=0.85,
        lw=0,
        step="mid",
    )
    axes.set_ylabel("seconds per step", fontsize=9, color="#6b7280")
    axes.margins(x=0)
    axes.set_xlabel("step", fontsize=9, color="#6b7280")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1), labelcolor="#374151")
    return image(figure)


# ---- page -----------------------------------------------------------------------------------------------------------


def number(value) -> str:
    return f"{value:.3g}" if is_number(value) else "n/a"


def tile(label: str, value: str, note: str = "", hero: bool = False) -> str:
    kind = "card hero" if hero else "card"
    return f'<div class="{kind}"><p>{escape(label)}</p><div class="big">{value}</div><p>{escape(note)}</p></div>'


def tiles(curves: Curves) -> str:
    """Before and after, and what it cost."""
    shown = []
    for key in curves.matching(SOLVED):
        x, y = curves.all(key)
        note = f"held-out, step {x[0]:.0f} to step {x[-1]:.0f}" if len(x) > 1 else f"held-out, step {x[0]:.0f}"
        value = f"{y[0]:.2f} → {y[-1]:.2f}" if len(x) > 1 else f"{y[0]:.2f}"
        shown.append(tile(key.removeprefix("eval/"), value, note, hero=True))
    steps, reward = curves.all("reward")
    if len(steps):
        note = f"best {max(reward):.2f}, {steps[-1]:.0f} steps"
        shown.append(tile("training reward", f"{reward[0]:.2f} → {reward[-1]:.2f}", note))
    if (passed := curves.axis("seconds")[1][-1]) > 0:
        steps, seconds = curves.step_seconds()
        note = f"median {sorted(seconds)[len(seconds) // 2]:.1f} s a step"
        note += f", by {len(steps)} logged ones" if len(steps) < steps[-1] else ""
        shown.append(tile("time in steps", duration(passed), note))
    if len(speed := curves.all("time/tokens_per_second")[1]):
        shown.append(tile("speed", f"{sum(speed) / len(speed):.0f} tok/s", "prompts and completions, whole step"))
    return f'<div class="tiles">{"".join(shown)}</div>'


def panels(curves: Curves, config: dict) -> str:
    """One small plot for each panel that has data."""
    cards = []
    for title, note, labels in panels_of(curves, config, others=False):
        heading = f"<h3>{escape(title)}</h3><p>{escape(note)}&nbsp;</p>"
        cards.append(f'<div class="card">{heading}{plot_panel(curves, labels)}</div>')
    return f'<div class="grid">{"".join(cards)}</div>' if cards else ""


def table_of_metrics(curves: Curves) -> str:
    rows = []
    for key in sorted(curves.columns):
        _, y = curves.all(key)
        cells = "".join(f'<td class="n">{number(v)}</td>' for v in (y[0], y[-1], min(y), max(y)))
        rows.append(f"<tr><td>{escape(shorten(key, 200))}</td>{cells}</tr>")
    return f"<table><tr><th>metric</th><th>first</th><th>last</th><th>min</th><th>max</th></tr>{''.join(rows)}</table>"


def shorten(text: str, limit: int = 700) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"


def pill(value, low: float, high: float) -> str:
    """A score on a background from red (lowest shown) to green (highest shown)."""
    if not is_number(value):
        return number(None)
    share = (value - low) / (high - low) if high > low else 0.5
    return f'<span class="pill" style="background: hsl({120 * share:.0f} 70% 88%)">{value:.3g}</span>'


def said(row: dict) -> str:
    """The completion; of several turns each, what is trained on beside a bar and what answered it, masked, without."""
    turns = samples.turns(row)
    if not turns:
        return escape(shorten(str(row.get("completion"))))
    parts = []
    for turn in turns:
        earned = f' <span class="dim">reward {number(turn["reward"])}</span>' if turn["reward"] else ""
        parts.append(f'<div class="said">{escape(shorten(turn["text"]))}{earned}</div>')
        if turn["observation"] or turn["calls"]:  # calls whose answer did not fit, too
            calls = escape(", ".join(map(call_text, turn["calls"])))
            answer = escape(shorten(chr(10).join(turn["observation"])))
            parts.append(f'<div class="dim">{calls}{chr(10) if calls else ""}{answer}</div>')
    return "".join(parts)


def table_of_completions(rows: list[dict], bounds: dict[str, tuple[float, float]]) -> str:
    """Rows of a completions file; `bounds` are the lowest and highest of each score, for its colour."""
    header = "".join(f"<th>{escape(name)}</th>" for name in ["prompt", "completion", *bounds, "ended by"])
    body, previous = [], None
    for row in rows:
        prompt = shorten(readable_prompt(row.get("prompt")))
        texts = ["″" if prompt == previous else escape(prompt), said(row)]
        cells = "".join(f'<td class="t">{text}</td>' for text in texts)
        cells += "".join(f'<td class="n">{pill(row.get(name), *bounds[name])}</td>' for name in bounds)
        body.append(f"<tr>{cells}<td>{escape(str(row.get('finish_reason') or ''))}</td></tr>")
        previous = prompt
    return f'<div class="card"><table><tr>{header}</tr>{"".join(body)}</table></div>'


def completions(run_dir: Path, count: int = 8) -> str:
    """The first rows of the first and of the last step: the completions of one prompt lie together there."""
    shown = {path: samples.first_rows(path, count) for path in samples.first_and_last(run_dir / "completions")}
    scores: dict[str, list[float]] = {}
    for row in (row for rows in shown.values() for row in rows):
        for name, value in row.items():
            if name in ("reward", "advantage") or name.startswith("rewards/"):
                scores.setdefault(name, []).extend([value] if is_number(value) else [])
    bounds = {name: (min(values, default=0.0), max(values, default=0.0)) for name, values in scores.items()}
    titles = {path: f"<h2>Completions of step {int(path.stem.removeprefix('step_'))}</h2>" for path in shown}
    return "".join(titles[path] + table_of_completions(rows, bounds) for path, rows in shown.items())


def side_by_side(columns: list[list[dict]]) -> list[list[dict]]:
    """The same rows of each evaluation: one in which all completions of a row failed lacks that row. Those of older
    runs, which have no row_number, by their place."""
    known = [{row.get("row_number", place): row for place, row in enumerate(rows)} for rows in columns]
    return [[rows[number] for rows in known] for number in known[0] if all(number in rows for rows in known)]


def before_and_after(run_dir: Path) -> str:
    """The first held-out rows at the first and at the last evaluation, side by side; with images, as pictures."""
    files = samples.first_and_last(run_dir / "evaluations")
    if not files:
        return ""
    body = ""
    for rows in side_by_side([samples.first_rows(path, 8) for path in files]):
        score = [pill(row["reward"], 0.0, 1.0) for row in rows]
        texts = [f"{said(row)}\n{s}" for row, s in zip(rows, score, strict=True)]
        seen = [
            f"{png(row['picture'])}\n{text}" if row.get("picture") else text
            for row, text in zip(rows, texts, strict=True)
        ]
        prompt = escape(shorten(readable_prompt(rows[0]["prompt"])))
        body += f'<tr><td class="t">{prompt}</td>{"".join(f"""<td class="t">{text}</td>""" for text in seen)}</tr>'
    header = "".join(f"<th>after step {int(path.stem.removeprefix('step_'))}</th>" for path in files)
    return f'<h2>Held-out rows</h2><div class="card"><table><tr><th>prompt</th>{header}</tr>{body}</table></div>'


def png(data: bytes) -> str:
    return f'<img class="seen" alt="" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def config_of(run_dir: Path) -> dict:
    """The run's settings; {} where they cannot be read."""
    try:
        config = json.loads(text_of(run_dir / "config.json"))
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def curves_of(run_dir: Path) -> Curves:
    return Curves(metrics_lines(run_dir))


def notes_of(run_dir: Path, curves: Curves) -> list[dict]:
    """What the page of look.py says of the run, in words."""
    config, last = config_of(run_dir), samples.first_and_last(run_dir / "completions")[-1:]
    of_file = [note for path in last for note in advice.of_completions(path, config)]
    return advice.both(of_file, advice.of_curves(curves, config))


def stands_out(run_dir: Path, curves: Curves) -> str:
    found = notes_of(run_dir, curves)
    rows = "".join(f"<tr><td><b>{escape(n['title'])}</b></td><td>{escape(n['text'])}</td></tr>" for n in found)
    return f'<h2>What stands out</h2><div class="card"><table>{rows}</table></div>' if found else ""


def token_views(run_dir: Path, config: dict) -> tuple[str, str]:
    """(a section with the tokens of a few trajectories, the script that draws them), or two empty texts.

    Of the first and the last step whose tokens were kept: the best and the worst completion of the group in which they
    differ most. The script and its style are those of the page, looking/page/.
    """
    if not config.get("log_tokens_every") and not (run_dir / "vocabulary.parquet").exists():
        return "", ""  # no file has any, so none has to be looked at
    known, shown = samples.vocabulary(run_dir), []
    for path in samples.first_and_last(run_dir / "completions", "token_ids"):
        for place, row in samples.telling(path):
            view = samples.token_view(samples.cut(row, VIEWED_TOKENS), known)
            title = f"Step {samples.step_of(path)}, completion {place}, reward {number(row.get('reward'))}"
            shown.append({"title": title, "view": view})
    if not shown:
        return "", ""
    data = json.dumps(shown, allow_nan=False).replace("<", "\\u003c")  # so that no text in it ends the element
    page = Path(__file__).parent.parent / "looking" / "page"
    parts = [
        re.sub(r"^(export |import .*$)", "", (page / name).read_text(encoding="utf-8"), flags=re.M)
        for name in PAGE_SCRIPTS
    ]
    body = f"<h2>Token by token</h2><style>{(page / 'tokens.css').read_text(encoding='utf-8')}</style>"
    body += f'<div id="views"></div><script type="application/json" id="tokens">{data}</script>'
    return body, "\n".join([*parts, DRAW_VIEWS])


def folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def write_report(run_dir: Path, curves: Curves | None = None) -> Path | None:
    """Write report.html into the run folder and return its path; None if nothing has been logged yet. curves: what
    `curves_of` gives, if it is known."""
    run_dir = Path(run_dir)
    curves = curves or curves_of(run_dir)
    if curves.last == -math.inf:
        return None
    config = config_of(run_dir)
    subtitle = [
        config.get("model_id"),
        ", ".join(domains(curves, config)) or config.get("dataset_id"),
        f"advantage {config.get('advantage')}",
        f"loss {config.get('policy_loss')}",
    ]
    plots = panels(curves, config)
    body = [
        f"<h1>{escape(run_dir.resolve().name)}</h1>",
        f'<p class="dim">{escape(" · ".join(str(part) for part in subtitle if part))}</p>',
        tiles(curves),
    ]
    if curves.matching(["reward", *SOLVED]):
        body.append(f'<h2>Reward</h2><div class="card">{plot_reward(curves)}</div>')
    body.append(stands_out(run_dir, curves))
    body.append(f"<h2>Is it healthy?</h2>{plots}" if plots else "")
    if curves.phases()[1]:
        body.append(f'<h2>Where the time goes</h2><div class="card">{plot_times(curves)}</div>')
    tokens, script = token_views(run_dir, config)
    body += [before_and_after(run_dir), completions(run_dir), tokens]
    settings = "".join(f"<tr><td>{escape(k)}</td><td>{escape(json.dumps(v))}</td></tr>" for k, v in config.items())
    body += ["<h2>Details</h2>", folded("All metrics", table_of_metrics(curves))]
    body.append(folded("Settings", f"<table>{settings}</table>"))
    command = text_of(run_dir / "command.txt") + "\n" + text_of(run_dir / "environment.txt")
    body.append(folded("Command and environment", f"<pre>{escape(command)}</pre>"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(run_dir.resolve().name)}</title>"
    page += f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'  # this script and no other
    page += (
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style><body>{''.join(body)}"
        + (f'<script type="module">{script}</script>' if script else "")
        + "</body></html>"
    )
    path = run_dir / "report.html"
    disk.write_whole(path, page)
    return path


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        raise SystemExit("usage: python -m runlog RUN_DIR   (a folder like runs/NAME)")
    try:
        path = write_report(Path(arguments[0]), curves := curves_of(Path(arguments[0])))
    except OSError as error:
        raise SystemExit(f"report: {disk.trouble(Path(arguments[0]) / 'report.html', error)}") from None
    except ConfigError as error:  # a line of the metrics is damaged
        raise SystemExit(f"report: {error}") from None
    if path is None:
        raise SystemExit(f"report: {arguments[0]} has no line in metrics.jsonl yet")
    for note in notes_of(Path(arguments[0]), curves):
        print(f"{note['title']}: {note['text']}")
    print(f"report: {path}")
