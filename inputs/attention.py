"""Attention of packed rows: each completion sees its prompt and itself, and only those pairs are computed.

    row        p p p a a b b b p p c c       two groups; completions a and b of one prompt, c of another
    segments   (0, 3, 0, 0) (3, 5, 0, 3) (5, 8, 0, 3) (8, 10, 0, 0) (10, 12, 8, 10)

A segment is (start, stop, prefix start, prefix stop): its tokens see the prefix and, causally, one another. The table
of segments travels in place of the attention mask, which would have L x L entries. G completions of c tokens behind a
prompt of p tokens take p^2 / 2 + G c (p + c / 2) pairs, of G (p + c)^2 / 2 in plain rows, and memory linear in L.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from config import ConfigError
from inputs.backbone import text_model

NAME = "shared_prefix"  # of this attention among transformers' implementations

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# ---- which attention a model has -------------------------------------------------------------------------------------


@cache
def source_of(kind: type) -> str:
    """Of the module that a model's class stands in. transformers, too, reads there whether a model's attention can be
    chosen at all (`_can_set_attn_implementation`): no class says so."""
    try:
        return inspect.getsource(sys.modules[kind.__module__])
    except (KeyError, OSError, TypeError):
        return ""


def makes_own_mask(kind: type) -> bool:
    """Whether attention masks are made of the values. sdpa is then given one where it would have had none and been
    causal by itself, and sees what comes later."""
    call = r"attention_interface\(\s*self,\s*\w+,\s*\w+,\s*\w+,\s*(?:attention_mask=)?(\w+)"
    source = source_of(kind)
    return any(re.search(rf"\b{name} = self\.\w+\(", source) for name in set(re.findall(call, source)))


def takes_any(kind: type) -> bool:
    """Whether a model of this class hands its mask on to whatever attention it is set to, and asks for no name."""
    named = re.search(r"_attn_implementation (==|!=|in|not in)\b", source_of(kind))
    return kind._can_set_attn_implementation() and not makes_own_mask(kind) and not named


def supported(kind: type) -> list[str]:
    """What --attn_implementation can be for a model of this class, the best first."""
    names = ["sdpa"] if kind._supports_sdpa and not makes_own_mask(kind) else []
    names += ["eager", *(f"flash_attention_{number}" for number in (2, 3, 4) if kind._supports_flash_attn)]
    return names + (["flex_attention"] if kind._supports_flex_attn else [])


@contextlib.contextmanager
def attention_of(wanted: str, kind: type) -> Iterator[str | None]:
    """What a model of this class is to be loaded with: what is wanted, or for "auto" None, with which transformers
    chooses sdpa for each part that has it, and else eager. ConfigError where the class has no such attention, or it
    is not installed."""
    known = supported(kind)
    refused = f"--attn_implementation={wanted}: {kind.__name__} has {', '.join(known)}; auto takes {known[0]}"
    if wanted not in ("auto", *known) and "/" not in wanted:  # owner/name: a kernel of the hub
        raise ConfigError(f"{refused}.")
    try:
        yield ("eager" if makes_own_mask(kind) else None) if wanted == "auto" else wanted
    except ImportError as error:
        reason = re.split(r"(?<=[a-z)])[.;:]? (?:Please|You)|\n", str(error))[0].rstrip(".")
        raise ConfigError(f"{refused} ({reason}).") from error


def chosen(wanted: str, hf_model: nn.Module) -> str:
    """--attn_implementation, or for "auto" what the model's text part was loaded with."""
    if wanted != "auto":
        return wanted
    name = text_model(hf_model).config._attn_implementation or "eager"
    if not name.startswith(NAME):
        return name
    number = name.removeprefix(NAME).removeprefix("_")  # see use_shared_attention
    return f"flash_attention_{number}" if number else "sdpa"


# ---- packed rows -----------------------------------------------------------------------------------------------------


def use_shared_attention(model: nn.Module, implementation: str) -> None:
    """From now on the model takes a table of segments [1, 1, S, 4] as its attention mask, and others as sdpa does.

    implementation: "sdpa", or one of transformers' that are called flash_attention_..., whose kernel is taken then.
    """
    number = implementation.removeprefix("flash_attention_")  # by "flash" in a name vision towers would take it for one
    name = NAME if implementation == "sdpa" else f"{NAME}_{number}"
    AttentionInterface.register(name, partial(attend, implementation=implementation))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])  # which hands on what is 4-D
    model.set_attn_implementation(name)


@dataclass
class Layout:
    """Segments as the kernels want them."""

    pieces: list[tuple[slice, slice]]  # for the CPU: queries and the keys they see; causal if the two are equal
    keys: Tensor  # [K] for the GPU: each segment's prefix and itself, one after the other
    query_ends: Tensor  # [S + 1] int32: where segments begin and end among the queries,
    key_ends: Tensor  # [S + 1] int32: and among `keys`
    longest: tuple[int, int]  # segment, in queries and in keys


@lru_cache(maxsize=2)  # the layers of a model are given the same tensor
def layout_of(table: Tensor) -> Layout:
    """table: [1, 1, S, 4]"""
    segments, device = table[0, 0].tolist(), table.device
    pieces = [(slice(start, stop), slice(start, stop)) for start, stop, _, _ in segments]
    for prefix, members in groupby((s for s in segments if s[3] > s[2]), key=lambda s: slice(*s[2:])):
        members = list(members)  # completions of one prompt are neighbours
        pieces.append((slice(members[0][0], members[-1][1]), prefix))
    keys = torch.cat([torch.cat([torch.arange(c, d), torch.arange(a, b)]) for a, b, c, d in segments])
    sizes = torch.tensor([[0, 0], *([b - a, b - a + d - c] for a, b, c, d in segments)])  # [S + 1, 2]
    ends = sizes.cumsum(0).int().T.contiguous().to(device)  # [2, S + 1]
    return Layout(pieces, keys.to(device), *ends, tuple(sizes.amax(0).tolist()))


@torch.compiler.disable  # else every table of segments would be compiled for itself
def attend(
    module, query, key, value, attention_mask, scaling=None, *, implementation="sdpa", **options
) -> tuple[Tensor, None]:
    """transformers' attention interface.  query [1, heads, L, D], key, value [1, kv heads, L, D] -> [1, L, heads, D]"""
    if attention_mask is None or attention_mask.dtype != torch.int64:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **options)
    if torch.is_autocast_enabled(device := query.device.type):  # casts sdpa's arguments, but knows nothing of kernels
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    width = value.shape[-1]  # of multi-head latent attention narrower than a key; the kernels want one width
    value = pad(value, (0, query.shape[-1] - width))
    layout = layout_of(attention_mask)
    if query.is_cuda or implementation != "sdpa":
        out = attend_in_one_call(query, key, value, layout, scaling, implementation)
    else:
        out = Pieces.apply(query, key, value, layout, scaling)
    return out.transpose(1, 2)[..., :width], None


def attend_in_one_call(query, key, value, layout: Layout, scale: float | None, implementation: str = "sdpa") -> Tensor:
    """All segments at once, for GPUs. A prompt's keys are given once per completion, as in plain rows; where there are
    more keys than queries, "causal" lets the last query see the last key (flash-attn: from 2.1 on)."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers.modeling_flash_attention_utils import _flash_attention_forward

    def give(x):  # in fp32, so that the gradient of a prompt's keys is summed over completions in fp32
        return x[0].transpose(0, 1).float().index_select(0, layout.keys).to(x.dtype)  # [K, kv heads, D]

    queries, keys, values = query[0].transpose(0, 1), give(key), give(value)
    if implementation == "sdpa":
        ends, options = (layout.query_ends, layout.key_ends), dict(scale=scale, window_size=(-1, 0), enable_gqa=True)
        out = varlen_attn(queries, keys, values, *ends, *layout.longest, **options)
    else:
        ends = dict(cu_seq_lens_q=layout.query_ends, cu_seq_lens_k=layout.key_ends)
        ends |= dict(max_length_q=layout.longest[0], max_length_k=layout.longest[1])
        options = dict(is_causal=True, softmax_scale=scale, attn_implementation=implementation, **ends)
        out = _flash_attention_forward(queries[None], keys[None], values[None], None, len(queries), **options)[0]
    return out.transpose(0, 1)[None]  # [L, heads, D] -> [1, heads, L, D]


class Pieces(torch.autograd.Function):
    """Softmax over keys that lie in two places: each place's output, weighted by its share of the sum of exponentials.

    The kernel's backward pass takes the log-sum-exp over both places and the merged output, and then gives one place's
    part of the gradient, as in ring attention (2310.01889).
    """

    @staticmethod
    def forward(ctx, query, key, value, layout, scale):
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)  # [1, heads, L]
        for q, k in layout.pieces:
            part, part_lse = flash(query[:, :, q], key[:, :, k], value[:, :, k], 0.0, q == k, scale=scale)
            if q != k:  # these queries have seen themselves; this is the prompt
                total = torch.logaddexp(lse[:, :, q], part_lse)
                share = (part_lse - total).exp()[..., None]
                part, part_lse = torch.lerp(out[:, :, q].float(), part.float(), share), total
            out[:, :, q], lse[:, :, q] = part, part_lse
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (query, key, value)]
        for q, k in ctx.layout.pieces:
            seen = (key[:, :, k], value[:, :, k])
            given = (grad[:, :, q], query[:, :, q], *seen, out[:, :, q], lse[:, :, q])
            parts = flash_backward(*given, 0.0, q == k, scale=ctx.scale)
            for whole, place, part in zip(grads, (q, k, k), parts, strict=True):
                whole[:, :, place] += part
        return *grads, None, None
