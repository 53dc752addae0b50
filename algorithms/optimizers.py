"""Optimizers and learning-rate schedules by name: torch's, bitsandbytes', transformers'; coefficients with a target."""

import importlib
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel

from config import ConfigError, TrainConfig, known_name

# transformers' schedules are imported where one is used: they take seconds.

# transformers' names of torch's classes, where it passes them what `options` does. Its adafactor is another algorithm.
SAME = {"adamw_torch": "AdamW", "adamw_torch_fused": "AdamW", "sgd": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"}


def check_optimisation(cfg: TrainConfig) -> None:
    """ConfigError for an optimizer or a schedule that does not exist, or does not go with the other flags."""
    options(optimizer_class(cfg), cfg)
    if cfg.lr_scheduler_kwargs and cfg.lr_schedule in ("constant", "constant_with_warmup"):
        raise ConfigError(
            f"--lr_scheduler_kwargs={cfg.lr_scheduler_kwargs}: --lr_schedule {cfg.lr_schedule} takes none. Name the "
            "schedule that they are for, such as cosine_with_min_lr, or leave them out."
        )
    if transformers_schedule(cfg):
        total = (cfg.max_steps or 1000) * cfg.num_iterations * cfg.num_minibatches
        for update in (0, total - 1):
            schedule_rate(cfg, update, warmup_updates(cfg, total), total)


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer. ConfigError for a group without parameters, and for what is trained and would never change or,
    unknown to DDP or FSDP, differ by rank. At start and in each update: what is trained may change."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if empty := [group.get("name", n) for n, group in enumerate(optimizer.param_groups) if not group["params"]]:
        raise ConfigError(
            f"make_optimizer: the group {empty[0]!r} has no parameters. Names differ with what wraps the model: "
            "compare clean_name(name), which does not; or leave the group out."
        )
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    if lost := [name for name, p in module.named_parameters() if p.requires_grad and p not in held]:
        raise ConfigError(
            f"make_optimizer: {len(lost)} of {len(trained)} trained parameters are in no group, first {lost[0]!r}: "
            "they would never change. Put them into one, also what is trained later on; or freeze them: "
            "requires_grad_(False) in load_hf_model."
        )
    wrapped = isinstance(module, DistributedDataParallel | FSDP | FSDPModule)
    at_start = module.__dict__.setdefault("trained_at_start", {*trained})
    if late := [name for name in trained if wrapped and name not in at_start]:
        raise ConfigError(
            f"{len(late)} parameters are trained that were frozen at start, first {late[0]!r}: DDP and FSDP add up "
            "over ranks gradients of what was trained then. Have them require gradients in to_train, and leave it so."
        )
    return optimizer


# ---- what changes from update to update -----------------------------------------------------------------------------


def lr_at(update: int, cfg: TrainConfig) -> float:
    """Learning rate of an optimizer update: linear warm-up, then --lr_schedule: constant, linear or cosine decay to 0,
    or one of transformers'.

    A function of the update's number, so that resuming needs no scheduler state. Updates are counted from the first
    step, those in which only a critic learns (--critic_warmup) included.
    """
    total = cfg.max_steps * cfg.num_iterations * cfg.num_minibatches
    warmup = warmup_updates(cfg, total)
    if transformers_schedule(cfg):
        return schedule_rate(cfg, update, warmup, total)
    if update < warmup:
        return cfg.learning_rate * (update + 1) / warmup
    done = (update - warmup) / max(total - warmup, 1)
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return cfg.learning_rate * decay[cfg.lr_schedule]


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


def warmup_updates(cfg: TrainConfig, total: int) -> int:
    """Optimizer updates over which the learning rate rises, of `total`."""
    if cfg.warmup_steps < 1:
        return math.ceil(cfg.warmup_steps * total)
    return int(cfg.warmup_steps) * cfg.num_iterations * cfg.num_minibatches


def transformers_schedule(cfg: TrainConfig) -> bool:
    """Whether the schedule is one of transformers'; `lr_at` has three of its own, which take no arguments."""
    return bool(cfg.lr_scheduler_kwargs) or cfg.lr_schedule not in ("constant", "linear", "cosine")


def schedule_rate(cfg: TrainConfig, update: int, warmup: int, total: int) -> float:
    """Learning rate of `update` by transformers' schedule of the name; its warm-up is at 0 in the first update."""
    arguments = json.dumps(cfg.lr_scheduler_kwargs or {}, sort_keys=True)
    try:
        return cfg.learning_rate * _schedule(cfg.lr_schedule, arguments, cfg.learning_rate, warmup, total)(update)
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--lr_schedule={cfg.lr_schedule} with --lr_scheduler_kwargs={arguments}, {warmup} updates of warm-up and "
            f"{total} in all: {error}. Its arguments are those of transformers' schedule of that name."
        ) from None


@lru_cache(maxsize=64)
def _schedule(name: str, arguments: str, learning_rate: float, warmup: int, total: int) -> Callable[[int], float]:
    from transformers.optimization import get_scheduler
    from transformers.trainer_utils import SchedulerType

    known_name("--lr_schedule", name, [each.value for each in SchedulerType])
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=learning_rate)  # schedules read its learning rate
    schedule = get_scheduler(name, stand_in, warmup, total, scheduler_specific_kwargs=json.loads(arguments))
    if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        raise ConfigError(
            f"--lr_schedule={name} follows a metric. Here the learning rate is a function of the update's number, so "
            "that a resumed run needs no other state; take another schedule, or write `lr_at` in the script."
        )
    return schedule.lr_lambdas[0]


# ---- optimizer ------------------------------------------------------------------------------------------------------


def optimizer_class(cfg: TrainConfig) -> type[torch.optim.Optimizer]:
    """The class that --optim names. ConfigError for none, and for one whose step needs the loss as a function."""
    theirs = {name.lower(): kind for name, kind in _classes("bitsandbytes.optim").items()}
    found = _classes("torch.optim").get(SAME.get(cfg.optim, cfg.optim))
    if found is None and any(word in cfg.optim.lower() for word in ("bit", "bnb", "paged")):  # adamw_bnb_8bit, Lion8bit
        found = theirs.get(cfg.optim.replace("_bnb", "").replace("_", "").lower())
        if not theirs:
            raise ConfigError(f"--optim={cfg.optim}: bitsandbytes is not installed; pip install bitsandbytes.")
    if found is None:
        known_name("--optim", cfg.optim, {*_classes("torch.optim"), *SAME, *_classes("bitsandbytes.optim")})
        found = theirs[cfg.optim.lower()]
    if inspect.signature(found.step).parameters["closure"].default is inspect.Parameter.empty:
        raise ConfigError(f"--optim={cfg.optim}: its step asks for the loss again and again; take another optimizer.")
    if cfg.strategy != "ddp" and not found.__module__.startswith("torch."):
        raise ConfigError(
            f"--optim={cfg.optim} with --strategy {cfg.strategy}: bitsandbytes knows no shards; use ddp, or AdamW."
        )
    return found


def _classes(module: str) -> dict[str, type]:
    try:
        there = importlib.import_module(module)
    except ImportError:
        return {}
    kinds = {name: kind for name, kind in vars(there).items() if inspect.isclass(kind)}
    return {n: k for n, k in kinds.items() if issubclass(k, torch.optim.Optimizer) and k is not torch.optim.Optimizer}


def options(kind: type, cfg: TrainConfig) -> dict:
    """Arguments of the optimizer's class. ConfigError for flags that were set and that it has no use for."""
    arguments = inspect.signature(kind.__init__).parameters
    betas = getattr(arguments.get("betas"), "default", None)
    adam = isinstance(betas, tuple) and len(betas) == 2  # of others, eps means other things
    taken = {"weight_decay"} & arguments.keys() | ({"adam_beta1", "adam_beta2", "adam_epsilon"} if adam else set())
    for flag in {"weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"} - taken:
        if getattr(cfg, flag) != getattr(TrainConfig, flag):
            raise ConfigError(f"--{flag}={getattr(cfg, flag)}: {kind.__name__} of --optim takes none; leave it out.")
    made = {"lr": cfg.learning_rate, "weight_decay": cfg.weight_decay}
    if adam:  # torch's fused kernels are the fastest; those of other classes do not run on every device
        made |= {"betas": (cfg.adam_beta1, cfg.adam_beta2), "eps": cfg.adam_epsilon, "fused": True}
    return {name: value for name, value in made.items() if name in arguments}


def make_by_name(trained: list, cfg: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that --optim names, on `trained`: parameters, or groups of them as torch's optimizers take them."""
    kind = optimizer_class(cfg)
    return kind(trained, **options(kind, cfg))
