"""What the page says of runs, in curves and in words: plain values, ready for JSON."""

from pathlib import Path

import numpy as np

from looking.runs import Run
from runfiles import advice
from runfiles.reading import SOLVED, Curves, panels


def described(runs: list[Run], axis: str) -> dict:
    """Everything that the page of a run draws; of several runs their curves over each other, a chart a metric, and the
    settings that differ. axis: "step", "tokens" or "seconds"."""
    read = [(run.curves(), run.config()) for run in runs]
    charts: dict[tuple, list[str]] = {}
    for curves, config in read:
        held_out = (curves.matching(SOLVED) or curves.matching(["eval/reward"]))[:1]
        first = ("Reward", "training reward and what was never trained on", [*curves.matching(["reward"]), *held_out])
        for title, note, names in [first, *panels(curves, config)]:
            if len(runs) == 1:
                charts[title, note] = names
            else:
                charts |= {(title, name): [name] for name in names}
    found = {
        "runs": [run.summary() for run in runs],
        "stride": max(run.lines()[2] for run in runs),
        "panels": [
            {"title": title, "note": note, "curves": [c for name in names for c in drawn(name, read, axis)]}
            for (title, note), names in charts.items()
            if names
        ],
        "settings": differing(*(config for _, config in read)),
    }
    if len(runs) == 1:
        curves, config = read[0]
        times = curves.matching(["seconds/*"])
        found |= {"times": [c for name in times for c in drawn(name, read, axis)], "config": config}
        found |= {"notes": advice.notes(curves, config)}
        found |= {"texts": {n: text_of(runs[0].path / n) for n in ("command.txt", "environment.txt", "git.diff")}}
    return found


def drawn(name: str, read: list[tuple[Curves, dict]], axis: str) -> list[dict]:
    """The curve of each run that has the metric."""
    found = []
    for number, (curves, _) in enumerate(read):
        steps, values = curves.all(name)
        if not len(steps):
            continue
        known, passed = curves.axis(axis)
        passed_by = np.interp(steps, known, passed)
        found.append({"name": name.removeprefix("seconds/"), "run": number, "x": passed_by, "y": values})
    return found


def differing(*configs: dict) -> dict[str, list]:
    """Settings of which there are several values: {name: one a config}."""
    names = dict.fromkeys(name for config in configs for name in config)
    values = {name: [config.get(name) for config in configs] for name in names}
    values.pop("run_name", None)  # it stands above them
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def text_of(path: Path) -> str:
    return path.read_bytes()[:200_000].decode("utf-8", "backslashreplace") if path.is_file() else ""


def standing_out(run: Run) -> dict:
    """For the table: the worst note on the run, and how many there are."""
    found = advice.notes(run.curves(), run.config())
    first = found[0] if found else {"title": "", "level": ""}
    return {"note": first["title"], "level": first["level"], "notes": len(found)}
