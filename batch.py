"""A step's trajectories as tensors, and arithmetic over its groups, turns and masks.

Tensors are [B, T] or [B]: B completions, T tokens in the longest of them, prompt included. Statistics over the batch
cover all ranks; those of a group are local, since a group lies on one rank.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

import utils
from config import TrainConfig
from inputs.trajectory import stands_in, version_spans

GROUPS = 2**32  # more than a rank has
BY_ROW = "rows of "  # prefix of the names of sums over rows


@dataclass
class TokenRecord:
    """What the last forward pass of a step's updates saw for each token; nan where there was none.  [B, T] each"""

    logprob: Tensor
    entropy: Tensor
    weight: Tensor  # minus the derivative of the update's loss by the token's log-prob, times the update's loss tokens


@dataclass
class Batch:
    """Trajectories as right-padded tensors, one row each, rows of a prompt adjacent. Position t is token t."""

    input_ids: Tensor  # [B, T] int64: prompt and everything after it
    attention_mask: Tensor  # [B, T] 1 on tokens, 0 on padding
    loss_mask: Tensor  # [B, T] 1 exactly on tokens the policy sampled
    rewards: Tensor  # [B, T] outcome on the last sampled token; a turn's reward on the turn's last sampled token
    groups: Tensor  # [B] int64: rows of one prompt share it; unique over all ranks
    sampling_logprobs: Tensor | None = None  # [B, T] the generator's; nan on demonstrations, 0 where loss_mask is 0
    old_logprobs: Tensor | None = None  # [B, T] before the first update of the step; None if the ratio is 1 anyway
    current_logprobs: Tensor | None = None  # [B, T] before the update under way, if a function asks
    ref_logprobs: Tensor | None = None  # [B, T] of the reference model; None if nothing asks for it
    teacher_logprobs: Tensor | None = None  # [B, T] of a teacher; nan on tokens that none scored; None without one
    teacher_top: Tensor | None = None  # [B, T, k] int64: the teacher's likeliest tokens (--distill_topk), and
    teacher_top_logprobs: Tensor | None = None  # [B, T, k] their log-probs; -inf where it gave fewer
    top_logprobs: Tensor | None = None  # [B, T, k] the policy's of the same tokens, with gradient; `micro_loss`
    values: Tensor | None = None  # [B, T] of a critic, before the step's updates (train_ppo.py), and
    returns: Tensor | None = None  # [B, T] the targets that the critic is fitted to
    baselines: Tensor | None = None  # [B] remax: score of a greedy completion of the same prompt; rae: mean of the role
    advantages: Tensor | None = None  # [B, T] 0 where loss_mask is 0
    reward_components: Tensor | None = None  # [B, reward functions] unweighted; 0 where one returned None
    states: Tensor | None = None  # [B, T] int64: the environment's state at the start of the token's turn (gigpo)
    entropy: Tensor | None = None  # [B, T] of the policy before the first update, and
    sum_pi_squared: Tensor | None = None  # [B, T] its sum of squared probabilities (otb)
    given_scores: Tensor | None = None  # [B] scores before shape_rewards; None: it was not called
    extras: dict = field(default_factory=dict)  # your own: numbers, or tensors [B, ...], cut like the other fields
    routed_experts: Tensor | None = None  # [B, T, layers, k] of the generator, -1 unknown: modeling/router_replay.py
    model_inputs: list[dict] = field(default_factory=list)  # per row, the tensors of its images for the model
    rows: list[dict] = field(default_factory=list)  # per row, its row of the data set
    weights: Tensor | None = None  # [B, T] each token's weight in the loss of the update (`token_weights`), and
    update_tokens: float = 0.0  # the loss tokens of this update, over all ranks
    versions: Tensor | None = None  # [B, T] of the weights that sampled the token: the number of steps before them
    step: int = 0  # of the run, from 0
    stand_in: bool = False  # this rank has no rows: the one here serves the collectives and counts for nothing
    record: TokenRecord | None = None  # of the whole step, if the run keeps one, and
    places: Tensor | None = None  # [B] the record's row for each row here
    restarts: list[list] = field(default_factory=list)  # per row, (column where a new context begins, model_inputs)
    starts: Tensor | None = None  # [B] after `split_restarts`: the row's first column in the unsplit batch

    @property
    def scores(self) -> Tensor:  # [B] weighted sums of the reward functions' values
        return row_sum(self.rewards) if self.given_scores is None else self.given_scores.clone()

    @property
    def shaped_scores(self) -> Tensor:  # [B] the same after `shape_rewards`
        return row_sum(self.rewards)

    def __len__(self) -> int:
        return len(self.input_ids)

    def select(self, rows: list[int]) -> "Batch":
        """The given rows, cut to the longest of them. An empty list gives the first row as a stand-in that counts for
        nothing: a rank with fewer rows or passes than others still has to take part in their collectives."""
        if not rows:
            first = self.select([0])
            values = {name: getattr(first, name) for name in ("loss_mask", "weights", "advantages")}
            zeros = {name: torch.zeros_like(value) for name, value in values.items() if value is not None}
            return replace(first, stand_in=True, **zeros)
        places = utils.upload(torch.tensor(rows), self.input_ids.device)  # once, not for every field
        longest = int(self.attention_mask[places].sum(1).max())

        def cut(value: Tensor) -> Tensor:
            by_token = value.shape[:2] == self.input_ids.shape
            at = places if value.device == places.device else torch.tensor(rows)
            return value[at, :longest] if by_token else value[at]

        return self.each(cut, rows)

    def each(self, cut: Callable[[Tensor], Tensor], rows: list[int]) -> "Batch":
        """The batch with `cut` applied to every tensor, and only these rows of every list."""

        def take(value):
            if isinstance(value, dict):
                return {name: take(entry) for name, entry in value.items()}
            if isinstance(value, Tensor) and value.ndim:
                return cut(value)
            return [value[row] for row in rows] if isinstance(value, list) and value else value

        return Batch(**{f.name: take(getattr(self, f.name)) for f in dataclasses.fields(self)})


def collate(trajectories: list, pad_id: int, device: torch.device, rank: int = 0, step: int = 0) -> Batch:
    """This rank's trajectories (inputs/trajectory.py) as a Batch. Group numbers become unique over all ranks."""
    if not trajectories:
        raise ValueError("after_rollout returned no trajectories on this rank; every rank needs at least one")
    rows, length = len(trajectories), max(len(t.prompt_ids) + len(t.token_ids) for t in trajectories)
    input_ids, versions = torch.full((rows, length), pad_id), torch.zeros(rows, length)
    attention_mask, loss_mask, rewards, logprobs = torch.zeros(4, rows, length).unbind()  # [B, T] each
    for row, t in enumerate(trajectories):
        start, end = len(t.prompt_ids), len(t.prompt_ids) + len(t.token_ids)
        input_ids[row, :end] = torch.tensor(t.prompt_ids + t.token_ids)
        attention_mask[row, :end] = 1
        loss_mask[row, start:end] = torch.tensor(t.loss_mask, dtype=torch.float)
        rewards[row, start:end] = torch.tensor(t.token_rewards, dtype=torch.float)
        logprobs[row, start:end] = torch.tensor(t.logprobs, dtype=torch.float)
        versions[row, start:end] = t.policy_version
        for version, first, last in version_spans(t):
            versions[row, start + first : start + last] = version
    groups = torch.tensor([t.group + rank * GROUPS for t in trajectories])
    inputs = [t.info.get("model_inputs", {}) for t in trajectories]
    tensors = (t.to(device) for t in (input_ids, attention_mask, loss_mask, rewards, groups, logprobs))
    batch = Batch(*tensors, model_inputs=inputs, rows=[t.row for t in trajectories], step=step)
    batch.versions, batch.stand_in = versions.to(device), all(map(stands_in, trajectories))
    # A reward function that did not apply counts as 0. Domains may have different numbers of functions.
    parts, baselines = ([t.info.get(name) for t in trajectories] for name in ("reward_components", "baselines"))
    local = max((len(part) for part in parts if part is not None), default=0), any(b is not None for b in baselines)
    width, any_baseline = (max(counts) for counts in zip(*utils.gather_objects(local), strict=True))
    if width:  # on any rank. inf: the trajectory, such as a demonstration, has none; gdpo refuses it
        parts = [[math.inf] * width if part is None else part + [0.0] * (width - len(part)) for part in parts]
        batch.reward_components = torch.tensor(parts, device=device).nan_to_num(posinf=math.inf)
    if any_baseline:
        baseline_of = {t.group: t.info["baselines"] for t in trajectories if "baselines" in t.info}  # one per prompt
        values = [baseline_of.get(t.group) or 0.0 for t in trajectories]
        batch.baselines = torch.tensor(values, device=device).nan_to_num()
    batch.extras = {name: extra.to(device) for name, extra in collated_extras(trajectories, length).items()}
    batch.routed_experts = collated_experts([t.info.get("routed_experts") for t in trajectories], rows, length)
    for name, values in collated_teacher(trajectories, length).items():
        setattr(batch, name, values.to(device))
    if any("states" in t.info for t in trajectories):
        batch.states = number_states(trajectories, length).to(device)
    if any(t.info.get("restarts") for t in trajectories):
        batch.restarts = [restarts_of(t) for t in trajectories]
    return batch


def restarts_of(t) -> list[tuple[int, dict]]:
    """For each place where a new context begins in a trajectory: (column, tensors of its images)."""
    places = t.info.get("restarts") or []
    inputs = t.info.get("restart_inputs") or [{}] * len(places)
    return [(len(t.prompt_ids) + place, tensors) for place, tensors in zip(places, inputs, strict=True)]


def split_restarts(batch: Batch) -> Batch:
    """The rows that the policy computes. Each new context within a trajectory (see Trajectory) becomes a row of its
    own, which sees none of the tokens before it.  [B, T] -> [R, T']

        p a a q b      restarts [[(3, {})]]     ->     p a a      starts [0, 3]
                                                       q b .

    Code that compares or counts trajectories takes the unsplit batch, where each is one row. Sampled tokens keep their
    order: x[loss_mask > 0] is the same in both.
    """
    if not any(batch.restarts):
        return batch
    ends = batch.attention_mask.sum(1).long().tolist()
    bounds = [[0, *(at for at, _ in restarts), end] for restarts, end in zip(batch.restarts, ends, strict=True)]
    parts = [(row, *span) for row, columns in enumerate(bounds) for span in pairwise(columns)]
    rows, starts, ends = torch.tensor(parts, device=batch.input_ids.device).unbind(1)  # [R] each
    columns = starts[:, None] + torch.arange(int((ends - starts).max()), device=starts.device)  # [R, T']
    outside, columns = columns >= ends[:, None], columns.clamp(max=batch.input_ids.shape[1] - 1)

    def cut(value: Tensor) -> Tensor:
        at = rows.to(value.device)
        if value.shape[:2] != batch.input_ids.shape:
            return value[at]
        cells = value[at[:, None], columns.to(value.device)]  # [R, T', ...]
        return cells.masked_fill(outside.to(value.device).view(*outside.shape, *[1] * (cells.ndim - 2)), 0)

    contexts = batch.each(cut, rows.tolist())
    inputs = batch.model_inputs or [{}] * len(batch)
    contexts.model_inputs = [
        entry for first, later in zip(inputs, batch.restarts, strict=True) for entry in (first, *(i for _, i in later))
    ]
    return replace(contexts, restarts=[], starts=starts)


def merge_restarts(values: Tensor, contexts: Batch, batch: Batch) -> Tensor:
    """Undoes `split_restarts` for values of the sampled tokens: from `contexts`, which it returned, to their places in
    `batch`; 0 elsewhere.  [R, T', ...] -> [B, T, ...]"""
    if contexts is batch:
        return values
    out = values.new_zeros(*batch.loss_mask.shape, *values.shape[2:])
    out[batch.loss_mask > 0] = values[contexts.loss_mask > 0]
    return out


def collated_extras(trajectories: list, length: int) -> dict[str, Tensor]:
    """info["extras"] of the trajectories as tensors [B] or [B, T]: {name: a number, or a list as long as loss_mask};
    0 where a trajectory lacks the name. Collective: the names are those of all ranks."""
    extras_of_rows = [t.info.get("extras") or {} for t in trajectories]
    kinds = {(name, isinstance(value, list | tuple)) for extras in extras_of_rows for name, value in extras.items()}
    tensors = {}
    for name, by_token in sorted(set().union(*utils.gather_objects(kinds))):
        tensors[name] = torch.zeros(len(extras_of_rows), length) if by_token else torch.zeros(len(extras_of_rows))
        for row, (t, extras) in enumerate(zip(trajectories, extras_of_rows, strict=True)):
            value, start, size = extras.get(name, 0.0), len(t.prompt_ids), len(t.token_ids)
            if by_token and name in extras and len(value) != size:
                fault = f"has {len(value)} numbers for {size} tokens after the prompt"
                raise ValueError(f'info["extras"][{name!r}] {fault}; give one per token, like loss_mask, or just one')
            place = (row, slice(start, start + size)) if by_token else row
            tensors[name][place] = torch.tensor(value, dtype=torch.float)
    return tensors


def collated_experts(choices: list[np.ndarray | None], rows: int, length: int) -> Tensor | None:
    """[B, T, layers, k] int16, of `rows` trajectories, -1 where unknown; None if none has any."""
    example = next((choice for choice in choices if choice is not None), None)
    if example is None:
        return None
    out = torch.full((rows, length, *example.shape[1:]), -1, dtype=torch.int16)
    for row, choice in enumerate(choices):
        if choice is not None:
            out[row, : len(choice)] = torch.from_numpy(choice)
    return out


def collated_teacher(trajectories: list, length: int) -> dict[str, Tensor]:
    """The answers of teachers' servers as fields of Batch; nan, or -inf, on tokens that no server scored."""
    fields, rows = {}, len(trajectories)
    if any(t.teacher_logprobs is not None for t in trajectories):
        fields["teacher_logprobs"] = torch.zeros(rows, length)
    if top := [t.teacher_top for t in trajectories if t.teacher_top is not None]:
        k = top[0][0].shape[1]
        fields["teacher_top"] = torch.zeros(rows, length, k, dtype=torch.int64)
        fields["teacher_top_logprobs"] = torch.full((rows, length, k), -math.inf)
    for row, t in enumerate(trajectories):
        span = slice(len(t.prompt_ids), len(t.prompt_ids) + len(t.token_ids))
        if "teacher_logprobs" in fields:
            unscored = [math.nan if sampled else 0.0 for sampled in t.loss_mask]
            fields["teacher_logprobs"][row, span] = torch.tensor(t.teacher_logprobs or unscored, dtype=torch.float)
        if t.teacher_top is not None:
            fields["teacher_top"][row, span], fields["teacher_top_logprobs"][row, span] = t.teacher_top
    return fields


def start_record(batch: Batch) -> None:
    """From here on every pass over the batch, or over rows selected from it, is entered into batch.record."""
    unknown = (torch.full_like(batch.loss_mask, float("nan")) for _ in range(2))
    batch.record = TokenRecord(*unknown, weight=torch.zeros_like(batch.loss_mask))
    batch.places = torch.arange(len(batch), device=batch.input_ids.device)


def record(batch: Batch, logprobs: Tensor, entropy: Tensor) -> None:
    """Enter a pass over a micro-batch into batch.record: log-probs and entropy [B, T] and, by a hook in the backward
    pass, how much the loss moves each log-prob: -d loss / d logprob x the update's tokens. Under token_mean, at a ratio
    of 1, this is the advantage. A later pass over the same rows overwrites it."""
    index = batch.loss_mask.nonzero(as_tuple=True)  # rows and columns, [N] each
    start = 0 if batch.starts is None else batch.starts[index[0]]
    full, place = batch.record, (batch.places[index[0]], index[1] + start)
    full.logprob[place], full.entropy[place] = logprobs.detach()[index].float(), entropy.detach()[index].float()
    full.weight[place] = 0.0
    scale = -batch.update_tokens / utils.world_size()  # gradients are those of the loss times the number of ranks

    def add(gradient: Tensor) -> None:
        full.weight[place] += scale * gradient[index].float()

    if logprobs.requires_grad:
        logprobs.register_hook(add)


def number_states(trajectories: list, length: int) -> Tensor:
    """Numbers each token's environment state. info["states"] is a list of hashables as long as loss_mask; equal states
    get equal numbers, from 1 on. None, an unknown state, equals no other: each gets a negative number.  [B, T]"""
    states, numbers = torch.zeros(len(trajectories), length, dtype=torch.int64), {}
    for row, t in enumerate(trajectories):
        for place, state in enumerate(t.info.get("states") or [None] * len(t.token_ids), len(t.prompt_ids)):
            unknown = -(row * length + place + 1)
            states[row, place] = unknown if state is None else numbers.setdefault(state, len(numbers) + 1)
    return states


# ---- domains --------------------------------------------------------------------------------------------------------


def by_domain(batch: Batch, cfg: TrainConfig) -> Iterator[tuple[TrainConfig, list[int], Batch]]:
    """For each domain with rows on any rank: its config, its row numbers on this rank, and these rows as a batch.
    Without domains that is the whole batch. Collective.

    A rank without rows of a domain, or whose trajectories all failed, gets a stand-in: a completion of another domain
    with a data row that another rank lends. It lets the rank take part in sums over ranks, to which it adds nothing;
    throw away what is computed from it.
    """
    configs = cfg.by_domain()
    rows = [[i for i, row in enumerate(batch.rows) if row.get("domain") == domain.domain] for domain in configs]
    rows = rows if cfg.domains else [list(range(len(batch)))]
    if batch.stand_in:
        rows = [[] for _ in configs]
    elif sum(map(len, rows)) < len(batch):
        raise ValueError("after_rollout returned a trajectory whose row names no domain of this run; copy `domain`")
    rank_counts = utils.all_sum(torch.tensor([float(bool(numbers)) for numbers in rows])).tolist()
    uneven = any(0 < count < utils.world_size() for count in rank_counts)
    donors = utils.gather_objects([batch.rows[numbers[0]] if numbers else None for numbers in rows]) if uneven else []
    for index, (domain, numbers, count) in enumerate(zip(configs, rows, rank_counts, strict=True)):
        if count:
            part = batch if len(numbers) == len(batch) else batch.select(numbers or [0])
            if not numbers:
                part.rows = [next(of_rank[index] for of_rank in donors if of_rank[index] is not None)]
            if cfg.domains and part.reward_components is not None:
                width = part.reward_components.shape[1]
                num_functions = len(domain.reward_funcs)
                part.reward_components = torch.nn.functional.pad(part.reward_components, (0, num_functions - width))
            with utils.counted(bool(numbers)):
                yield domain, numbers, part


def placed(values: Tensor, rows: list[int], target: Tensor) -> Tensor:
    """A copy of `target` [B, T] with `values` [b, T'] in these rows; the values themselves if these are all.  [B, T]"""
    if len(rows) == len(target):
        return values
    target = target.clone()
    target[rows, : values.shape[1]] = values[: len(rows)].to(target.dtype)
    return target


# ---- groups ---------------------------------------------------------------------------------------------------------


def group_index(groups: Tensor) -> tuple[Tensor, Tensor]:
    """For each row its group's number, 0, 1, ..., and its group's size.  [B], [B]"""
    utils.must_be_whole("a statistic of a group")
    _, index, counts = groups.unique(return_inverse=True, return_counts=True)
    return index, counts[index]


def group_sum(values: Tensor, groups: Tensor) -> Tensor:
    """For each row the sum over its group, in float64.  [B] -> [B]"""
    index, _ = group_index(groups)
    if values.shape != groups.shape:
        raise ValueError(
            f"a statistic of a group takes one value per completion, [{len(groups)}]; got {[*values.shape]}. Reduce "
            "values per token first: row_mean(values, loss_mask)[:, 0]."
        )
    return torch.zeros_like(values, dtype=torch.float64).index_add(0, index, values.double())[index]


def group_mean(values: Tensor, groups: Tensor) -> Tensor:
    """For each row the mean over its group, in float64: the mean of equal values is exactly theirs.  [B] -> [B]"""
    _, size = group_index(groups)
    return group_sum(values, groups) / size


def center_by_group(scores: Tensor, groups: Tensor) -> Tensor:
    """Scores minus their group's mean; exactly 0 for a group of one, or of equal scores.  [B] -> [B]"""
    return (scores - group_mean(scores, groups)).to(scores.dtype)


def group_std(scores: Tensor, groups: Tensor) -> Tensor:
    """For each row the unbiased standard deviation of its group; 0 for a group of one.  [B] -> [B]"""
    _, size = group_index(groups)
    squares = (scores - group_mean(scores, groups)) ** 2  # float64
    return (group_mean(squares, groups) * size / (size - 1).clamp(min=1)).sqrt().to(scores.dtype)


def differ(std: Tensor, mean: Tensor) -> Tensor:
    """Whether values of this std and mean differ by more than rounding: float32 has seven digits."""
    return std > 1e-6 * mean.abs().clamp(min=1)


def center_and_scale(scores: Tensor, groups: Tensor, mean: str, std: str, running=(0.0, 1.0)) -> tuple[Tensor, Tensor]:
    """What to subtract and to divide by. mean and std are each "group" (the prompt's), "batch" (the step's, over all
    ranks), "running" (all steps so far, as given) or "none". A std that is only rounding (`differ`) becomes 1.
    [B], [B]"""
    _, batch_mean, batch_std = utils.global_moments(scores)  # of one rank alone it would depend on the number of ranks
    centers = {"none": 0.0, "group": group_mean(scores, groups), "batch": batch_mean, "running": running[0]}
    scales = {"none": 0.0, "group": group_std(scores, groups), "batch": batch_std, "running": running[1]}
    scale, zero = torch.zeros_like(scores) + scales[std], torch.zeros_like(scores, dtype=torch.float64)
    return zero + centers[mean], torch.where(differ(scale, zero + centers[std]), scale + 1e-6, 1.0)


def normalize(scores: Tensor, groups: Tensor, mean: str, std: str, running=(0.0, 1.0)) -> Tensor:
    """(s - mean) / (std + 1e-6), with the mean and std of `center_and_scale`.  [B] -> [B]"""
    center, scale = center_and_scale(scores, groups, mean, std, running)
    return ((scores - center) / scale).to(scores.dtype)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the loss tokens of the step, on all ranks.  [B, T] -> [B, T]"""
    _, mean, std = utils.global_moments(values, mask)
    return (values - mean) / (std**2 + 1e-8).sqrt() * mask


# ---- tokens and turns -----------------------------------------------------------------------------------------------


def spread(values: Tensor, loss_mask: Tensor) -> Tensor:
    """One value per row onto the row's sampled tokens.  [B], [B, T] -> [B, T]"""
    return values[:, None] * loss_mask


def row_sum(values: Tensor) -> Tensor:
    """Sum of each row, in float64, so that equal rewards at different places give equal scores.  [B, T] -> [B]"""
    return values.sum(1, dtype=torch.float64).to(values.dtype)


def row_mean(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Mean over each row's sampled tokens; 0 for a row without any.  [B, T] -> [B, 1]"""
    return (values * loss_mask).sum(1, keepdim=True) / loss_mask.sum(1, keepdim=True).clamp(min=1)


def add_statistics(sums: dict[str, Tensor], stats: dict[str, Tensor], loss_mask: Tensor) -> None:
    """Adds to `sums` in place: values [B, T] over the sampled tokens, values [B] over rows with sampled tokens; under
    names that end in _max the largest."""
    sums["tokens"] += loss_mask.sum().double()
    sums["rows"] += loss_mask.any(1).sum().double()
    for name, values in stats.items():
        counts = loss_mask.any(1) if values.ndim == 1 else loss_mask > 0
        if name.endswith("_max"):
            largest = values.detach().double().masked_fill(~counts, -math.inf).max()
            sums[name] = torch.maximum(sums.get(name, largest), largest)
        else:
            name = f"{BY_ROW}{name}" if values.ndim == 1 else name
            sums[name] += values.detach().where(counts, 0).sum(dtype=torch.float64)


def returns_to_go(batch: Batch, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each sampled token on.  [B, T]

    Text of tools and environments (mask 0) passes the sum on undiscounted, so that a reward after an observation
    reaches the turns before it.
    """
    total, out = torch.zeros_like(batch.shaped_scores), torch.zeros_like(batch.rewards)
    for t in reversed(range(batch.rewards.shape[1])):
        total = batch.rewards[:, t] + total * torch.where(batch.loss_mask[:, t] > 0, gamma, 1.0)
        out[:, t] = total
    return out * batch.loss_mask


def turn_returns(batch: Batch, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Discounted return of each turn. A turn is a run of sampled tokens and the text of tools that follows it.

        loss_mask  0 1 1 0 1 0      a prompt token, turn 1 of two tokens, a tool's answer, turn 2 of one token, padding
        rewards    0 0 1 0 2 0      1 at the end of turn 1, 2 at the end of turn 2
        turns      0 1 1 1 2 2      table with gamma .5:  [0, 1 + .5 * 2, 2] = [0, 2, 2];  pairs (0, 1), (0, 2)

    Returns turns [B, T] (0 on the prompt), the table of returns [B, K + 1] (column 0 is the prompt's), and the
    (row, turn) pairs that exist [M, 2]: rows have different numbers of turns.
    """
    starts = batch.loss_mask * (1 - torch.nn.functional.pad(batch.loss_mask, (1, 0))[:, :-1])
    turns = starts.cumsum(1).long()  # [B, T]
    table = batch.rewards.new_zeros(len(batch), int(turns.max()) + 1).scatter_add(1, turns, batch.rewards)  # [B, K + 1]
    for k in reversed(range(1, table.shape[1] - 1)):
        table[:, k] += gamma * table[:, k + 1]
    exists = torch.arange(table.shape[1], device=turns.device) <= turns.amax(1, keepdim=True)
    exists[:, 0] = False
    return turns, table, exists.nonzero()


def by_turn(values: Tensor, turns: Tensor, pairs: Tensor, loss_mask: Tensor) -> Tensor:
    """One value per existing turn onto that turn's sampled tokens.  [M] -> [B, T]"""
    table = values.new_zeros(len(turns), int(turns.max()) + 1).index_put(pairs.unbind(1), values)
    return table.gather(1, turns) * loss_mask


# ---- ratios ---------------------------------------------------------------------------------------------------------


def log_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """log pi / pi_old on sampled tokens, 0 elsewhere; clamped so that its exponential stays finite.  [B, T]"""
    return ((logprobs - batch.old_logprobs) * batch.loss_mask).clamp(-20, 20)


def clip_stats(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """Where a clip binds from below and from above, under TRL's names.  [B, T] each"""
    stats = {"low_mean": low, "high_mean": high, "region_mean": low | high}
    return {f"clip_ratio/{name}": value.float() for name, value in stats.items()}


def clipped_surrogate(ratio: Tensor, batch: Batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """max(-A r, -A clip(r, 1 - epsilon, 1 + epsilon_high)), and where the clip binds.  1707.06347 eq. 7.  [B, T]"""
    advantages, low, high = batch.advantages, 1 - cfg.epsilon, 1 + cfg.epsilon_high
    loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(low, high))  # [B, T]
    return loss, clip_stats((ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0))


def sequence_ratio(logprobs: Tensor, batch: Batch) -> Tensor:
    """exp(mean log-ratio) of each row, in a token form: the value is the sequence's, the gradient each token's own.
    GSPO, 2507.18071 eq. 7 and sec. 4.3.  [B, T]"""
    mean = row_mean(log_ratio(logprobs, batch), batch.loss_mask)  # [B, 1]
    return (logprobs - logprobs.detach() + mean.detach()).clamp(max=10).exp()
