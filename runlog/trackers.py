"""Trackers besides the run folder: wandb, tensorboard, trackio, swanlab, mlflow. They get metrics.jsonl's lines."""

import json
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from config import ConfigError, public_config, require
from runfiles.reading import is_own, readable_prompt
from runfiles.storable import visible

# Trackers are optional packages, imported when one is opened.

# trackio requires an older pillow than ours, but works with ours (requirements-optional.txt).
TRACKIO = "--no-deps trackio==0.43.0 gradio_client==2.7.2 orjson==3.13.0 brotli==1.2.1"
TEXT = 2000  # characters of a prompt or completion in a tracker; the run folder has all of it
SHOWN, NUMBERS = ("prompt", "completion", "finish_reason"), ("reward", "advantage", "length")
PROJECT = os.environ.get("WANDB_PROJECT", "grpo")  # of all trackers but tensorboard


@dataclass
class Tracker:
    line: Callable[[dict[str, float], int], None]  # the numbers of a line of metrics.jsonl, and its step
    close: Callable[[Path | None], None]  # at the end; the report, if there is one
    completions: Callable[[int, list[dict]], None] = lambda step, rows: None  # the first rows of a step's completions


def check_trackers(cfg, run_dir: Path) -> None:
    """ConfigError, before a model is loaded, if a tracker cannot work."""
    for name in cfg.report_to:
        require(name, f"--report_to {name}", TRACKIO if name == "trackio" else None)
    if "wandb" not in cfg.report_to:
        return
    import wandb

    local = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if not local and not wandb.login(prompt=False):
        remedy = "run `wandb login`, or set WANDB_API_KEY; or set WANDB_MODE=offline and use `wandb sync` later"
        raise ConfigError(f"--report_to wandb: not logged in; {remedy}.")


def table_of(rows: list[dict]) -> dict[str, list]:
    """{column: its cells} of some completions: texts, scores, and values of log_extra as text."""
    names = dict.fromkeys(["prompt", "completion", *NUMBERS, *chain(*rows)])
    columns = [name for name in names if name in (*SHOWN, *NUMBERS) or name.startswith("rewards/") or is_own(name)]
    return {name: [cell(name, row) for row in rows] for name in columns}


def cell(name: str, row: dict) -> float | str | None:
    value = row.get(name)
    if value is None or name in NUMBERS or name.startswith("rewards/"):
        return None if value is None else float(value)
    text = readable_prompt(value) if name == "prompt" else str(value)
    if name == "completion" and row.get("turns"):  # all turns, with their observations
        text = "\n".join("\n".join([turn["text"], *turn["observation"]]) for turn in json.loads(row["turns"]))
    return visible(text if len(text) <= TEXT else f"{text[:TEXT]} ... ({len(text) - TEXT} more characters)")


def stored_id(run_dir: Path, tracker: str) -> str:
    """The id that makes a resumed run the same run in this tracker."""
    path = run_dir / f"{tracker}_id.txt"
    if not path.exists():
        path.write_text(secrets.token_hex(10), encoding="utf-8")
    return path.read_text(encoding="utf-8")


def open_wandb(cfg, run_dir: Path, resume_step: int | None) -> Tracker:
    import wandb

    options = dict(project=PROJECT, name=run_dir.name, id=stored_id(run_dir, "wandb"), resume="allow", dir=run_dir)
    run = wandb.init(**options, config=public_config(cfg))
    # Our own step is the x axis: wandb's cannot go back, as a resumed run does to its checkpoint.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def completions(step: int, rows: list[dict]) -> None:
        table = {"step": [step] * len(rows)} | table_of(rows)
        cells = [list(row) for row in zip(*table.values(), strict=True)]
        run.log({"completions": wandb.Table(columns=list(table), data=cells), "step": step})

    def close(report: Path | None) -> None:
        if report:
            run.save(report, base_path=run_dir, policy="now")
        run.finish()

    return Tracker(lambda numbers, step: run.log(numbers | {"step": step}), close, completions)


def open_tensorboard(cfg, run_dir: Path, resume_step: int | None) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run_dir / "tensorboard", purge_step=None if resume_step is None else resume_step + 1)

    def write(numbers: dict, step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(write, lambda report: writer.close())


def open_trackio(cfg, run_dir: Path, resume_step: int | None) -> Tracker:
    """Data stays on this machine, in TRACKIO_DIR; `trackio show --project NAME` shows it."""
    import trackio

    options = dict(project=PROJECT, name=run_dir.name, resume="allow")
    run = trackio.init(**options, config=public_config(cfg), embed=False, auto_log_cpu=False, auto_log_gpu=False)

    def completions(step: int, rows: list[dict]) -> None:
        import pandas

        run.log({"completions": trackio.Table(dataframe=pandas.DataFrame(table_of(rows)))}, step=step)

    return Tracker(lambda numbers, step: run.log(numbers, step=step), lambda report: trackio.finish(), completions)


def open_swanlab(cfg, run_dir: Path, resume_step: int | None) -> Tracker:
    """SWANLAB_MODE=local or offline keeps the data in the run folder; a resumed run is then a new run."""
    import swanlab

    options = dict(project=PROJECT, experiment_name=run_dir.name, logdir=str(run_dir / "swanlab"))
    if os.environ.get("SWANLAB_MODE", "cloud") == "cloud":
        options |= dict(id=stored_id(run_dir, "swanlab"), resume="allow")
    run = swanlab.init(**options, config=public_config(cfg))
    return Tracker(lambda numbers, step: run.log(numbers, step=step), lambda report: swanlab.finish())


def open_mlflow(cfg, run_dir: Path, resume_step: int | None) -> Tracker:
    """Data goes to MLFLOW_TRACKING_URI; by default to ./mlruns, or to mlflow's own choice."""
    import mlflow

    mlflow.set_experiment(PROJECT)
    id_file = run_dir / "mlflow_id.txt"  # mlflow makes it
    run_id = id_file.read_text(encoding="utf-8") if id_file.exists() else None
    run = mlflow.start_run(run_id=run_id, run_name=None if run_id else run_dir.name)
    id_file.write_text(run.info.run_id, encoding="utf-8")
    if run_id is None:  # parameters can be set only once
        mlflow.log_params({name: str(value)[:500] for name, value in public_config(cfg).items()})

    def write(numbers: dict, step: int) -> None:  # mean@4 is mean_4: names have letters, digits and _-. :/
        metrics = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in numbers.items()}
        mlflow.log_metrics(metrics, step=step)

    def completions(step: int, rows: list[dict]) -> None:
        mlflow.log_dict(table_of(rows), f"completions/step_{step:06d}.json")

    def close(report: Path | None) -> None:
        if report:
            mlflow.log_artifact(str(report))
        mlflow.end_run()

    return Tracker(write, close, completions)


TRACKERS = {"wandb": open_wandb, "tensorboard": open_tensorboard, "trackio": open_trackio}
TRACKERS |= {"swanlab": open_swanlab, "mlflow": open_mlflow}
