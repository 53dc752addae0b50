"""How a Batch is cut into forward passes: rows of a group packed behind their shared prompt, passes by a token budget.

Nothing here changes the gradient; tests/test_gradient.py says so. Its callers know `pack` and `micro_batches`.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

import utils
from batch import Batch
from config import TrainConfig
from inputs.prompts import FOLLOWED_BY, join_inputs


def why_not_shared(hf_model: nn.Module, cfg: TrainConfig) -> str | None:
    """Why prompts cannot be computed once per group for this model, or None if they can."""
    config = hf_model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"layers of type {', '.join(sorted(kinds - {'full_attention'}))} take no free-form attention mask"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "sliding-window attention takes no free-form attention mask"
    if hf_model.config.model_type in FOLLOWED_BY:
        return f"{hf_model.config.model_type} makes its own mask, in which images see themselves in both directions"
    if cfg.attn_implementation not in ("sdpa", "eager"):
        return f"--attn_implementation {cfg.attn_implementation} takes no free-form attention mask; sdpa does"
    return None


def on_host(batch: Batch) -> Batch:
    """The batch with what packing looks at on the CPU: else the GPU would be waited for at every prompt."""
    names = ("input_ids", "attention_mask", "loss_mask", "groups")
    return replace(batch, **{name: getattr(batch, name).cpu() for name in names})


def runs(groups: Tensor) -> list[list[int]]:
    """Adjacent rows of one group together: [5, 5, 7] -> [[0, 1], [2]]"""
    _, counts = groups.unique_consecutive(return_counts=True)
    return [list(range(end - n, end)) for end, n in zip(counts.cumsum(0).tolist(), counts.tolist(), strict=True)]


def sharing(batch: Batch) -> list[list[int]]:
    """`runs` of rows that can share a prompt: those of a group whose images are the prompt's alone. A row with images
    of its own, from a tool or an environment, stands by itself."""
    inputs = batch.model_inputs
    split = []
    for members in runs(batch.groups):
        same = not inputs or all(inputs[row].keys() == inputs[members[0]].keys() for row in members)
        same = same and (not inputs or all(inputs[r][k] is v for r in members for k, v in inputs[members[0]].items()))
        split += [members] if same else [[row] for row in members]
    return split


def shared_prefix(batch: Batch, members: list[int]) -> int:
    """How many leading tokens these rows share before any of them was sampled."""
    sampled = batch.loss_mask[members]
    before = torch.where(sampled.any(1), sampled.argmax(1), batch.attention_mask[members].sum(1)).min().int()
    same = (batch.input_ids[members] == batch.input_ids[members[0]]).all(0)[:before]
    return int(same.cumprod(0).sum())


def positions_of(batch: Batch) -> Tensor:
    """Position of every token: counted, or, where images give a prompt positions on several axes, those and counted
    on from the largest.  [axes, B, T], 1 or 3 axes"""
    counted = (batch.attention_mask.long().cumsum(1) - 1).clamp(min=0)[None]  # [1, B, T]
    given = {row: inputs["position_ids"] for row, inputs in enumerate(batch.model_inputs) if "position_ids" in inputs}
    if not given:
        return counted
    positions = counted.repeat(3, 1, 1)
    for row, prompt in given.items():
        n = prompt.shape[-1]
        positions[:, row, :n] = prompt[:, 0]
        positions[:, row, n:] = prompt.max() + 1 + torch.arange(positions.shape[-1] - n, device=positions.device)
    return positions


def token_types(batch: Batch) -> Tensor:
    """Which tokens belong to an image or a prompt, for models that make their own mask of it.  [B, T]"""
    types = torch.zeros_like(batch.input_ids)
    for row, inputs in enumerate(batch.model_inputs):
        if "token_type_ids" in inputs:
            given = inputs["token_type_ids"][0]
            types[row] = given[-1]
            types[row, : len(given) - 1] = given[:-1]
    return types


def with_blank(inputs: dict, blank: dict) -> dict:
    """A pass's inputs with one more row that holds an image, if none does: the vision part must run on every rank, or
    the collectives of the others wait for it. Nothing of the row counts.  [R, L] -> [R + 1, max(L, its length)]"""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if blank.keys() - {"input_ids", "position_ids", "token_type_ids"} <= inputs.keys():
        return inputs
    n = blank["input_ids"].shape[1]
    length = max(ids.shape[1], n)
    more = length - ids.shape[1]
    blank = {key: value.to(ids.device) for key, value in blank.items()}
    padded = nn.functional.pad(ids, (0, more, 0, 1))
    padded[-1, :n] = blank["input_ids"][0]
    if "position_ids" in inputs or "position_ids" in blank:
        given = inputs.get("position_ids", (mask.cumsum(1) - 1).clamp(min=0) if mask.ndim == 2 else None)
        given = given if given.ndim == 3 else given[None]  # [axes, R, L]
        own = blank.get("position_ids", torch.arange(n, device=ids.device).view(1, 1, n))
        given = nn.functional.pad(given.expand(max(len(given), len(own)), -1, -1), (0, more, 0, 1))
        given[:, -1, :n] = own[:, 0]
        blank["position_ids"] = given if len(given) > 1 else given[0]
    if "token_type_ids" in inputs or "token_type_ids" in blank:
        types = nn.functional.pad(inputs.get("token_type_ids", torch.zeros_like(ids)), (0, more, 0, 1))
        types[-1, :n] = blank["token_type_ids"][0, :n]
        blank["token_type_ids"] = types
    if mask.ndim == 2:
        mask = nn.functional.pad(mask, (0, more, 0, 1))
        mask[-1, :n] = 1
    else:  # [R, 1, L, L] of bool, or added to the scores; what is filled up sees itself, or softmax would give nan
        seen, unseen = (True, False) if mask.dtype == torch.bool else (0.0, torch.finfo(mask.dtype).min)
        mask = nn.functional.pad(mask, (0, more, 0, more, 0, 0, 0, 1), value=unseen)
        mask[-1, 0] = torch.where(torch.ones(length, length, device=ids.device).tril() > 0, seen, unseen)
        mask[:, 0].diagonal(dim1=1, dim2=2).fill_(seen)
    return blank | {"input_ids": padded, "attention_mask": mask}


def pack(batch: Batch, cfg: TrainConfig) -> tuple[dict, Tensor, Tensor, Tensor]:
    """A forward pass's inputs and, for each sampled token in row-major order, the place that predicts it.

    A group becomes one packed row [prompt | completion 1 | ... | completion G]; positions restart after the prompt and
    a completion sees the prompt and itself:   p p a a b   positions 0 1 2 3 2   segments 0 0 1 1 2
    Images of the prompt come once a group.  Returns inputs [R, L], rows [N], columns [N], targets [N].
    """
    device, batch = batch.input_ids.device, on_host(batch)
    rows, places = batch.loss_mask.nonzero(as_tuple=True)  # [N] each
    before, targets = places - 1, batch.input_ids[rows, places].to(device)  # [N] each
    axes = positions_of(batch)  # [axes, B, T]
    if not cfg.shared_prefix:
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.long()}
        inputs |= join_inputs(batch.model_inputs)
        if len(axes) > 1:
            inputs["position_ids"] = axes
        if any("token_type_ids" in row for row in batch.model_inputs):
            inputs["token_type_ids"] = token_types(batch)
        return {name: x.to(device) for name, x in inputs.items()}, rows.to(device), before.to(device), targets
    lengths = batch.attention_mask.sum(1).long().tolist()
    packed, row_of, prefix_of, shift_of, images = [], [], [], [], []
    for members in sharing(batch):
        prefix = shared_prefix(batch, members)
        pieces = [(members[0], slice(0, prefix), 0)]  # row, tokens, segment
        end = prefix
        images += [batch.model_inputs[members[0]]] if batch.model_inputs else []
        for segment, member in enumerate(members, 1):
            pieces.append((member, slice(prefix, lengths[member]), segment))
            row_of.append(len(packed))
            prefix_of.append(prefix)
            shift_of.append(end - prefix)  # token t of this completion stands in column t + shift
            end += lengths[member] - prefix
        packed.append(pieces)
    length = max(sum(span.stop - span.start for _, span, _ in pieces) for pieces in packed)
    input_ids = torch.zeros(len(packed), length, dtype=torch.long)  # [R, L]
    positions = torch.zeros(len(axes), len(packed), length, dtype=torch.long)  # [axes, R, L]
    segments = torch.full_like(input_ids, -1)
    for row, pieces in enumerate(packed):
        end = sum(span.stop - span.start for _, span, _ in pieces)
        input_ids[row, :end] = torch.cat([batch.input_ids[member, span] for member, span, _ in pieces])
        positions[:, row, :end] = torch.cat([axes[:, member, span] for member, span, _ in pieces], dim=1)
        segments[row, :end] = torch.cat([torch.full_like(batch.input_ids[m, span], n) for m, span, n in pieces])
    input_ids, positions, segments = (x.to(device) for x in (input_ids, positions, segments))
    order = torch.arange(length, device=device)
    visible = (segments[:, None] == 0) | (segments[:, None] == segments[:, :, None])  # [R, query, key]
    mask = (visible & (order[None] <= order[:, None]))[:, None]  # [R, 1, L, L]
    if cfg.attn_implementation == "eager":  # adds its mask
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    row_of, prefix_of, shift_of = (torch.tensor(x)[rows] for x in (row_of, prefix_of, shift_of))  # [N]
    columns = torch.where(before < prefix_of, before, before + shift_of)
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    inputs["position_ids"] = positions if len(axes) > 1 else positions[0]
    return inputs | join_inputs(images, device), row_of.to(device), columns.to(device), targets


def micro_batches(batch: Batch, cfg: TrainConfig, learning: list[bool] | None = None) -> list[list[int]]:
    """Row numbers of each forward pass, at most --tokens_per_microbatch tokens with padding; as many on every rank.

    Groups stay together while they fit, since they share their prompt. Rows of a pass are alike in length; those that
    are `learning` (unset: all) come last. A rank with fewer passes gets empty ones first: FSDP's collectives would wait
    for each other.
    """
    batch = on_host(batch)
    lengths, limit = batch.attention_mask.sum(1).long().tolist(), cfg.tokens_per_microbatch or 16384
    units: list[tuple[int, list[int]]] = []  # (tokens, rows) of what becomes one packed row
    for members in sharing(batch) if cfg.shared_prefix else [[row] for row in range(len(batch))]:
        prefix, size, rows = shared_prefix(batch, members), 0, []
        for member in members:
            extra = lengths[member] - prefix
            if rows and size + extra > limit:
                units.append((size, rows))
                rows = []
            size = size + extra if rows else lengths[member]
            rows = rows + [member]
        units.append((size, rows))
    passes: list[list[int]] = []
    longest = used = 0
    learning = learning or [True] * len(batch)
    for size, rows in sorted(units, key=lambda unit: (any(learning[row] for row in unit[1]), unit), reverse=True):
        longest = max(longest, size)
        if passes and (used + 1) * longest <= limit:
            passes[-1] += rows
            used += 1
        else:
            passes.append(list(rows))
            longest, used = size, 1
    return [[]] * (int(utils.all_max(len(passes))) - len(passes)) + passes[::-1]


def minibatches(batch: Batch, cfg: TrainConfig) -> list[Batch]:
    """The step's rows in num_minibatches parts of whole groups, as many on every rank: where groups failed, a part may
    be a row that counts for nothing."""
    members, number = runs(batch.groups), cfg.num_minibatches
    bounds = [k * len(members) // number for k in range(number + 1)]
    parts = [sum(members[start:end], []) for start, end in zip(bounds, bounds[1:], strict=False)]
    selected = [batch.select(rows or [0]) for rows in parts]
    for rows, part in zip(parts, selected, strict=True):
        if not rows:
            part.loss_mask = torch.zeros_like(part.loss_mask)
            if part.advantages is not None:  # a critic learns before there are any
                part.advantages = torch.zeros_like(part.advantages)
    return selected
