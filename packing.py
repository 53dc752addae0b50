"""How a Batch is cut into forward passes: rows of a group packed behind their shared prompt, passes by a token budget.

Nothing here changes the gradient; tests/test_gradient.py says so. Its callers know `pack` and `micro_batches`.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import utils
from config import TrainConfig

if TYPE_CHECKING:
    from train_grpo import Batch


def why_not_shared(hf_model: nn.Module, cfg: TrainConfig) -> str | None:
    """Why prompts cannot be computed once per group for this model, or None if they can."""
    config = hf_model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"layers of type {', '.join(sorted(kinds - {'full_attention'}))} take no free-form attention mask"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return "sliding-window attention takes no free-form attention mask"
    if cfg.attn_implementation not in ("sdpa", "eager"):
        return f"--attn_implementation {cfg.attn_implementation} takes no free-form attention mask; sdpa does"
    return None


def runs(groups: Tensor) -> list[list[int]]:
    """Adjacent rows of one group together: [5, 5, 7] -> [[0, 1], [2]]"""
    _, counts = groups.unique_consecutive(return_counts=True)
    return [list(range(end - n, end)) for end, n in zip(counts.cumsum(0).tolist(), counts.tolist(), strict=True)]


def shared_prefix(batch: "Batch", members: list[int]) -> int:
    """How many leading tokens these rows share before any of them was sampled."""
    sampled = batch.loss_mask[members]
    before = torch.where(sampled.any(1), sampled.argmax(1), batch.attention_mask[members].sum(1)).min().int()
    same = (batch.input_ids[members] == batch.input_ids[members[0]]).all(0)[:before]
    return int(same.cumprod(0).sum())


def pack(batch: "Batch", cfg: TrainConfig) -> tuple[dict, Tensor, Tensor, Tensor]:
    """A forward pass's inputs and, for each sampled token in row-major order, the place that predicts it.

    A group becomes one packed row [prompt | completion 1 | ... | completion G]; positions restart after the prompt and
    a completion sees the prompt and itself:   p p a a b   positions 0 1 2 3 2   segments 0 0 1 1 2
    Returns inputs [R, L], rows [N], columns [N], targets [N].
    """
    device, where = batch.input_ids.device, batch.loss_mask.nonzero()  # [N, 2]
    rows, before, targets = where[:, 0], where[:, 1] - 1, batch.input_ids[where[:, 0], where[:, 1]]  # [N] each
    if not cfg.shared_prefix or any(batch.model_inputs):
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.long()}
        for key in batch.model_inputs[0] if batch.model_inputs else ():
            inputs[key] = torch.cat([row[key] for row in batch.model_inputs])
        return inputs, rows, before, targets
    lengths = batch.attention_mask.sum(1).long().tolist()
    packed, row_of, prefix_of, shift_of = [], [], [], []
    for members in runs(batch.groups):
        prefix = shared_prefix(batch, members)
        pieces = [(batch.input_ids[members[0], :prefix], torch.arange(prefix), 0)]  # ids, positions, segment
        end = prefix
        for segment, member in enumerate(members, 1):
            pieces.append(
                (batch.input_ids[member, prefix : lengths[member]], torch.arange(prefix, lengths[member]), segment)
            )
            row_of.append(len(packed))
            prefix_of.append(prefix)
            shift_of.append(end - prefix)  # token t of this completion stands in column t + shift
            end += lengths[member] - prefix
        packed.append(pieces)
    length = max(sum(len(ids) for ids, _, _ in pieces) for pieces in packed)
    input_ids, positions = torch.zeros(2, len(packed), length, dtype=torch.long, device=device).unbind()  # [R, L]
    segments = torch.full_like(input_ids, -1)
    for row, pieces in enumerate(packed):
        end = sum(len(ids) for ids, _, _ in pieces)
        input_ids[row, :end] = torch.cat([ids for ids, _, _ in pieces])
        positions[row, :end] = torch.cat([position for _, position, _ in pieces]).to(device)
        segments[row, :end] = torch.cat([torch.full((len(ids),), segment) for ids, _, segment in pieces]).to(device)
    order = torch.arange(length, device=device)
    visible = (segments[:, None] == 0) | (segments[:, None] == segments[:, :, None])  # [R, query, key]
    mask = (visible & (order[None] <= order[:, None]))[:, None]  # [R, 1, L, L]
    if cfg.attn_implementation == "eager":  # adds its mask
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    row_of, prefix_of, shift_of = (torch.tensor(x, device=device)[rows] for x in (row_of, prefix_of, shift_of))  # [N]
    columns = torch.where(before < prefix_of, before, before + shift_of)
    return {"input_ids": input_ids, "attention_mask": mask, "position_ids": positions}, row_of, columns, targets


def micro_batches(batch: "Batch", cfg: TrainConfig) -> list[list[int]]:
    """Row numbers of each forward pass, at most --tokens_per_microbatch tokens with padding; as many on every rank.

    Groups stay together while they fit, since they share their prompt. Longest first, so that rows of a pass are alike
    in length. A rank with fewer passes gets empty ones: FSDP's collectives would wait for each other.
    """
    lengths, limit = batch.attention_mask.sum(1).long().tolist(), cfg.tokens_per_microbatch
    units: list[tuple[int, list[int]]] = []  # (tokens, rows) of what becomes one packed row
    for members in runs(batch.groups) if cfg.shared_prefix else [[row] for row in range(len(batch))]:
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
    for size, rows in sorted(units, reverse=True):
        if passes and (used + 1) * longest <= limit:
            passes[-1] += rows
            used += 1
        else:
            passes.append(list(rows))
            longest, used = size, 1
    return passes + [[]] * (int(utils.all_max(len(passes))) - len(passes))


def minibatches(batch: "Batch", cfg: TrainConfig) -> list["Batch"]:
    """The step's rows in num_minibatches parts of whole groups."""
    members = runs(batch.groups)
    size = math.ceil(len(members) / cfg.num_minibatches)
    return [batch.select(sum(members[i : i + size], [])) for i in range(0, len(members), size)]
