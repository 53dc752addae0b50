"""Optimizers and learning-rate schedules by name: torch's, bitsandbytes', transformers'; and coefficients that follow a
target."""

import importlib
import importlib.util
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel

from config import ConfigError, TrainConfig, known_name, with_arguments


def check_optimisation(cfg: TrainConfig) -> None:
    """ConfigError for an unknown optimizer or schedule, or wrong arguments of the schedule."""
    optimizer_class(cfg)
    cfg = replace(cfg, max_steps=cfg.max_steps or 1000)
    for update in (0, cfg.max_steps * cfg.num_iterations * cfg.num_minibatches - 1):
        lr_at(update, cfg)


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer itself. ConfigError for a group without parameters, for a trained parameter in no group, and for
    one that was frozen when DDP or FSDP wrapped the model, which would drift apart between ranks. Called at the start
    and in each update, since what is trained may change."""
    in_groups = {p for group in optimizer.param_groups for p in group["params"]}
    if empty := [group.get("name", n) for n, group in enumerate(optimizer.param_groups) if not group["params"]]:
        raise ConfigError(f"make_optimizer: the group {empty[0]!r} has no parameters; choose by clean_name(name).")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if ungrouped := [name for name, p in trained.items() if p not in in_groups]:
        raise ConfigError(f"make_optimizer: {ungrouped[0]!r} is trained but in no group; add it, or freeze it.")
    at_start = module.__dict__.setdefault("trained_at_start", {*trained})
    late = isinstance(module, DistributedDataParallel | FSDP | FSDPModule) and trained.keys() - at_start
    if late:
        raise ConfigError(f"{min(late)!r} is trained and was frozen when DDP or FSDP wrapped it; thaw it in to_train.")
    return optimizer


# ---- what changes from update to update -----------------------------------------------------------------------------


def lr_at(update: int, cfg: TrainConfig) -> float:
    """Learning rate of an optimizer update: transformers' schedule named by --lr_schedule, but its warm-up starts above
    0.

    A function of the update's number, so that resuming needs no scheduler state. Updates count from the first step,
    including those in which only a critic learns (--critic_warmup).
    """
    total = cfg.max_steps * cfg.num_iterations * cfg.num_minibatches
    warmup = int(cfg.warmup_steps) * cfg.num_iterations * cfg.num_minibatches
    if cfg.warmup_steps < 1:  # a share of all updates
        warmup = math.ceil(cfg.warmup_steps * total)
    try:
        factor = schedule(cfg.lr_schedule, cfg.learning_rate, warmup, total)
        return cfg.learning_rate * factor(update + (update < warmup))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"--lr_schedule={cfg.lr_schedule}, {warmup} of {total} updates warm-up: {error}.") from None


@lru_cache(maxsize=64)
def schedule(spec: str, learning_rate: float, warmup: int, total: int) -> Callable[[int], float]:
    """(update number) -> factor of the learning rate."""
    from transformers.optimization import get_scheduler  # here: takes seconds
    from transformers.trainer_utils import SchedulerType

    name, arguments = with_arguments(spec)
    known_name("--lr_schedule", name, {entry.value for entry in SchedulerType} - {"reduce_lr_on_plateau", "greedy"})
    name = "constant_with_warmup" if name == "constant" else name
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=learning_rate)  # schedules read its learning rate
    return get_scheduler(name, stand_in, warmup, total, scheduler_specific_kwargs=arguments).lr_lambdas[0]


def adapt(cfg: TrainConfig, metrics: dict) -> TrainConfig:
    """The config with beta and entropy_coef for the next step, from this step's KL and entropy if it has them."""
    if cfg.kl_target is not None and "kl" in metrics:  # Ziegler et al., 1909.08593 sec. 2.2
        error = min(max(metrics["kl"] / cfg.kl_target - 1, -0.2), 0.2)
        count = metrics.get("completions/count", cfg.sequences_per_step)
        cfg = replace(cfg, beta=cfg.beta * (1 + error * count / 10_000))
    if cfg.entropy_target is not None and "entropy" in metrics:
        change = 0.0005 if metrics["entropy"] < cfg.entropy_target else -0.0005
        cfg = replace(cfg, entropy_coef=max(cfg.entropy_coef + change, 0.0))
    return cfg


# ---- optimizer ------------------------------------------------------------------------------------------------------


def optimizer_class(cfg: TrainConfig) -> type[torch.optim.Optimizer]:
    """The class that --optim names, as torch, bitsandbytes or transformers spell it (adamw_torch_fused,
    paged_adamw_8bit). ConfigError if there is none."""
    name, by_name = re.sub("_torch|_fused|_bnb|_", "", cfg.optim).lower(), classes("torch.optim")
    if name not in by_name and importlib.util.find_spec("bitsandbytes"):
        by_name = classes("bitsandbytes.optim") | by_name
    if name not in by_name:
        known_name("--optim (8-bit ones: pip install bitsandbytes)", cfg.optim, [k.__name__ for k in by_name.values()])
    if cfg.strategy != "ddp" and not by_name[name].__module__.startswith("torch."):
        raise ConfigError(f"--optim={cfg.optim}: bitsandbytes cannot handle shards; use --strategy ddp, or AdamW.")
    return by_name[name]


def classes(module: str) -> dict[str, type[torch.optim.Optimizer]]:
    """A module's optimizers by lower-case name, without LBFGS, whose step computes the loss itself."""
    kinds = [kind for kind in vars(importlib.import_module(module)).values() if inspect.isclass(kind)]
    refused = (torch.optim.Optimizer, torch.optim.LBFGS)
    return {k.__name__.lower(): k for k in kinds if issubclass(k, torch.optim.Optimizer) and k not in refused}


def make_by_name(trained: list, cfg: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that --optim names, for `trained`: parameters, or groups of them as torch's optimizers take
    them."""
    kind = optimizer_class(cfg)
    parameters, arguments = inspect.signature(kind.__init__).parameters, {"lr": cfg.learning_rate}
    if "weight_decay" in parameters:
        arguments["weight_decay"] = cfg.weight_decay
    if isinstance(betas := getattr(parameters.get("betas"), "default", None), tuple) and len(betas) == 2:
        arguments["betas"] = (0.9, cfg.adam_beta2)
    return kind(trained, **arguments)
