"""--colocate: the trainer and the server take turns on one GPU.

The server sleeps, without weights, while the trainer computes; the trainer's models are in CPU memory while the server
samples. The next push wakes the server.
"""

import torch

from config import TrainConfig
from modeling.parameters import move
from startup import servers


def home(cfg: TrainConfig, device: torch.device) -> torch.device:
    """The device to load models to. With --colocate this puts the server to sleep, which has the GPU at first, so that
    the memory that is then free is the memory of a step."""
    if not cfg.colocate:
        return device
    servers.reach(cfg).sleep()
    return device if cfg.offload else torch.device("cpu")


def trainers_turn(run, cfg: TrainConfig) -> None:
    """Put the server to sleep, and move the models of `run` (train_grpo.Run) to the GPU."""
    if cfg.colocate:
        if not run.generator.asleep:
            run.generator.sleep()
        move(run, run.device)


def servers_turn(run, cfg: TrainConfig) -> None:
    """Move the models to CPU memory; the push comes next, and wakes the server."""
    if cfg.colocate:
        move(run, torch.device("cpu"))
