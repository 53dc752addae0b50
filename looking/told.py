"""What the page says of a run, of several over each other, and in words: plain values, ready for JSON."""

import contextlib
import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np

from config import TrainConfig, public_config
from looking.runs import Gone, Run, digest, opened, stamp
from runlog import advice, samples
from runlog.curves import POINTS, SOLVED, Curves, domains, merged, panels

FREE = "seed run_name output_dir server_urls adapter resume save_steps report_to".split()  # no other setting


def described(run: Run, axis: str, known: str = "") -> dict:
    """Everything that a run's page draws. known: the "mark" of what it has; where that is the beginning of what there
    is now, the answer goes "behind" it: curves from their point "at" on, and nothing of what stays."""
    curves = run.curves()
    size, move = curves.size(), mover(curves, axis)
    mark, (begin,) = marked([curves], size, axis, known)

    def drawn(name: str, label: str) -> dict:
        return {"key": name, "name": label} | new_of(merged(curves.points(name), size), begin, move, size > 1)

    steps, split = curves.phases(size)
    first = ("Reward", "training reward and what was never trained on", headline(curves))
    shown = [first, *panels(curves, run.config())]
    told = {
        "mark": mark,
        "summary": run.summary(),
        "unreadable": run.unreadable,
        "panels": [
            {
                "title": title,
                "note": note,
                "curves": [drawn(name, label) for name, label in labels.items()],
            }
            for title, note, labels in shown
            if labels
        ],
        "spread": drawn("reward_std", "reward_std"),
        "times": [
            {"key": f"phase {name}", "name": name, **new_of(np.array([steps, seconds]), begin, move, False)}
            for name, seconds in split.items()
        ],
        "domains": domain_table(curves, run.config()),
    }
    if begin > -math.inf:
        return told | {"behind": True}
    return told | {
        "config": run.config(),
        "differs": differing(run.config()),
        "texts": {name: text_of(run, name) for name in ("command.txt", "environment.txt", "git.diff")},
    }


def marked(read: list[Curves], size: float, how, known: str) -> tuple[str, list[float]]:
    """(a mark of what the page has once it gets this answer; of each run the step from which on its points are new).

    The page sends the mark back as `known` with its next question, so that it gets only what came since. A point may
    stand for `size` steps: the last one that the page has may have changed, so it is sent again. All is new, from -inf,
    where the page knows nothing, or other runs, or has them with other sizes or otherwise (`how`)."""
    what = digest([curves.mark for curves in read], size, how)
    before, _, lasts = known.rpartition("_")
    begins = [-math.inf] * len(read)
    if before == what and lasts.count(",") == len(read) - 1:
        with contextlib.suppress(ValueError, OverflowError):
            begins = [math.floor(float(last) / size) * size for last in lasts.split(",")]
    return f"{what}_{','.join(repr(curves.last) for curves in read)}", begins


def new_of(points: np.ndarray, begin: float, move: Callable, extremes: bool) -> dict:
    """Points from step `begin` on, and how many there are before."""
    at = int(np.searchsorted(points[0], begin))
    found = {"at": at, **move(points[0, at:], points[1, at:])}
    return found | {"low": points[2, at:], "high": points[3, at:]} if extremes else found


@lru_cache(1)
def usual() -> dict:
    return public_config(TrainConfig())


def differing(config: dict) -> list[str]:
    """The settings that are not train_grpo.py's defaults."""
    return [name for name, value in config.items() if name in usual() and value != usual()[name]]


def headline(curves: Curves) -> dict[str, str]:
    """The training reward and the held-out score: {metric: label}."""
    held_out = (curves.matching(SOLVED) or curves.matching(["eval/reward"]))[:1]
    return {name: name for name in curves.matching(["reward"])} | {name: f"held out, {name[5:]}" for name in held_out}


def mover(curves: Curves, axis: str):
    """(steps, values) -> {"x", "y"} with x as asked for."""
    known, passed = curves.axis(axis)

    def move(steps, values) -> dict:
        x = np.interp(steps, known, passed) if len(known) > 1 else steps
        return {"x": np.asarray(x, float), "y": np.asarray(values, float)}

    return move


def domain_table(curves: Curves, config: dict) -> list[dict]:
    """Each domain's first and last reward, and its held-out score."""
    made = []
    for name in domains(curves, config):
        _, values = curves.all(f"{name}/reward")
        if not len(values):
            continue
        held_out = curves.matching([f"eval/{name}/mean@*"])
        last = curves.all(held_out[0])[1] if held_out else []
        made.append(
            {"name": name, "first": values[0], "now": values[-10:].mean(), "held_out": last[-1] if len(last) else None}
        )
    return made


def text_of(run: Run, name: str) -> str:
    try:
        with opened(run.path, name) as file:
            return file.read(200_000).decode("utf-8", "backslashreplace")
    except OSError:
        return ""
    except samples.Unreadable as error:
        return f"({error})"


@lru_cache(256)
def notes_of_file(path: Path, mark: tuple, settings: str) -> tuple:
    return tuple(advice.of_completions(path, json.loads(settings)))


def all_notes(run: Run) -> list[dict]:
    """The run's state, its metrics and its last completions, in words."""
    (state, why), config, found = run.state(), run.config(), []
    titles = {"failed": "The run failed", "killed": "The run was killed", "silent": "The run is silent"}
    titles["unreadable"] = "How the run stands cannot be read"
    if title := titles.get(state):
        found.append(advice.note("bad", title, why, "state"))
    of_file: list[dict] = []  # nearer to the cause than what the metrics say
    settings = json.dumps({name: config.get(name) for name in ("push_steps", "max_staleness")})
    try:
        for last in run.steps("completions")[-1:]:
            path = run.file("completions", samples.name_of(last[-1]))
            of_file += notes_of_file(path, stamp(path), settings)
    except (Gone, samples.Unreadable) as error:
        of_file.append(advice.note("watch", "A file that cannot be read", str(error), "state"))
    found += advice.both(of_file, advice.of_curves(run.curves(), config))
    if run.unreadable:
        text = f"{run.unreadable} lines of metrics.jsonl cannot be read, and are left out."
        found.append(advice.note("watch", "Torn lines", text, "state"))
    return sorted(found, key=lambda note: note["level"] != "bad")


def standing_out(run: Run) -> dict:
    """For the table: the worst note on the run's metrics and completions, and how many there are."""
    found = [note for note in all_notes(run) if note["see"] != "state"]
    first = found[0] if found else {"title": "", "level": ""}
    return {"note": first["title"], "level": first["level"], "notes": len(found)}


def setting(config: dict) -> dict:
    return {name: value for name, value in config.items() if name not in FREE}


def compared(runs: list[Run], axis: str, seeds: bool, known: str = "") -> dict:
    """Curves of several runs over each other: {"runs", "panels": [{"title", "name", "curves"}], "settings"}; of what is
    known, as in `described`, what is new.

    seeds: runs whose settings differ in nothing but the seed become one curve, their mean, with the lowest and highest
    as a band.
    """
    read = [(run, run.curves(), run.config()) for run in runs]
    together: dict[str, list[int]] = {}
    for n, (run, _, config) in enumerate(read):
        together.setdefault(digest(setting(config)) if seeds and config else run.name, []).append(n)
    titles: dict[str, str] = {}  # of metrics, in the order in which they are shown
    first = [("Reward", ["reward"]), *(("Held-out rows", list(headline(curves))[1:]) for _, curves, _ in read)]
    for title, names in [*first, *((t, n) for _, curves, config in read for t, _, n in panels(curves, config))]:
        titles = titles | {name: title for name in names if name not in titles}
    points = max(60, min(400, 3000 // max(len(runs), 1)))
    moved = [mover(curves, axis) for _, curves, _ in read]
    size = max((curves.size(points) for _, curves, _ in read), default=1.0)
    mark, begins = marked([curves for _, curves, _ in read], size, (axis, seeds, [run.name for run in runs]), known)

    def drawn(n: int, name: str, begin: float) -> dict:
        return new_of(merged(read[n][1].points(name), size), begin, moved[n], size > 1)

    shown = []
    for name, title in titles.items():
        lines = []
        for numbers in together.values():
            having = [n for n in numbers if name in read[n][1].columns]
            if having:
                alone = len(having) == 1
                parts = [drawn(n, name, begins[n] if alone else -math.inf) for n in having]
                key = f"{name} {having}"
                lines.append({"key": key, "runs": numbers, **(parts[0] if alone else {"at": 0} | band(parts))})
        if lines:
            shown.append({"title": title, "name": name, "curves": lines})
    keys = dict.fromkeys(key for _, _, config in read for key in config)
    values = {key: [config.get(key) for _, _, config in read] for key in keys}
    differing = {key: v for key, v in values.items() if len({json.dumps(x, sort_keys=True) for x in v}) > 1}
    told = {"runs": [run.summary() for run in runs], "panels": shown, "settings": differing, "mark": mark}
    return told | {"behind": True} if max(begins, default=-math.inf) > -math.inf else told


def band(parts: list[dict]) -> dict:
    """Mean, lowest and highest of curves, where at least two of them are. Extremes of bins of steps count there."""
    x = np.unique(np.concatenate([part["x"] for part in parts]))
    parts_with = [part for part in parts if len(part["x"])]
    y, low, high = (
        np.array([np.interp(x, p["x"], p.get(kind, p["y"]), left=math.nan, right=math.nan) for p in parts_with])
        for kind in ("y", "low", "high")
    )
    enough = np.isfinite(y).sum(0) >= min(2, len(y))
    if not enough.any():
        return parts[0]
    x, (y, low, high) = x[enough], (values[:, enough] for values in (y, low, high))
    points = np.array([x, np.nanmean(y, 0), np.nanmin(low, 0), np.nanmax(high, 0), np.ones(len(x))])
    points = merged(points, np.ptp(x) / POINTS) if len(x) > POINTS else points
    return dict(zip(("x", "y", "low", "high"), points[:4], strict=True))
