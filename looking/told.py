"""The page's content about runs, in curves and in words: plain values, ready for JSON."""

from pathlib import Path

import numpy as np

from looking.runs import Run
from runfiles import advice
from runfiles.reading import SOLVED, Curves, panels


def page_content(runs: list[Run], axis: str) -> dict:
    """The content of a run's page; of several runs their curves, in one chart per metric, and the settings that differ.
    axis: "step", "tokens" or "seconds"."""
    run_data = [(run.curves(), run.config()) for run in runs]
    charts: dict[tuple, list[str]] = {}
    for curves, config in run_data:
        held_out = (curves.names_like(SOLVED) or curves.names_like(["eval/reward"]))[:1]
        first = ("Reward", "training reward, and rows never trained on", [*curves.names_like(["reward"]), *held_out])
        for title, note, names in [first, *panels(curves, config)]:
            if len(runs) == 1:
                charts[title, note] = names
            else:
                charts |= {(title, name): [name] for name in names}
    content = {
        "runs": [run.summary() for run in runs],
        "stride": max(run.lines()[2] for run in runs),
        "panels": [
            {"title": title, "note": note, "curves": [c for name in names for c in curves_of(name, run_data, axis)]}
            for (title, note), names in charts.items()
            if names
        ],
        "settings": different_settings(*(config for _, config in run_data)),
    }
    if len(runs) == 1:
        curves, config = run_data[0]
        times = curves.names_like(["seconds/*"])
        content |= {"times": [c for name in times for c in curves_of(name, run_data, axis)], "config": config}
        content |= {"notes": advice.notes(curves, config)}
        content |= {"texts": {n: text_of(runs[0].path / n) for n in ("command.txt", "environment.txt", "git.diff")}}
    return content


def curves_of(name: str, run_data: list[tuple[Curves, dict]], axis: str) -> list[dict]:
    """The curve of each run that has the metric."""
    curve_list = []
    for number, (curves, _) in enumerate(run_data):
        steps, values = curves.all(name)
        if not len(steps):
            continue
        axis_steps, axis_values = curves.axis(axis)
        x = np.interp(steps, axis_steps, axis_values)
        curve_list.append({"name": name.removeprefix("seconds/"), "run": number, "x": x, "y": values})
    return curve_list


def different_settings(*configs: dict) -> dict[str, list]:
    """Settings with different values: {name: one value per config}."""
    names = dict.fromkeys(name for config in configs for name in config)
    values = {name: [config.get(name) for config in configs] for name in names}
    values.pop("run_name", None)  # the page shows it above the settings
    return {name: by_config for name, by_config in values.items() if any(value != by_config[0] for value in by_config)}


def text_of(path: Path) -> str:
    return path.read_bytes()[:200_000].decode("utf-8", "backslashreplace") if path.is_file() else ""


def standing_out(run: Run) -> dict:
    """For the table: the worst note on the run, and the number of notes."""
    notes = advice.notes(run.curves(), run.config())
    first = notes[0] if notes else {"title": "", "level": ""}
    return {"note": first["title"], "level": first["level"], "notes": len(notes)}
