"""Trackers besides the run folder: wandb and tensorboard."""

import os
import secrets
from pathlib import Path

from config import ConfigError
from plugins import require
from safety.masking import public_arguments, public_config


def open_trackers(cfg, run_dir: Path, resume_step: int | None) -> list:
    """One function for each name in `cfg.report_to`; it takes a line of metrics, and None at the end."""
    opened = {"wandb": open_wandb, "tensorboard": open_tensorboard}
    return [opened[name](cfg, run_dir, resume_step) for name in cfg.report_to]


def check_trackers(cfg, run_dir: Path) -> None:
    """ConfigError where one cannot work: said before a model is loaded."""
    for name in cfg.report_to:
        require(name, f"--report_to {name}")
    if "wandb" not in cfg.report_to:
        return
    import wandb

    local = os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if not local and not wandb.login(prompt=False):
        raise ConfigError(
            "--report_to wandb: not logged in. Run `wandb login`, or set WANDB_API_KEY; or set WANDB_MODE=offline to "
            f"keep the data in {run_dir}/wandb and upload it later with `wandb sync`."
        )


def open_wandb(cfg, run_dir: Path, resume_step: int | None):
    import wandb

    id_file = run_dir / "wandb_id.txt"
    run_id = id_file.read_text() if id_file.exists() else secrets.token_hex(4)
    id_file.write_text(run_id)
    how = dict(project=cfg.wandb_project, name=run_dir.name, id=run_id, resume="allow", dir=run_dir)
    with public_arguments(cfg):
        run = wandb.init(**how, config=public_config(cfg))
    # Our own step on the x axis: wandb's only ever grows, and a resumed run goes back to its checkpoint.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return lambda line: run.log(line) if line is not None else run.finish()


def open_tensorboard(cfg, run_dir: Path, resume_step: int | None):
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run_dir / "tensorboard", purge_step=None if resume_step is None else resume_step + 1)

    def write(line):
        if line is None:
            return writer.close()
        for name, value in line.items():
            if name != "step" and value is not None:
                writer.add_scalar(name, value, line["step"])
        writer.flush()

    return write
