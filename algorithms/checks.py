"""What an advantage or a loss returned, looked at before it is trained on."""

from collections.abc import Callable

import torch
from torch import Tensor

from config import TrainConfig


def computed(advantage: Callable, batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """(what an advantage computes, its statistics), if it can be trained on."""
    try:
        result = advantage(batch, cfg)
    except (TypeError, AttributeError) as error:
        fields = ("old_logprobs", "ref_logprobs", "entropy", "sum_pi_squared", "baselines")
        read = [f for f in fields if f in advantage.__code__.co_names and getattr(batch, f) is None]
        if not read:
            raise
        raise TypeError(
            f"advantage {cfg.advantage!r} reads batch.{read[0]}, which is not computed unless a function asks for it: "
            f"write {advantage.__name__}.needs = ({', '.join(map(repr, read))},) below it."
        ) from error
    advantages, stats = result if isinstance(result, tuple) else (result, {})
    return check_advantages(advantages, batch, cfg), dict(stats)


def check_advantages(advantages: Tensor, batch, cfg: TrainConfig) -> Tensor:
    """The advantages themselves, if they can be trained on."""
    remedy = "spread(values, batch.loss_mask) makes it from [B]"
    return checked(f"advantage {cfg.advantage!r}", advantages, batch, remedy)


DO_NOT_AVERAGE = "do not average: --loss_agg does"


def check_loss(result, batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """What a policy loss returned, if it is (loss per token, statistics)."""
    name = f"policy loss {cfg.policy_loss!r}"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise TypeError(f"{name} must return (loss per token [B, T], dict of statistics [B, T]); got {type(result)}.")
    return checked(name, result[0], batch, DO_NOT_AVERAGE), result[1]


def checked(name: str, matrix: Tensor, batch, remedy: str) -> Tensor:
    shape = tuple(batch.loss_mask.shape)
    if not isinstance(matrix, Tensor) or tuple(matrix.shape) != shape:
        got = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"{name} returned {got}; it must be a value per token, {shape}: {remedy}.")
    if not torch.isfinite(matrix.detach().where(batch.loss_mask > 0, 0)).all():
        raise ValueError(
            f"{name} returned nan or infinity on a sampled token. Does it divide by a std or a length of 0?"
        )
    return matrix
