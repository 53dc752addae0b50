"""Optimizers and learning-rate schedules by name: torch's, bitsandbytes', transformers'; coefficients with a target."""

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
    """ConfigError for an optimizer or a schedule that does not exist, or for a schedule's wrong arguments."""
    optimizer_class(cfg)
    cfg = replace(cfg, max_steps=cfg.max_steps or 1000)
    for update in (0, cfg.max_steps * cfg.num_iterations * cfg.num_minibatches - 1):
        lr_at(update, cfg)


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer. ConfigError for a group without parameters, and for what is trained and would never change or,
    unknown to DDP or FSDP, differ by rank. At start and in each update: what is trained may change."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if empty := [group.get("name", n) for n, group in enumerate(optimizer.param_groups) if not group["params"]]:
        raise ConfigError(f"make_optimizer: the group {empty[0]!r} has no parameters; choose by clean_name(name).")
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if lost := [name for name, p in trained.items() if p not in held]:
        raise ConfigError(
            f"make_optimizer: {lost[0]!r} is trained and in no group; add it, or freeze it in load_hf_model."
        )
    at_start = module.__dict__.setdefault("trained_at_start", {*trained})
    late = isinstance(module, DistributedDataParallel | FSDP | FSDPModule) and trained.keys() - at_start
    if late:
        raise ConfigError(f"{min(late)!r} is trained and was frozen when DDP or FSDP wrapped it; thaw it in to_train.")
    return optimizer


# ---- what changes from update to update -----------------------------------------------------------------------------


def lr_at(update: int, cfg: TrainConfig) -> float:
    """Learning rate of an optimizer update: transformers' schedule of the name --lr_schedule, whose warm-up begins with
    a part of the rate here, not with an update of 0.

    A function of the update's number, so that resuming needs no scheduler state. Updates are counted from the first
    step, those in which only a critic learns (--critic_warmup) included.
    """
    total = cfg.max_steps * cfg.num_iterations * cfg.num_minibatches
    warmup = int(cfg.warmup_steps) * cfg.num_iterations * cfg.num_minibatches
    if cfg.warmup_steps < 1:  # a share
        warmup = math.ceil(cfg.warmup_steps * total)
    try:
        factor = schedule(cfg.lr_schedule, cfg.learning_rate, warmup, total)
        return cfg.learning_rate * factor(update + (update < warmup))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"--lr_schedule={cfg.lr_schedule}, {warmup} of {total} updates warm-up: {error}.") from None


@lru_cache(maxsize=64)
def schedule(spec: str, learning_rate: float, warmup: int, total: int) -> Callable[[int], float]:
    """(number of an update) -> what the learning rate is multiplied by."""
    from transformers.optimization import get_scheduler  # takes seconds
    from transformers.trainer_utils import SchedulerType

    name, arguments = with_arguments(spec)
    known_name("--lr_schedule", name, {each.value for each in SchedulerType} - {"reduce_lr_on_plateau", "greedy"})
    name = "constant_with_warmup" if name == "constant" else name
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=learning_rate)  # schedules read its learning rate
    return get_scheduler(name, stand_in, warmup, total, scheduler_specific_kwargs=arguments).lr_lambdas[0]


def adapt(cfg: TrainConfig, metrics: dict) -> TrainConfig:
    """beta and entropy_coef for the next step, from this one's KL and entropy, if it had any."""
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
    """The class that --optim names, as torch or bitsandbytes spell it, or as transformers does (adamw_torch_fused,
    paged_adamw_8bit). ConfigError for none."""
    name, known = re.sub("_torch|_fused|_bnb|_", "", cfg.optim).lower(), classes("torch.optim")
    if name not in known and importlib.util.find_spec("bitsandbytes"):
        known = classes("bitsandbytes.optim") | known
    if name not in known:
        known_name(
            "--optim (those of 8 bits: pip install bitsandbytes)", cfg.optim, [k.__name__ for k in known.values()]
        )
    if cfg.strategy != "ddp" and not known[name].__module__.startswith("torch."):
        raise ConfigError(f"--optim={cfg.optim}: bitsandbytes knows no shards; use --strategy ddp, or AdamW.")
    return known[name]


def classes(module: str) -> dict[str, type[torch.optim.Optimizer]]:
    """By name in lower case. Without LBFGS, whose step computes the loss itself."""
    found = {
        name.lower(): kind for name, kind in vars(importlib.import_module(module)).items() if inspect.isclass(kind)
    }
    return {
        n: kind
        for n, kind in found.items()
        if issubclass(kind, torch.optim.Optimizer) and n not in ("optimizer", "lbfgs")
    }


def make_by_name(trained: list, cfg: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that --optim names, on `trained`: parameters, or groups of them as torch's optimizers take them."""
    kind = optimizer_class(cfg)
    arguments, given = inspect.signature(kind.__init__).parameters, {"lr": cfg.learning_rate}
    if "weight_decay" in arguments:
        given["weight_decay"] = cfg.weight_decay
    if isinstance(betas := getattr(arguments.get("betas"), "default", None), tuple) and len(betas) == 2:
        given["betas"] = (0.9, cfg.adam_beta2)
    return kind(trained, **given)
