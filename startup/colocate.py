"""--colocate: the trainer and the server take turns on one GPU.

The server sleeps while the trainer computes, and what is trained waits in CPU memory while the server samples. The next
push wakes the server, which has dropped its weights.
"""

import torch

from config import TrainConfig
from modeling.parameters import move
from startup import servers


def home(cfg: TrainConfig, device: torch.device) -> torch.device:
    """Where models are loaded to. With --colocate the server, which has the GPU at first, is put to sleep: what is free
    then is what a step has."""
    if not cfg.colocate:
        return device
    servers.reach(cfg).sleep()
    return device if cfg.offload else torch.device("cpu")


def trainers_turn(run, cfg: TrainConfig) -> None:
    """run: train_grpo.py's."""
    if cfg.colocate:
        if not run.generator.asleep:
            run.generator.sleep()
        move(run, run.device)


def servers_turn(run, cfg: TrainConfig) -> None:
    """From the push on, which comes next."""
    if cfg.colocate:
        move(run, torch.device("cpu"))
