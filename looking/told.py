"""What the page says of a run, of several over each other, and in words: plain values, ready for JSON."""

import json
import math
from functools import lru_cache
from pathlib import Path

import numpy as np

from config import TrainConfig, public_config
from looking.runs import Gone, Run, digest, stamp
from runlog import advice, samples
from runlog.reading import SOLVED, Curves, domains, panels

FREE = "seed run_name output_dir server_urls resume save_steps report_to".split()  # no other setting


def described(run: Run, axis: str) -> dict:
    """Everything that a run's page draws."""
    curves, config = run.curves(), run.config()
    move = mover(curves, axis)

    def drawn(name: str, label: str) -> dict:
        return {"key": name, "name": label} | move(*curves.all(name))

    steps, split = curves.phases()
    first = ("Reward", "training reward and what was never trained on", headline(curves))
    return {
        "summary": run.summary(),
        "stride": run.stride,
        "unreadable": run.unreadable,
        "panels": [
            {"title": title, "note": note, "curves": [drawn(name, label) for name, label in labels.items()]}
            for title, note, labels in [first, *panels(curves, config)]
            if labels
        ],
        "spread": drawn("reward_std", "reward_std"),
        "times": [{"key": f"phase {name}", "name": name} | move(steps, seconds) for name, seconds in split.items()],
        "domains": domain_table(curves, config),
        "config": config,
        "differs": differing(config),
        "texts": {name: text_of(run.path / name) for name in ("command.txt", "environment.txt", "git.diff")},
    }


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


def text_of(path: Path) -> str:
    return path.read_bytes()[:200_000].decode("utf-8", "backslashreplace") if path.is_file() else ""


@lru_cache(256)
def notes_of_file(path: Path, mark: tuple, settings: str) -> tuple:
    return tuple(advice.of_completions(path, json.loads(settings)))


def all_notes(run: Run) -> list[dict]:
    """The run's state, its metrics and its last completions, in words."""
    (state, why), config, found = run.state(), run.config(), []
    titles = {"failed": "The run failed", "killed": "The run was killed", "silent": "The run is silent"}
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


def compared(runs: list[Run], axis: str, seeds: bool) -> dict:
    """Curves of several runs over each other: {"runs", "panels": [{"title", "name", "curves"}], "settings"}.

    seeds: runs whose settings differ in nothing but the seed become one curve, their mean, with the lowest and highest
    as a band.
    """
    read = [(run.curves(), run.config()) for run in runs]
    together: dict[str, list[int]] = {}
    for n, (_, config) in enumerate(read):
        together.setdefault(digest(setting(config)) if seeds and config else runs[n].name, []).append(n)
    titles: dict[str, str] = {}  # of metrics, in the order in which they are shown
    first = [("Reward", ["reward"]), *(("Held-out rows", list(headline(curves))[1:]) for curves, _ in read)]
    for title, names in [*first, *((t, n) for curves, config in read for t, _, n in panels(curves, config))]:
        titles = titles | {name: title for name in names if name not in titles}
    moved = [mover(curves, axis) for curves, _ in read]
    shown = []
    for name, title in titles.items():
        lines = []
        for numbers in together.values():
            if having := [n for n in numbers if name in read[n][0].columns]:
                parts = [moved[n](*read[n][0].all(name)) for n in having]
                lines.append(
                    {"key": f"{name} {having}", "runs": numbers} | (band(parts) if len(parts) > 1 else parts[0])
                )
        if lines:
            shown.append({"title": title, "name": name, "curves": lines})
    keys = dict.fromkeys(key for _, config in read for key in config)
    values = {key: [config.get(key) for _, config in read] for key in keys}
    differing = {key: v for key, v in values.items() if len({json.dumps(x, sort_keys=True) for x in v}) > 1}
    return {"runs": [run.summary() for run in runs], "panels": shown, "settings": differing}


def band(parts: list[dict]) -> dict:
    """Mean, lowest and highest of curves, where at least two of them are."""
    x = np.unique(np.concatenate([part["x"] for part in parts]))
    values = np.array([np.interp(x, part["x"], part["y"], left=math.nan, right=math.nan) for part in parts])
    enough = np.isfinite(values).sum(0) >= 2
    if not enough.any():
        return parts[0]
    x, values = x[enough], values[:, enough]
    return {"x": x, "y": np.nanmean(values, 0), "low": np.nanmin(values, 0), "high": np.nanmax(values, 0)}
