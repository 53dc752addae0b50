"""Trackers besides the run folder: wandb, tensorboard, trackio, swanlab, mlflow. Each gets what metrics.jsonl gets."""

import json
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from config import ConfigError, public_config, require
from runlog.reading import is_own, readable_prompt
from safety.storable import visible

# Trackers are optional packages, imported where one is opened.

# It asks for a pillow below ours, and works with ours (requirements-optional.txt).
TRACKIO = "--no-deps trackio==0.43.0 gradio_client==2.7.2 orjson==3.13.0 brotli==1.2.1"
TEXT = 2000  # characters of a prompt or completion in a tracker; the run folder has all of it


@dataclass
class Tracker:
    line: Callable[[dict], None]  # a line of metrics.jsonl
    completions: Callable[[int, list[dict]], None]  # the first rows of a step's completions
    close: Callable[[Path | None], None]  # at the end; the report, if there is one


def open_trackers(cfg, run_dir: Path, resume_step: int | None) -> list[Tracker]:
    """One for each name in `cfg.report_to`."""
    return [TRACKERS[name](cfg, run_dir, resume_step) for name in cfg.report_to]


def check_trackers(cfg, run_dir: Path) -> None:
    """ConfigError where one cannot work: said before a model is loaded."""
    for name in cfg.report_to:
        require(name, f"--report_to {name}", TRACKIO if name == "trackio" else None)
    if "wandb" not in cfg.report_to:
        return
    import wandb

    local = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if not local and not wandb.login(prompt=False):
        raise ConfigError(
            "--report_to wandb: not logged in. Run `wandb login`, or set WANDB_API_KEY; or set WANDB_MODE=offline to "
            f"keep the data in {run_dir}/wandb and upload it later with `wandb sync`."
        )


def table_of(rows: list[dict]) -> tuple[list[str], list[list]]:
    """Names of the columns and the cells: texts, cut, and numbers. Last come the row's answer and what reward functions
    gave to log_extra."""
    names = ["prompt", "completion", "reward", "advantage", "length", "finish_reason"]
    found = dict.fromkeys(chain(*rows))
    names += [name for name in found if name.startswith("rewards/")]
    names += filter(is_own, found)
    return names, list(zip(*(of_one_kind([cell_of(name, row) for row in rows]) for name in names), strict=True))


def of_one_kind(cells: list) -> list:
    """The cells of a column, all as text if one is: wandb takes no column of texts and numbers."""
    if not any(isinstance(cell, str) for cell in cells):
        return cells
    return [f"{cell:g}" if isinstance(cell, float) else cell for cell in cells]


def cell_of(name: str, row: dict):
    value = row.get(name)
    if name == "completion" and row.get("turns"):  # all of them, with what answered
        turns = json.loads(row["turns"])
        value = "\n".join(part for turn in turns for part in (turn["text"], *turn["observation"]))
    if name == "prompt":
        value = readable_prompt(value)
    if isinstance(value, str):
        return visible(value if len(value) <= TEXT else f"{value[:TEXT]} ... ({len(value) - TEXT} more characters)")
    return None if value is None else float(value)


PROJECT = os.environ.get("WANDB_PROJECT", "grpo")  # for all but tensorboard


def open_wandb(cfg, run_dir: Path, resume_step: int | None) -> Tracker:
    import wandb

    id_file = run_dir / "wandb_id.txt"
    run_id = id_file.read_text(encoding="utf-8") if id_file.exists() else secrets.token_hex(4)
    id_file.write_text(run_id, encoding="utf-8")
    how = dict(project=PROJECT, name=run_dir.name, id=run_id, resume="allow", dir=run_dir)
    run = wandb.init(**how, config=public_config(cfg))
    # Our own step on the x axis: wandb's only ever grows, and a resumed run goes back to its checkpoint.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    def completions(step: int, rows: list[dict]) -> None:
        names, cells = table_of(rows)
        table = wandb.Table(columns=["step", *names], data=[[step, *row] for row in cells])
        run.log({"completions": table, "step": step})

    def close(report: Path | None) -> None:
        if report:
            artifact = wandb.Artifact(f"report-{run_id}", type="report")
            artifact.add_file(str(report))
            run.log_artifact(artifact)
        run.finish()

    return Tracker(run.log, completions, close)


def open_tensorboard(cfg, run_dir: Path, resume_step: int | None) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run_dir / "tensorboard", purge_step=None if resume_step is None else resume_step + 1)

    def write(line: dict) -> None:
        for name, value in line.items():
            if name != "step" and value is not None:
                writer.add_scalar(name, value, line["step"])
        writer.flush()

    def completions(step: int, rows: list[dict]) -> None:
        names, cells = table_of(rows)
        for number, row in enumerate(cells):  # tensorboard shows markdown: indented, a text is only itself
            lines = [line for name, cell in zip(names, row, strict=True) for line in f"{name}: {cell}".split("\n")]
            writer.add_text(f"completion {number}", "\n".join(f"    {line}" for line in lines), step)
        writer.flush()

    return Tracker(write, completions, lambda report: writer.close())


def open_trackio(cfg, run_dir: Path, resume_step: int | None) -> Tracker:
    """On this machine, where trackio keeps its projects (TRACKIO_DIR); `trackio show --project NAME` is its page."""
    import trackio

    how = dict(project=PROJECT, name=run_dir.name, resume="allow")
    run = trackio.init(**how, config=public_config(cfg), embed=False, auto_log_cpu=False, auto_log_gpu=False)

    def write(line: dict) -> None:
        run.log({name: value for name, value in line.items() if name != "step"}, step=line["step"])

    def completions(step: int, rows: list[dict]) -> None:
        import pandas

        names, cells = table_of(rows)
        run.log({"completions": trackio.Table(dataframe=pandas.DataFrame(cells, columns=names))}, step=step)

    return Tracker(write, completions, lambda report: trackio.finish())


def open_swanlab(cfg, run_dir: Path, resume_step: int | None) -> Tracker:
    """SWANLAB_MODE=local or offline keeps the data in the run folder; there a resumed run is a new one."""
    import swanlab

    how = dict(project=PROJECT, experiment_name=run_dir.name, logdir=str(run_dir / "swanlab"))
    if os.environ.get("SWANLAB_MODE", "cloud") == "cloud":
        id_file = run_dir / "swanlab_id.txt"
        run_id = id_file.read_text(encoding="utf-8") if id_file.exists() else secrets.token_hex(11)[:21]
        id_file.write_text(run_id, encoding="utf-8")
        how |= dict(id=run_id, resume="allow")
    run = swanlab.init(**how, config=public_config(cfg))

    def completions(step: int, rows: list[dict]) -> None:
        names, cells = table_of(rows)
        texts = ("\n".join(f"{name}: {cell}" for name, cell in zip(names, row, strict=True)) for row in cells)
        run.log({"completions": [swanlab.Text(text) for text in texts]}, step=step)

    return Tracker(lambda line: run.log(numbers(line), step=line["step"]), completions, lambda report: swanlab.finish())


def open_mlflow(cfg, run_dir: Path, resume_step: int | None) -> Tracker:
    """MLFLOW_TRACKING_URI says where; by default ./mlruns or what mlflow takes."""
    import mlflow

    mlflow.set_experiment(PROJECT)
    id_file = run_dir / "mlflow_id.txt"
    run_id = id_file.read_text(encoding="utf-8") if id_file.exists() else None
    run = mlflow.start_run(run_id=run_id, run_name=None if run_id else run_dir.name)
    id_file.write_text(run.info.run_id, encoding="utf-8")
    if run_id is None:  # a parameter is set once
        mlflow.log_params({name: str(value)[:500] for name, value in public_config(cfg).items()})

    def completions(step: int, rows: list[dict]) -> None:
        names, cells = table_of(rows)
        table = {name: [row[n] for row in cells] for n, name in enumerate(names)}
        mlflow.log_dict(table, f"completions/step_{step:06d}.json")

    def close(report: Path | None) -> None:
        if report:
            mlflow.log_artifact(str(report))
        mlflow.end_run()

    def write(line: dict) -> None:  # mean@4 is mean_4: names have letters, digits and _-. :/
        metrics = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in numbers(line).items()}
        mlflow.log_metrics(metrics, step=line["step"])

    return Tracker(write, completions, close)


def numbers(line: dict) -> dict:
    return {name: value for name, value in line.items() if name != "step" and value is not None}


TRACKERS = {"wandb": open_wandb, "tensorboard": open_tensorboard, "trackio": open_trackio}
TRACKERS |= {"swanlab": open_swanlab, "mlflow": open_mlflow}
