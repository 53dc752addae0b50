"""Attention of packed rows: each completion sees its prompt and itself.

    row        p p p a a b b b q q c c                      two groups: completions a and b of p, completion c of q
    segments   (3, None) (2, 0) (3, 0) (2, None) (2, 3)     size, and the number of the prompt's segment, seen as well

The queries of a segment get the keys of its prompt and its own, as in a plain row, and the mask that the model's mask
function gives their places in that plain row. So windows, chunks, sinks and capped scores remain the model's, and only
the pairs of plain rows are computed. On CPUs this is a loop over the segments, on GPUs one call of a kernel for
segments of different lengths. When a run starts it tries whether its model takes packed rows (agreement.py).
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import utils

PACKED = "packed, "  # prefix, in a config, to the name of the attention that computes the segments
# Fewer heads of keys than of queries: torch 2.11 takes them without a flag, later versions need one.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}

Segment = tuple[int, int | None]


@dataclass
class PackedRow:
    segments: list[Segment]
    device: torch.device

    @cached_property
    def sizes(self) -> list[int]:
        return [size for size, _ in self.segments]

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """(tokens of the segment, tokens of the prompt in front of it) of each segment."""
        return [(size, 0 if front is None else self.sizes[front]) for size, front in self.segments]

    @cached_property
    def for_kernel(self) -> tuple[Tensor, Tensor, Tensor]:
        """Places of the keys that the segments see, one segment after the other, [K]; then the bounds of the segments
        among the queries, and among these keys, [S + 1] int32 each."""
        places = torch.arange(sum(self.sizes)).split(self.sizes)
        keys = [place for n, (_, front) in enumerate(self.segments) for place in (front, n) if place is not None]
        ends = torch.tensor([[0, 0], *((size, size + front) for size, front in self.shapes)]).cumsum(0).int()
        return tuple(utils.upload(x.contiguous(), self.device) for x in (torch.cat([places[n] for n in keys]), *ends.T))


@dataclass
class PackedMask:
    """What the attention of a packed row gets in place of a mask tensor.

    sees: transformers' mask function of this kind of layer, (batch, head, place of a query, place of a key) -> whether
    the query sees the key. local_size: transformers' size of a window or chunk. dtype: of additive masks; None: masks
    are bool, and None where they are causal.
    """

    row: PackedRow
    sees: Callable
    local_size: int | None
    dtype: torch.dtype | None

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=torch.long)
        return self.sees(zero, zero, queries[:, None], keys).expand(len(queries), len(keys))

    @cached_property
    def masks(self) -> list[Tensor | None]:
        """[1, 1, size, size in front + size] of each segment."""
        mask_by_shape = {}
        for size, front in dict.fromkeys(self.row.shapes):
            places = torch.arange(front + size)
            mask = self.seen(places[front:], places)
            if self.dtype is not None:
                mask = torch.zeros(mask.shape, dtype=self.dtype).masked_fill(~mask, torch.finfo(self.dtype).min)
            elif not front and torch.equal(mask, torch.ones_like(mask).tril()):
                mask_by_shape[size, front] = None  # sdpa is causal by itself, in half the time
                continue
            mask_by_shape[size, front] = utils.upload(mask[None, None], self.row.device)
        return [mask_by_shape[shape] for shape in self.row.shapes]

    @cached_property
    def window(self) -> int:
        """How many tokens a token sees, itself included; 0: all. ValueError for another kind of mask."""
        window = self.local_size or 0
        query, keys, visible = (2 * window, [window, window + 1], [False, True]) if window else (2**20, [0], [True])
        if self.seen(torch.tensor([query]), torch.tensor(keys))[0].tolist() != visible:
            raise ValueError("a layer's mask is neither causal nor a window")
        return window


PACKING: ContextVar[PackedRow | None] = ContextVar("packing", default=None)


@contextlib.contextmanager
def packed(segments: list[Segment] | None, device: torch.device) -> Iterator[None]:
    """Within this context the model computes a packed row; plain rows if `segments` is None."""
    token = PACKING.set(segments and PackedRow(segments, device))
    try:
        yield
    finally:
        PACKING.reset(token)


# ---- what transformers calls -----------------------------------------------------------------------------------------


def take_packed_rows(hf_model: nn.Module, takes: bool = True) -> None:
    """Have the model's text part take packed rows as well as plain ones, or, with takes=False, plain ones alone."""
    for config in (hf_model.get_decoder().config, hf_model.config.get_text_config()):
        name = (config._attn_implementation or "eager").removeprefix(PACKED).replace("varlen", "flash_attention")
        packed_name = PACKED + name.replace("flash_attention", "varlen")  # transformers looks for "flash" in names
        AttentionInterface.register(packed_name, partial(attend, name=name))
        AttentionMaskInterface.register(packed_name, partial(mask_of, name=name))
        config._attn_implementation = packed_name if takes else name


def mask_of(*args, name: str, **options) -> Tensor | PackedMask | None:
    """transformers' mask interface."""
    row = PACKING.get()
    if row is None or "allow_is_bidirectional_skip" in options:  # the latter: an image tower
        return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, **options)
    if options.get("use_vmap"):
        raise ValueError("its masks do not follow from places in a row alone")
    dtype = options["dtype"] if name == "eager" else None
    return PackedMask(row, options["mask_function"], options.get("local_size"), dtype)


@torch.compiler.disable  # else torch would compile it anew for every list of segments
def attend(module, query, key, value, attention_mask, scaling=None, *, name: str, **options) -> tuple[Tensor, None]:
    """transformers' attention interface.  query [R, heads, L, D], key, value [R, kv heads, L, D] -> [R, L, heads, D]

    name: the model's attention, which computes plain rows and the segments of packed ones.
    """
    # For "eager" each family has its own function, in the file of its classes.
    family = sys.modules[type(module).__module__]
    compute = family.eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    if not isinstance(attention_mask, PackedMask):
        return compute(module, query, key, value, attention_mask, scaling=scaling, **options)
    if torch.is_autocast_enabled(query.device.type):  # it casts sdpa's arguments, not those of other kernels
        query, key, value = (x.to(torch.get_autocast_dtype(query.device.type)) for x in (query, key, value))
    if name not in ("sdpa", "eager") or (query.is_cuda and query.dtype != torch.float32):
        if name == "eager" or any(options.get(name) is not None for name in ("s_aux", "softcap")):
            raise ValueError("the kernel for packed rows has neither attention sinks nor capped scores")
        return attend_in_one_call(query, key, value, attention_mask, scaling), None
    queries, keys, values = (x.split(attention_mask.row.sizes, 2) for x in (query, key, value))
    parts = []
    for number, (_, front) in enumerate(attention_mask.row.segments):
        visible = [place for place in (front, number) if place is not None]
        k, v = (torch.cat([x[place] for place in visible], 2) for x in (keys, values))
        out, _ = compute(module, queries[number], k, v, attention_mask.masks[number], scaling=scaling, **options)
        parts.append(out)  # [1, size, heads, D]
    return torch.cat(parts, 1), None


def attend_in_one_call(query, key, value, mask: PackedMask, scaling: float | None) -> Tensor:
    """All segments at once, for GPUs. A prompt's keys are passed once per completion, as in plain rows. Where a segment
    has more keys than queries, its last query sees its last key."""
    places, *ends = mask.row.for_kernel
    scaling, width = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    # In multi-head latent attention values are narrower than keys. The kernels want one width, a multiple of 8.
    padded_width = -(-query.shape[-1] // 8) * 8
    query, key, value = (pad(x, (0, padded_width - x.shape[-1]))[0].transpose(0, 1) for x in (query, key, value))
    # In fp32, so that the gradient of a prompt's keys is summed over its completions in fp32.  [K, kv heads, D]
    key, value = (x.float().index_select(0, places).to(x.dtype) for x in (key, value))
    longest = [max(size for size, _ in mask.row.shapes), max(map(sum, mask.row.shapes))]
    kwargs = dict(scale=scaling, window_size=(mask.window - 1 if mask.window else -1, 0), **GROUPED)
    out = varlen.varlen_attn(query, key, value, *ends, *longest, **kwargs)  # [L, heads, D]
    return out[None, :, :, :width]
