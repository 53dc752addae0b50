"""Checks users' functions before a run, and what they return before it is trained on."""

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import utils
from algorithms.distillation import check_teacher
from batch import BY_ROW, by_domain, placed
from config import ConfigError, TrainConfig, known_name
from inputs.trajectory import stands_in

# Statistics that the script itself logs of an update.
TAKEN = {"loss", "tokens", "rows", "entropy", "lr", "grad_norm", "kl", "not_finite"}
# Fields of Batch that are filled only if a function's `needs` has them.
FIELDS = ("old_logprobs", "ref_logprobs", "entropy", "sum_pi_squared", "baselines", "teacher_logprobs", "teacher_top")
FIELDS += ("current_logprobs",)


def check_functions(functions: dict[str, Callable], cfg: TrainConfig) -> None:
    """ConfigError for settings with which these functions cannot work. functions: those in use, by the flag that names
    each."""
    for name, function in functions.items():
        known_name(f"{name}: .weights", getattr(function, "weights", "agg"), ("agg", "sum"))
        for field in getattr(function, "needs", ()):
            known_name(f"{name}: .needs", field, FIELDS)
        if fault := getattr(function, "check", lambda cfg: None)(cfg):
            raise ConfigError(f"{name}: {fault}.")
    check_teacher(functions, cfg)
    compares = getattr(functions[f"--advantage {cfg.advantage}"], "compares_group", True)
    for domain in cfg.by_domain():
        number = domain.num_generations
        if number < 2 and (compares(domain) if callable(compares) else compares):
            raise ConfigError(f"--num_generations={number}: {cfg.advantage} compares completions; take 2 or more.")


@contextlib.contextmanager
def naming_missing_fields(name: str, batch) -> Iterator[None]:
    """Adds a note to an error raised within: which fields of the batch are None because no function asks for them."""
    try:
        yield
    except (TypeError, AttributeError, KeyError) as error:
        absent = ", ".join(field for field in FIELDS if getattr(batch, field, None) is None)
        error.add_note(
            f"In {name}. Fields of the batch that are None, as no function needs them: {absent}. Write FUNCTION.needs "
            f'= ("FIELD",) below the function that reads it. batch.extras has {sorted(batch.extras) or "nothing"}.'
        )
        raise


# ---- returned values -------------------------------------------------------------------------------------------------


def extras(function: Callable, batch, cfg: TrainConfig) -> dict:
    """What FUNCTION.prepare computes of a batch before it is cut into micro-batches:
    {name: number, or tensor [B, ...]}."""
    checked_extras, name = {}, f"{getattr(function, '__name__', function)}.prepare"
    if prepare := getattr(function, "prepare", None):
        with naming_missing_fields(name, batch), utils.counted(not batch.stand_in):
            extras = prepare(batch, cfg)
        if clashes := extras.keys() & batch.extras.keys():
            raise ValueError(f"{name} returned {min(clashes)!r}, which batch.extras already has; rename one.")
        for key, value in extras.items():
            shape = tuple(value.shape) if isinstance(value, Tensor) else ()
            if shape not in ((), (len(batch),), tuple(batch.loss_mask.shape)):
                raise ValueError(f"{name} returned {key!r} of shape {shape}; give a number, [B] or [B, T].")
            checked_extras[key] = value.to(batch.loss_mask.device) if isinstance(value, Tensor) else float(value)
    return checked_extras


def advantages(function: Callable, batch, cfg: TrainConfig) -> tuple[Tensor, dict[str, float]]:
    """function(batch, cfg), checked: (advantages [B, T], numbers to log). With --domains, the rows of each domain with
    its config. Collective."""
    of_rows, metrics = torch.zeros_like(batch.rewards), {}
    for domain_cfg, rows, part in by_domain(batch, cfg):  # without --domains one part, the whole batch
        values, numbers = advantages_of_part(function, part, domain_cfg)
        of_rows = placed(values.to(of_rows.dtype), rows, of_rows)
        metrics |= metrics_of({domain_cfg.prefix + name: value for name, value in numbers.items()}, part)
    return of_rows, metrics


def advantages_of_part(advantage: Callable, batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """(advantages [B, T], statistics) of an advantage function. ValueError if they cannot be trained on."""
    name = f"advantage {cfg.advantage!r}"
    with naming_missing_fields(name, batch):
        result = advantage(batch, cfg)
    advantages, stats = result if isinstance(result, tuple) else (result, {})
    advantages = per_token(name, advantages, batch, "spread(values, batch.loss_mask) makes it from [B]")
    if not advantages.isfinite().all():
        raise ValueError(f"{name} returned nan or infinity on a sampled token. {why_not_finite(batch)}")
    return advantages, dict(stats)


def policy_loss(function: Callable, logprobs: Tensor, batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """function(logprobs, batch, cfg), checked: (loss per token, statistics)."""
    name = f"policy loss {cfg.policy_loss!r}"
    with naming_missing_fields(name, batch):
        result = function(logprobs, batch, cfg)
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise TypeError(f"{name} must return (loss per token [B, T], dict of statistics [B, T]); got {type(result)}.")
    return term(name, result[0], batch), check_statistics(name, result[1], batch)


def own_term(function: Callable, logprobs: Tensor, entropy: Tensor, batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """What train_grpo.own_term adds to the loss: a scalar, the sum over its tokens, weighted like the loss unless the
    function sets `weights = "sum"`; and its statistics."""
    with naming_missing_fields("own_term", batch):
        extra_term, statistics = function(logprobs, entropy if entropy.requires_grad else None, batch, cfg)
    weights = 1 if getattr(function, "weights", "agg") == "sum" else batch.weights
    total = 0.0 if extra_term is None else (weights * term("own_term", extra_term, batch)).sum()
    return total, check_statistics("own_term", statistics, batch)


def term(name: str, values: Tensor, batch) -> Tensor:
    """A part of the loss [B, T]; ValueError if it has another shape or trains nothing."""
    values = per_token(name, values, batch, "do not average: --loss_agg does")
    if torch.is_grad_enabled() and not values.requires_grad and bool(values.any()):
        raise ValueError(f"{name} returned a term without a gradient, which trains nothing: no .detach() on logprobs.")
    return values


def check_statistics(name: str, statistics: dict, batch) -> dict:
    """The statistics, unchanged. Each must have one value per token or broadcast to that ([B, 1], [1, T], a scalar), or
    one per row, [B]; ValueError otherwise."""
    rows, length = batch.loss_mask.shape
    if reserved := sorted(TAKEN & statistics.keys()):
        raise ValueError(f"{name} returned the statistic {reserved[0]!r}, which the script logs; take another name.")
    for key, matrix in statistics.items():
        shape = tuple(matrix.shape) if isinstance(matrix, Tensor) else None
        if shape not in ((), (rows,), (1, 1), (rows, 1), (1, length), (rows, length)):
            raise ValueError(f"{name} returned the statistic {key!r} as {shape}; make it [B, T], or [B].")
    return statistics


def why_not_finite(batch) -> str:
    """Explains nan in an advantage: names the fields of Batch that are nan on some sampled tokens, as where no teacher
    was asked or for a demonstration."""
    by_token = {n: v for n, v in vars(batch).items() if isinstance(v, Tensor) and v.shape == batch.loss_mask.shape}
    unknown = " and ".join(f"batch.{n}" for n, v in by_token.items() if v[batch.loss_mask > 0].isnan().any())
    return f"{unknown} has nan on some of them." if unknown else "Does something divide by a std or a length of 0?"


def per_token(name: str, matrix: Tensor, batch, remedy: str) -> Tensor:
    """The matrix [B, T] with 0 where nothing was sampled. ValueError for another shape."""
    shape = tuple(batch.loss_mask.shape)
    if not isinstance(matrix, Tensor) or tuple(matrix.shape) != shape:
        got = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"{name} returned {got}; it must be a value per token, {shape}: {remedy}.")
    return matrix.where(batch.loss_mask > 0, 0)  # elsewhere log-probs are 0: log(1 - p) would be inf, times 0 nan


# ---- numbers over ranks ---------------------------------------------------------------------------------------------


def after_rollout(returned, sampled: list = ()) -> tuple[list, dict]:
    """(trajectories by group, metrics) from after_rollout's return value; `sampled` are those it was given. A
    trajectory that has the row of a sampled one gets its row number, too. The placeholder of a rank on which all had
    failed is dropped if others were added. Collective."""
    trajectories, numbers = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(trajectories, list) or not isinstance(numbers, dict):
        raise TypeError(f"after_rollout must return trajectories, or (trajectories, numbers); got {type(returned)}.")
    played = [t for t in trajectories if not stands_in(t)]
    row_numbers = {id(t.row): t.info["row_number"] for t in reversed(sampled) if "row_number" in t.info}
    for t in played:
        t.info = t.info | ({"row_number": row_numbers[id(t.row)]} if id(t.row) in row_numbers else {})
    return sorted(played or trajectories, key=lambda t: t.group), over_ranks(numbers, len(played))


def metrics_of(numbers: dict, batch) -> dict[str, float]:
    """`over_ranks` of the numbers that a function logged for a batch. Values [B, T] count on sampled tokens.
    Collective."""
    sampled, size = batch.loss_mask > 0, batch.loss_mask.shape
    of_tokens = {n: v[sampled] for n, v in numbers.items() if isinstance(v, Tensor) and v.shape == size}
    return over_ranks(numbers | of_tokens, 0 if batch.stand_in else len(batch))


def over_ranks(numbers: dict, rows: int) -> dict[str, float]:
    """Averages {name: a number, or several numbers} over all ranks, by the rule of `utils.over_ranks`. A single number
    stands for all `rows`, this rank's completions; a rank without rows contributes nothing. Collective."""
    sums = {}
    for name, value in numbers.items() if rows else ():
        value = torch.as_tensor(value, dtype=torch.float64)
        if name.endswith("_max"):
            sums[name] = max(value.flatten().tolist(), default=-math.inf), 1
        else:
            weight = 1 if value.ndim or name.endswith("_sum") else rows
            sums[name] = float(value.sum()) * weight, value.numel() * weight
    return utils.over_ranks(sums)


def means_of(total: dict[str, Tensor]) -> dict[str, float]:
    """Of a step's updates, over all ranks: the "loss", and the means of the statistics per token, or per row. total:
    this rank's sums, one scalar each, with "tokens" and "rows". Collective."""
    sums = dict(zip(total, torch.stack([*total.values()]).tolist(), strict=True))  # one read of the GPU
    tokens, rows, loss = sums.pop("tokens"), sums.pop("rows"), float(utils.all_sum(torch.tensor(sums.pop("loss"))))
    names = set().union(*utils.gather_objects([*sums]))  # a rank may lack one; its tokens count nevertheless
    missing = {name: -math.inf if name.endswith("_max") else 0.0 for name in names}
    items = (missing | sums).items()
    means = utils.over_ranks({n.removeprefix(BY_ROW): (v, rows if n.startswith(BY_ROW) else tokens) for n, v in items})
    # Effective sample size of the weights as a share of the tokens: 1 if trainer and generator agree.
    if squared := means.pop("sampling/ratio_squared", None):
        means["sampling/ess"] = means["sampling/ratio_mean"] ** 2 / squared
    return means | {"loss": loss}
