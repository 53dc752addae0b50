"""Cuts a Batch into forward passes: rows of a group packed behind their shared prompt, passes by a token budget.

Nothing here changes the gradient (tests/test_gradient.py). Callers use `pack` and `micro_batches`.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

import utils
from batch import Batch
from config import TrainConfig
from inputs.vision import TYPES, join_inputs, per_token


def on_host(batch: Batch) -> Batch:
    """The batch with the tensors that packing reads on the CPU, since each look at a GPU tensor waits for the GPU."""
    names = ("input_ids", "attention_mask", "loss_mask", "groups")
    return replace(batch, **{name: getattr(batch, name).cpu() for name in names})


def runs(groups: Tensor) -> list[list[int]]:
    """Row numbers, adjacent rows of one group together: [5, 5, 7] -> [[0, 1], [2]]"""
    _, counts = groups.unique_consecutive(return_counts=True)
    return [list(range(end - n, end)) for end, n in zip(counts.cumsum(0).tolist(), counts.tolist(), strict=True)]


def sharing(batch: Batch) -> list[list[int]]:
    """`runs`, but only of rows that can share a prompt. If rows of a group have images of their own, from a tool or an
    environment, each row of it stands by itself."""
    split = []
    for members in runs(batch.groups):
        member_inputs = [batch.model_inputs[row] for row in members] if batch.model_inputs else [{}]
        tensor_ids = [{name: id(x) for name, x in inputs.items()} for inputs in member_inputs]
        split += [members] if all(ids == tensor_ids[0] for ids in tensor_ids) else [[row] for row in members]
    return split


def shared_prefix(batch: Batch, members: list[int]) -> int:
    """How many leading tokens these rows have in common, before the first sampled one."""
    sampled = batch.loss_mask[members]
    before = torch.where(sampled.any(1), sampled.argmax(1), batch.attention_mask[members].sum(1)).min().int()
    same = (batch.input_ids[members] == batch.input_ids[members[0]]).all(0)[:before]
    return int(same.cumprod(0).sum())


def positions_of(batch: Batch) -> Tensor:
    """Position of every token, by counting. Where images give prompts positions on several axes, these are kept and
    counting goes on from the largest.  [axes, B, T], 1 or 3 axes"""
    if not any("position_ids" in inputs for inputs in batch.model_inputs):
        return (batch.attention_mask.long().cumsum(1) - 1).clamp(min=0)[None]
    length = batch.input_ids.shape[1]
    return torch.cat([per_token(inputs, "position_ids", length) for inputs in batch.model_inputs], 1)


def pack(batch: Batch, cfg: TrainConfig) -> tuple[dict, Tensor, Tensor, Tensor]:
    """The inputs of a forward pass and, for each sampled token in row-major order, the place that predicts it.

    Groups stand one behind the other in one packed row, without padding: [prompt | completion 1 | ... | completion G].
    Positions restart after the prompt, and a completion sees the prompt and itself (attention.py):

        p p a a b q c   positions 0 1 2 3 2 0 1   segments (2, None) (2, 0) (1, 0) (1, None) (1, 3)

    Images of a prompt come once per group. Returns inputs [R, L], rows [N], columns [N], and targets [N], or [N, 1 + k]
    with batch.teacher_top; R is 1, or B where prompts are not shared. The inputs of a packed row include "segments",
    for attention.py.
    """
    device, batch = batch.input_ids.device, on_host(batch)
    rows, places = batch.loss_mask.nonzero(as_tuple=True)  # [N] each
    before, targets = places - 1, utils.upload(batch.input_ids[rows, places], device)  # [N] each
    if batch.teacher_top is not None:
        top = batch.teacher_top[utils.upload(rows, device), utils.upload(places, device)]  # [N, k]
        targets = torch.cat([targets[:, None], top], 1)  # [N, 1 + k]
    inputs, rows, columns = (packed_row if cfg.shared_prefix else plain_rows)(batch, rows, before)
    inputs = {name: utils.upload(x, device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    return inputs, utils.upload(rows, device), utils.upload(columns, device), targets


def plain_rows(batch: Batch, rows: Tensor, before: Tensor) -> tuple[dict, Tensor, Tensor]:
    """As `pack`, one row a completion."""
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.long()}
    inputs |= join_inputs(batch.model_inputs)
    if len(axes := positions_of(batch)) > 1:
        inputs["position_ids"] = axes
    for types in {*TYPES.values()} & {name for row in batch.model_inputs for name in row}:
        inputs[types] = torch.cat([per_token(row, types, batch.input_ids.shape[1]) for row in batch.model_inputs])
    if batch.routed_experts is not None:
        inputs["routed_experts"] = batch.routed_experts
    return inputs, rows, before


def packed_row(batch: Batch, rows: Tensor, before: Tensor) -> tuple[dict, Tensor, Tensor]:
    """As `pack`, all completions behind their shared prompts in one row."""
    lengths, axes = batch.attention_mask.sum(1).long().tolist(), positions_of(batch)  # axes: [axes, B, T]
    prefixes, firsts, length = torch.zeros(len(batch)).long(), torch.arange(len(batch)), batch.input_ids.shape[1]
    segments, places, images = [], [], []  # places: of each segment's tokens among the batch's, row by row
    for members in sharing(batch):
        prefix, front = shared_prefix(batch, members), None
        prefixes[members], firsts[members] = prefix, members[0]  # the first row's prompt stands for all
        if prefix:
            front = len(segments)
            segments.append((prefix, None))
            places.append(torch.arange(prefix) + members[0] * length)
        images += [batch.model_inputs[members[0]]] if batch.model_inputs else []
        for member in members:
            if size := lengths[member] - prefix:
                segments.append((size, front))
                places.append(torch.arange(prefix, lengths[member]) + member * length)
    place = torch.cat(places)  # [L]
    columns = torch.zeros_like(batch.input_ids).flatten().index_put((place,), torch.arange(len(place)))  # [B * T]
    inputs = {"input_ids": batch.input_ids.flatten()[place][None], "segments": segments}
    inputs |= {"attention_mask": torch.ones_like(inputs["input_ids"])}  # [1, L]
    positions = axes.flatten(1)[:, None, place]  # [axes, 1, L]
    inputs |= {"position_ids": positions if len(axes) > 1 else positions[0]}
    inputs |= join_inputs(images)
    if batch.routed_experts is not None:
        inputs["routed_experts"] = batch.routed_experts.flatten(0, 1)[place][None]
    source = torch.where(before < prefixes[rows], firsts[rows], rows)  # [N]
    return inputs, torch.zeros_like(rows), columns[source * length + before]


def micro_batches(batch: Batch, cfg: TrainConfig, learning: list[bool] | None = None) -> list[list[int]]:
    """Row numbers of each forward pass. A pass has at most --tokens_per_microbatch tokens, padding included, unless one
    row alone has more. All ranks have equally many passes, the first ones empty where a rank needs fewer: FSDP's
    collectives would hang otherwise.

    A group stays together if it fits, since its rows share their prompt. Plain rows of a pass are of similar length.
    Rows that are `learning` (unset: all) come last, in passes of their own.
    """
    batch = on_host(batch)
    lengths, learning = batch.attention_mask.sum(1).long().tolist(), learning or [True] * len(batch)
    groups = sharing(batch) if cfg.shared_prefix else [[row] for row in range(len(batch))]
    prefixes = [shared_prefix(batch, rows) if cfg.shared_prefix else 0 for rows in groups]
    limit = cfg.tokens_per_microbatch or 16384
    units = [unit for rows, n in zip(groups, prefixes, strict=True) for unit in parts_that_fit(rows, n, lengths, limit)]
    passes = first_fit(units, learning, limit, cfg.shared_prefix)
    return [[]] * (int(utils.all_max(len(passes))) - len(passes)) + passes[::-1]


def parts_that_fit(rows: list[int], prefix: int, lengths: list[int], limit: int) -> Iterator[tuple[int, list[int]]]:
    """(tokens, rows) of the parts into which a group is cut so that each fits a pass, prompt included."""
    size, part = 0, []
    for row in rows:
        extra = lengths[row] - prefix
        if part and size + extra > limit:
            yield size, part
            part = []
        size = size + extra if part else lengths[row]
        part = part + [row]
    yield size, part


def first_fit(units: list[tuple[int, list[int]]], learning: list[bool], limit: int, packed: bool) -> list[list[int]]:
    """Rows of each pass, those that learn first. First fit: from the largest unit on, each goes into the first pass
    with room for it."""
    passes: list[list[tuple]] = []  # of (whether it learns, tokens, rows)
    for unit in sorted([(any(learning[row] for row in rows), size, rows) for size, rows in units], reverse=True):
        for packed_units in passes:
            learns, longest, _ = packed_units[0]
            tokens = sum(size for _, size, _ in [*packed_units, unit]) if packed else longest * (len(packed_units) + 1)
            if learns == unit[0] and tokens <= limit:
                packed_units.append(unit)
                break
        else:
            passes.append([unit])
    return [[row for *_, rows in packed_units for row in rows] for packed_units in passes]


def minibatches(batch: Batch, cfg: TrainConfig) -> list[Batch]:
    """The step's rows in num_minibatches parts of whole groups, equally many on every rank. Where groups failed, a part
    may be a row that counts for nothing."""
    members, number = runs(batch.groups), cfg.num_minibatches
    bounds = [k * len(members) // number for k in range(number + 1)]
    parts = [sum(members[start:end], []) for start, end in zip(bounds, bounds[1:], strict=False)]
    return [batch.select(rows) for rows in parts]


# ---- over ranks ------------------------------------------------------------------------------------------------------


def balanced_groups(groups: list[list]) -> tuple[list[list], dict]:
    """Exchange groups of trajectories so that ranks have about as many tokens each: all wait for the one with most.
    Returns this rank's groups, and metrics: tokens of that rank over the mean, before and after. Collective.

    Groups are placed from the largest on: each stays on its rank as long as that has no more than the mean, else it
    goes to the emptiest rank. The gradient does not depend on where a group is computed.
    """
    if utils.world_size() == 1:
        return groups, {}
    sizes = utils.gather_objects([sum(len(t.prompt_ids) + len(t.token_ids) for t in group) for group in groups])
    mean, loads, rank = sum(map(sum, sizes)) / len(sizes) or 1, [0] * len(sizes), torch.distributed.get_rank()
    owners: dict[tuple[int, int], int] = {}  # (rank, place) of each group: the rank that gets it
    sized_groups = ((n, home, place) for home, counts in enumerate(sizes) for place, n in enumerate(counts))
    for tokens, home, place in sorted(sized_groups, reverse=True):
        stays = loads[home] + tokens <= mean or loads[home] == min(loads)
        owners[home, place] = to = home if stays else loads.index(min(loads))
        loads[to] += tokens
    sent = utils.gather_objects({place: groups[place] for (home, place), to in owners.items() if home == rank != to})
    my_groups = sorted(group for group, to in owners.items() if to == rank)
    groups_here = [(groups if home == rank else sent[home])[place] for home, place in my_groups]
    return groups_here, {"ranks/tokens_before": max(map(sum, sizes)) / mean, "ranks/tokens_after": max(loads) / mean}
