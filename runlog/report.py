"""report.html: one self-contained page about a run, from whatever is in its folder so far.

    python -m runlog runs/NAME

A metric that a run does not have has no plot; one that PANELS does not know is listed at the end.
"""

import base64
import html
import io
import json
import warnings
from pathlib import Path

from runlog.reading import call_text, phases, read_metrics, readable_prompt
from safety.storable import visible

# (title, what to look for, metric names; a trailing * takes all that begin so)
PANELS = [
    ("Reward by function", "which part of the reward is being earned", ["rewards/*"]),
    ("Held-out rows", "never trained on", ["eval/mean@*", "eval/pass@*"]),
    ("Held-out rows by function", "parts of the score", ["eval/rewards/*"]),
    ("Groups without signal", "all completions scored alike: they teach nothing", ["frac_reward_zero_std"]),
    ("Completion length", "tokens", ["completions/mean_length", "completions/max_length"]),
    ("Cut off", "share of completions that hit the length limit", ["completions/clipped_ratio"]),
    ("Turns", "a trajectory, on average", ["turns/mean", "tools/call_frequency"]),
    ("Failed calls", "share of the calls of tools", ["tools/failure_frequency"]),
    ("Entropy", "towards 0 the policy has stopped exploring", ["entropy"]),
    ("Clipped tokens", "share of tokens the policy loss clips", ["clip_ratio/*"]),
    ("KL", "distance from the reference model", ["kl", "kl/*"]),
    ("Gradient norm", "before clipping", ["grad_norm"]),
    ("Trainer against generator", "small and flat", ["sampling/logprob_diff_mean", "sampling/kl"]),
    ("Importance weights", "trainer / generator; near 1 is good", ["sampling/ratio_mean", "sampling/ess"]),
    ("Loss", "no measure of progress: watch the reward", ["loss"]),
    ("Learning rate", "", ["lr"]),
    ("Held-out reward", "mean score", ["eval/reward"]),
    ("Held-out length", "tokens", ["eval/mean_length"]),
]
BY_DOMAIN = [  # the same of each domain, one curve a domain, where a run has several
    ("Reward by domain", "each has rewards of its own", "{}/reward"),
    ("Held-out rows by domain", "share solved", "eval/{}/mean@*"),
    ("Groups without signal by domain", "they teach nothing", "{}/frac_reward_zero_std"),
    ("Completion length by domain", "tokens", "{}/completions/mean_length"),
    ("Prompts by domain", "of a step", "{}/prompts"),
]
SOLVED = ["eval/mean@*"]  # share of held-out completions solved: the headline
COLORS = ["#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#65a30d", "#9ca3af"]
POINTS = 400  # a curve of more steps is drawn as means over bins

STYLE = """
:root { color: #1f2937; background: #f3f4f6; font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif }
body { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px }
h1 { font-size: 26px; margin: 0 } h2 { font-size: 18px; margin: 36px 0 10px } .dim { color: #6b7280 }
.tiles, .grid { display: grid; gap: 14px } .tiles { grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)) }
.grid { grid-template-columns: repeat(auto-fill, minmax(350px, 1fr)) }
.card { background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; padding: 12px 14px; overflow: hidden }
.card h3 { font-size: 14px; margin: 0 } .card p { font-size: 12px; margin: 0; color: #6b7280 } .card img { width: 100% }
.big { font-size: 26px; font-weight: 650; white-space: nowrap } .hero { border-left: 5px solid #2563eb }
table { border-collapse: collapse; width: 100%; font-size: 13px } td, th { padding: 5px 9px; text-align: left;
vertical-align: top; border-bottom: 1px solid #eef0f3 } th { color: #6b7280; font-weight: 500 }
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
    """A metric's name in a plot: in one line, not a formula, and with a beginning that legends do not leave out."""
    return shorten(visible(name.lstrip("_")).replace("\n", " ").replace("\t", " "), 40).replace("$", r"\$")


# ---- series ---------------------------------------------------------------------------------------------------------


def split_lines(lines: list[dict]) -> tuple[list[dict], list[dict]]:
    """(lines of steps, lines of evaluations), sorted by step; a repeated evaluation counts once, the last time."""
    evals = {line["step"]: line for line in lines if any(key.startswith("eval/") for key in line)}
    steps = {line["step"]: line for line in lines if not any(key.startswith("eval/") for key in line)}
    return [steps[k] for k in sorted(steps)], [evals[k] for k in sorted(evals)]


def is_number(value) -> bool:
    """Whether it can be drawn: plots fail on numbers near the end of their range."""
    return isinstance(value, (int, float)) and abs(value) < 1e100  # not so of nan


def series(lines: list[dict], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of a metric where it is a number; longer than POINTS, means over equal bins."""
    found = [(line["step"], line[key]) for line in lines if is_number(line.get(key))]
    size = -(-len(found) // POINTS) or 1
    bins = [found[i : i + size] for i in range(0, len(found), size)]
    return tuple([sum(pair[k] for pair in b) / len(b) for b in bins] for k in (0, 1))


def matching(lines: list[dict], patterns: list[str]) -> list[str]:
    keys = list(dict.fromkeys(key for line in lines for key in line if key != "step"))
    fits = [k for p in patterns for k in keys if k == p or (p.endswith("*") and k.startswith(p[:-1]))]
    return [k for k in dict.fromkeys(fits) if series(lines, k)[0]]


# ---- plots ----------------------------------------------------------------------------------------------------------


def new_figure(width: float, height: float):
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eef0f3")
    axes.set_axisbelow(True)
    axes.xaxis.get_major_locator().set_params(integer=True)  # steps
    axes.spines[["left", "bottom"]].set_color("#d1d5db")
    axes.tick_params(labelsize=9, color="#9ca3af", labelcolor="#6b7280")
    return figure, axes


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


def plot_reward(steps: list[dict], evals: list[dict]) -> str:
    """Training reward with its band of one standard deviation within groups; held-out accuracy as dots."""
    figure, axes = new_figure(11, 3.6)
    x, reward = series(steps, "reward")
    spread_x, spread = series(steps, "reward_std")
    if x:
        axes.plot(x, reward, color=COLORS[0], lw=2, label="training reward", marker="o" if len(x) < 3 else None)
        label_end(axes, x[-1], reward[-1], f"{reward[-1]:.2f}", COLORS[0])
    if x and spread_x == x:
        low, high = ([r + sign * s for r, s in zip(reward, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=COLORS[0], alpha=0.12, lw=0, label="± reward_std")
    for key in matching(evals, SOLVED)[:1]:
        eval_x, solved = series(evals, key)
        axes.plot(eval_x, solved, color=COLORS[1], lw=1.5, ls="--", marker="o", ms=7, label="held-out, share solved")
        label_end(axes, eval_x[-1], solved[-1], f"{solved[-1]:.2f}", COLORS[1])
    axes.set_xlabel("step", fontsize=9, color="#6b7280")
    legend(axes, 3)
    return image(figure)


def plot_panel(lines: list[dict], keys: list[str], names: dict[str, str]) -> str:
    """names: of curves in the legend, where the metric's own does not say it."""
    figure, axes = new_figure(4.6, 2.5)
    for key, color in zip(keys, COLORS, strict=False):
        x, y = series(lines, key)
        name = names.get(key) or key.split("/", 1)[-1].removesuffix("/mean")
        axes.plot(x, y, color=color, lw=1.6, label=label(name), marker="o" if len(x) < 12 else None, ms=4)
    if len(keys) > 1:
        legend(axes, 3)
    return image(figure)


def plot_times(steps: list[dict]) -> str:
    """Seconds of each step, stacked by phase."""
    split = [{"step": line["step"], **phases(line)} for line in steps]
    total = {name: sum(line.get(name, 0.0) for line in split) for line in split for name in line if name != "step"}
    names = [name for name in total if total[name] > 0.005 * sum(total.values())]
    filled = [{name: line.get(name, 0.0) for name in ["step", *names]} for line in split]
    figure, axes = new_figure(11, 2.8)
    curves = [series(filled, name) for name in names]
    axes.stackplot(
        curves[0][0],
        [y for _, y in curves],
        labels=[label(name) for name in names],
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


def duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"


def tiles(steps: list[dict], evals: list[dict]) -> str:
    """Before and after, and what it cost."""
    shown = []
    for key in matching(evals, SOLVED):
        x, y = series(evals, key)
        note = f"held-out, step {x[0]:.0f} to step {x[-1]:.0f}" if len(x) > 1 else f"held-out, step {x[0]:.0f}"
        value = f"{y[0]:.2f} → {y[-1]:.2f}" if len(x) > 1 else f"{y[0]:.2f}"
        shown.append(tile(key.removeprefix("eval/"), value, note, hero=True))
    _, reward = series(steps, "reward")
    if reward:
        note = f"best {max(reward):.2f}, {len(steps)} steps"
        shown.append(tile("training reward", f"{reward[0]:.2f} → {reward[-1]:.2f}", note))
    per_step = [line.get("time/step") or sum(phases(line).values()) for line in steps]
    if sum(per_step) > 0:
        median = sorted(per_step)[len(per_step) // 2]
        shown.append(tile("time in steps", duration(sum(per_step)), f"median {median:.1f} s a step"))
    _, speed = series(steps, "time/tokens_per_second")
    if speed:
        shown.append(tile("speed", f"{sum(speed) / len(speed):.0f} tok/s", "prompts and completions, whole step"))
    return f'<div class="tiles">{"".join(shown)}</div>'


def panels(steps: list[dict], evals: list[dict], domains: list[str]) -> tuple[str, set[str]]:
    """One small plot for each of PANELS that has data, and the metrics used by them."""
    cards, used = [], set()
    several = [
        (title, note, [pattern.format(name) for name in domains]) for title, note, pattern in BY_DOMAIN if domains
    ]
    parts = [(f"{name}: reward by function", "which part is earned", [f"{name}/rewards/*"]) for name in domains]
    names = {
        key: name
        for _, _, patterns in several
        for name, pattern in zip(domains, patterns, strict=True)
        for key in matching(steps + evals, [pattern])
    }
    for title, note, patterns in PANELS + several + parts:
        lines = evals if patterns[0].startswith("eval/") else steps
        if keys := [key for key in matching(lines, patterns) if key not in used]:
            used |= set(keys)
            drawn = [key for key in keys if not key.endswith("/std")] or keys
            heading = f"<h3>{escape(title)}</h3><p>{escape(note)}&nbsp;</p>"
            cards.append(f'<div class="card">{heading}{plot_panel(lines, drawn[: len(COLORS)], names)}</div>')
    return f'<div class="grid">{"".join(cards)}</div>', used


def table_of_metrics(lines: list[dict]) -> str:
    rows = []
    for key in sorted(matching(lines, ["*"])):
        _, y = series(lines, key)
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
    if not row.get("turns"):
        return escape(shorten(str(row.get("completion"))))
    parts = []
    for turn in json.loads(row["turns"]):
        earned = f' <span class="dim">reward {number(turn["reward"])}</span>' if turn["reward"] else ""
        parts.append(f'<div class="said">{escape(shorten(turn["text"]))}{earned}</div>')
        if turn["observation"] or turn["calls"]:  # calls whose answer did not fit, too
            calls = f"{escape(', '.join(map(call_text, turn['calls'])))}\n" if turn["calls"] else ""
            parts.append(f'<div class="dim">{calls}{escape(shorten(chr(10).join(turn["observation"])))}</div>')
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


def step_files(folder: Path) -> list[Path]:
    """Its files by step; others may have put files of their own beside them."""
    return sorted(path for path in folder.glob("step_*.parquet") if path.stem.removeprefix("step_").isdecimal())


def completions(run_dir: Path, count: int = 8) -> str:
    """The first rows of the first and of the last step: the completions of one prompt lie together there."""
    import pyarrow.parquet

    files = step_files(run_dir / "completions")
    shown = {path: pyarrow.parquet.read_table(path).slice(0, count).to_pylist() for path in files[:1] + files[-1:]}
    scores: dict[str, list[float]] = {}
    for row in (row for rows in shown.values() for row in rows):
        for name, value in row.items():
            if name in ("reward", "advantage") or name.startswith("rewards/"):
                scores.setdefault(name, []).extend([value] if is_number(value) else [])
    bounds = {name: (min(values, default=0.0), max(values, default=0.0)) for name, values in scores.items()}
    titles = {path: f"<h2>Completions of step {int(path.stem.removeprefix('step_'))}</h2>" for path in shown}
    return "".join(titles[path] + table_of_completions(rows, bounds) for path, rows in shown.items())


def before_and_after(run_dir: Path) -> str:
    """The first held-out rows at the first and at the last evaluation, side by side; with images, as pictures."""
    import pyarrow.parquet

    files = step_files(run_dir / "evaluations")
    files = files[:1] + files[1:][-1:]
    if not files:
        return ""
    columns = [pyarrow.parquet.read_table(path).slice(0, 8).to_pylist() for path in files]
    body = ""
    for rows in zip(*columns, strict=False):
        score = [pill(row["reward"], 0.0, 1.0) for row in rows]
        texts = [f"{said(row)}\n{s}" for row, s in zip(rows, score, strict=True)]
        seen = [
            f"{png(row['picture'])}\n{text}" if row["picture"] else text for row, text in zip(rows, texts, strict=True)
        ]
        prompt = escape(shorten(readable_prompt(rows[0]["prompt"])))
        body += f'<tr><td class="t">{prompt}</td>{"".join(f"""<td class="t">{text}</td>""" for text in seen)}</tr>'
    header = "".join(f"<th>after step {int(path.stem.removeprefix('step_'))}</th>" for path in files)
    return f'<h2>Held-out rows</h2><div class="card"><table><tr><th>prompt</th>{header}</tr>{body}</table></div>'


def png(data: bytes) -> str:
    return f'<img class="seen" alt="" src="data:image/png;base64,{base64.b64encode(data).decode()}">'


def folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def write_report(run_dir: Path) -> Path | None:
    """Write report.html into the run folder and return its path; None if nothing has been logged yet."""
    run_dir = Path(run_dir)
    lines = read_metrics(run_dir)
    if not lines:
        return None
    steps, evals = split_lines(lines)
    config = json.loads(text_of(run_dir / "config.json") or "{}")
    domains = [entry["name"] for entry in config.get("domains", ())]
    subtitle = [
        config.get("model_id"),
        ", ".join(domains) or config.get("dataset_id"),
        f"advantage {config.get('advantage')}",
        f"loss {config.get('policy_loss')}",
    ]
    plots, used = panels(steps, evals, domains)
    body = [
        f"<h1>{escape(run_dir.resolve().name)}</h1>",
        f'<p class="dim">{escape(" · ".join(str(part) for part in subtitle if part))}</p>',
        tiles(steps, evals),
    ]
    if matching(steps, ["reward"]) or matching(evals, SOLVED):
        body.append(f'<h2>Reward</h2><div class="card">{plot_reward(steps, evals)}</div>')
    body.append(f"<h2>Is it healthy?</h2>{plots}" if used else "")
    if any(phases(line) for line in steps):
        body.append(f'<h2>Where the time goes</h2><div class="card">{plot_times(steps)}</div>')
    body += [before_and_after(run_dir), completions(run_dir)]
    settings = "".join(f"<tr><td>{escape(k)}</td><td>{escape(json.dumps(v))}</td></tr>" for k, v in config.items())
    body += ["<h2>Details</h2>", folded("All metrics", table_of_metrics(lines))]
    body.append(folded("Settings", f"<table>{settings}</table>"))
    command = text_of(run_dir / "command.txt") + "\n" + text_of(run_dir / "environment.txt")
    body.append(folded("Command and environment", f"<pre>{escape(command)}</pre>"))
    page = f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(run_dir.resolve().name)}</title>"
    page += (
        f"<meta name=viewport content='width=device-width'><style>{STYLE}</style><body>{''.join(body)}</body></html>"
    )
    path = run_dir / "report.html"
    path.write_text(page, encoding="utf-8", errors="backslashreplace")
    return path


def main(arguments: list[str]) -> None:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        raise SystemExit("usage: python -m runlog RUN_DIR   (a folder like runs/NAME)")
    path = write_report(Path(arguments[0]))
    if path is None:
        raise SystemExit(f"report: {arguments[0]} has no line in metrics.jsonl yet")
    print(f"report: {path}")
