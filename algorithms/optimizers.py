"""Optimizers and learning-rate schedules by name: torch's, bitsandbytes', transformers'.

Asked for names, not listed here. An optimizer is tried on a few small tensors, cut as the run cuts its own, before it
is used: what cannot work, or would be another algorithm on shards, is said at start.
"""

import importlib
import inspect
import json
import math
from collections.abc import Callable
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

import utils
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
        per_step, steps = cfg.num_iterations * cfg.num_minibatches, cfg.max_steps or 1000
        for update in range(0, steps * per_step, max(1, steps * per_step // 1000)):
            schedule_rate(cfg, update, warmup_updates(cfg, steps * per_step), steps * per_step)


# ---- learning rate --------------------------------------------------------------------------------------------------


def warmup_updates(cfg: TrainConfig, total: int) -> int:
    """Optimizer updates over which the learning rate rises, of `total`."""
    if cfg.warmup_steps is not None:
        return cfg.warmup_steps * cfg.num_iterations * cfg.num_minibatches
    return math.ceil(cfg.warmup_ratio * total)


def transformers_schedule(cfg: TrainConfig) -> bool:
    """Whether the schedule is one of transformers'; `lr_at` has three of its own, which take no arguments."""
    return bool(cfg.lr_scheduler_kwargs) or cfg.lr_schedule not in ("constant", "linear", "cosine")


def schedule_rate(cfg: TrainConfig, update: int, warmup: int, total: int) -> float:
    """Learning rate of `update` by transformers' schedule of the name; its warm-up is at 0 in the first update."""
    arguments = json.dumps(cfg.lr_scheduler_kwargs or {}, sort_keys=True)
    try:
        factor = _schedule(cfg.lr_schedule, arguments, cfg.learning_rate, warmup, total)(update)
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"--lr_schedule={cfg.lr_schedule} with --lr_scheduler_kwargs={arguments}, {warmup} updates of warm-up and "
            f"{total} in all: {error}. Its arguments are those of transformers' schedule of that name."
        ) from None
    if not (isinstance(factor, int | float) and 0 <= factor < math.inf):
        raise ConfigError(
            f"--lr_schedule={cfg.lr_schedule} with --lr_scheduler_kwargs={arguments}: a learning rate of {factor} x "
            f"--learning_rate in update {update}; it must be 0 or more."
        )
    return cfg.learning_rate * factor


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
    name = SAME.get(cfg.optim, cfg.optim)
    if (found := _classes("torch.optim").get(name)) is None:
        theirs = {each.lower(): kind for each, kind in _classes("bitsandbytes.optim").items()}
        found = theirs.get(cfg.optim.replace("_bnb", "").replace("_", "").lower())
        # Without "8bit" or the like, a name in small letters is transformers' own, which may be another algorithm.
        if found and cfg.optim != found.__name__ and not any(word in cfg.optim for word in ("bit", "bnb", "paged")):
            found = None
    if found is None:
        where = "" if _classes("bitsandbytes.optim") else " (bitsandbytes is not installed: pip install bitsandbytes)"
        known = {*_classes("torch.optim"), *SAME, *_classes("bitsandbytes.optim")}
        other = "transformers' adafactor is not torch's Adafactor. " if cfg.optim == "adafactor" else ""
        try:
            known_name("--optim", cfg.optim, known)
        except ConfigError as error:
            raise ConfigError(f"{other}{error}{where}") from None
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


def takes(kind: type) -> dict[str, str]:
    """{our flag: its argument} of those that the optimizer's class has a use for."""
    arguments = inspect.signature(kind.__init__).parameters
    taken = {"weight_decay": "weight_decay"} if "weight_decay" in arguments else {}
    if betas := arguments.get("betas"):
        pair = isinstance(betas.default, tuple) and len(betas.default) == 2
        taken |= {"adam_beta1": "betas", "adam_beta2": "betas"} if pair else {}
        taken |= {"adam_epsilon": "eps"} if "eps" in arguments else {}  # of others, eps means other things
    return taken


def options(kind: type, cfg: TrainConfig) -> dict:
    """Arguments of the optimizer's class. ConfigError for flags that were set and that it has no use for."""
    taken = takes(kind)
    for flag in ("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"):
        if flag not in taken and getattr(cfg, flag) != getattr(TrainConfig, flag):
            raise ConfigError(f"--{flag}={getattr(cfg, flag)}: {kind.__name__} of --optim takes none; leave it out.")
    values = {"weight_decay": cfg.weight_decay, "betas": (cfg.adam_beta1, cfg.adam_beta2), "eps": cfg.adam_epsilon}
    made = {"lr": cfg.learning_rate} | {argument: values[argument] for argument in taken.values()}
    # torch's fused kernels are the fastest; those of other classes than Adam's do not run on every device.
    fused = "betas" in made and "fused" in inspect.signature(kind.__init__).parameters
    return made | ({"fused": True} if fused else {})


def by_name(trained: list, cfg: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that --optim names, on `trained`: parameters, or groups of them as torch's optimizers take them.

    All ranks call it: it is tried first. ConfigError where it cannot do its work, or cannot be saved and loaded.
    """
    make = partial(optimizer_class(cfg), **options(optimizer_class(cfg), cfg))
    parameters = [p for group in trained for p in (group["params"] if isinstance(group, dict) else [group])]
    error = made = None
    try:
        try_out(make, parameters[0], cfg)
        made = make(trained)
    except ConfigError as caught:
        error = caught
    except Exception as caught:  # of any kind: it is what the optimizer says against these parameters
        where = f"--optim={cfg.optim} with --strategy {cfg.strategy} on {parameters[0].device.type}"
        error = ConfigError(f"{where} does not work: {type(caught).__name__}: {utils.text_of(caught)}")
    utils.raise_together(error, f"--optim={cfg.optim}")
    return made


def try_out(make: Callable, like: nn.Parameter, cfg: TrainConfig) -> None:
    """One step on a matrix and a vector, of the device and dtype of `like`, and cut as --strategy cuts: what it makes
    of the parts must be what it makes of the whole, and its state something that a checkpoint can put together."""
    local = like.to_local() if isinstance(like, DTensor) else like
    ranks = utils.world_size()
    # Parts of 8,192 and 16,384 numbers: those with fewer than 4,096 have no 8-bit state.
    numbers = torch.linspace(-1, 1, 128 * 128 * ranks, device=local.device, dtype=local.dtype)
    wholes = [(numbers.view(128 * ranks, 128), numbers.flip(0).view(128 * ranks, 128).sin()), (numbers, numbers.cos())]

    def stepped(cut: Callable[[Tensor], Tensor]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        parameters = [nn.Parameter(cut(values.clone())) for values, _ in wholes]
        for parameter, (_, gradient) in zip(parameters, wholes, strict=True):
            parameter.grad = cut(gradient)
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        optimizer.step()
        return parameters, optimizer

    def as_dtensor(whole: Tensor) -> Tensor:
        cut = distribute_tensor(whole.to(like.device_mesh.device_type), like.device_mesh, like.placements)
        part = cut.to_local().to(local.device)  # --offload keeps shards in CPU memory
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=cut.shape, stride=cut.stride()
        )

    def flat(whole: Tensor) -> Tensor:  # FSDP1's parameters are pieces of a long vector
        rank = dist.get_rank() if dist.is_initialized() else 0
        return whole.reshape(-1).chunk(max(ranks, 2))[rank].clone()

    whole, _ = stepped(lambda values: values)
    if not any((new - old).abs().max() > 0 for new, (old, _) in zip(whole, wholes, strict=True)):
        raise ConfigError(f"--optim={cfg.optim} changes no weight.")
    if cfg.strategy == "ddp":
        return
    cut = as_dtensor if isinstance(like, DTensor) else flat
    refused = f"--optim={cfg.optim} with --strategy {cfg.strategy}: "
    parts, optimizer = stepped(cut)
    expected = [cut(values.detach()) for values in whole]  # a collective each: all of them before a rank may raise
    for part, own in zip(parts, expected, strict=True):
        here, wanted = (t.to_local() if isinstance(t, DTensor) else t for t in (part, own))
        if not torch.allclose(here, wanted, rtol=1e-3, atol=1e-5):
            raise ConfigError(f"{refused}it does something else with shards than with whole weights; use ddp.")
        state = [value for value in optimizer.state[part].values() if isinstance(value, Tensor) and value.numel() > 1]
        if any(not isinstance(v, DTensor) if isinstance(part, DTensor) else v.shape != part.shape for v in state):
            raise ConfigError(f"{refused}its state could not be saved from shards and loaded again; use ddp.")
