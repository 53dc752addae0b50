"""Attention of packed rows: each completion sees its prompt and itself, and only those pairs are computed.

    row        p p p a a b b b p p c c       two groups; completions a and b of one prompt, c of another
    segments   (0, 3, 0, 0) (3, 5, 0, 3) (5, 8, 0, 3) (8, 10, 0, 0) (10, 12, 8, 10)

A segment is (start, stop, prefix start, prefix stop): its tokens see the prefix and, causally, one another. The table
of segments travels in place of the attention mask, which would have L x L entries. G completions of c tokens behind a
prompt of p tokens take p^2 / 2 + G c (p + c / 2) pairs, of G (p + c)^2 / 2 in plain rows, and memory linear in L.
Layers that see the last w tokens alone compute these pairs and no others, too: reach.py says how far each layer sees.
"""

import contextlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_flash_attention_utils import _flash_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import utils
from config import ConfigError
from inputs.backbone import text_model
from inputs.reach import Layer, layers_of, window_of
from inputs.recurrence import mixers_of, use_shared_states

NAME = "shared_prefix"  # of this attention among transformers' implementations
# Fewer heads of keys than of queries: torch 2.11 takes them without being told, later ones have a flag.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SMALL = 400  # queries or keys; up to that many its backward pass takes 1.1 to 6 times as long in bfloat16 as in float32


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
    for source in re.split(r"^class ", source_of(kind), flags=re.MULTILINE):  # one for sounds may stand beside
        if any(re.search(rf"\b{name} = self\.\w+\(", source) for name in set(re.findall(call, source))):
            return True
    return False


def takes_any(kind: type) -> bool:
    """Whether a model of this class hands its mask on to whatever attention it is set to, and asks for no name."""
    named = re.search(r"_attn_implementation (==|!=|in|not in)\b", source_of(kind))
    return kind._can_set_attn_implementation() and not makes_own_mask(kind) and not named


def masks_by_block(kind: type) -> bool:
    """Whether tokens of one image see one another in both directions."""
    return "block_sequence_ids" in source_of(kind)


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


def attention_kind(wanted: str, hf_model: nn.Module) -> str:
    """--attn_implementation, or for "auto" what the model's text part was loaded with."""
    if wanted != "auto":
        return wanted
    name = text_model(hf_model).config._attn_implementation or "eager"
    if not name.startswith(NAME):
        return name
    kind = name.removeprefix(NAME).removeprefix("_")  # see use_shared_attention
    return f"flash_attention_{kind}" if kind.isdigit() else kind or "sdpa"


def leaves_out(layers: list[Layer] | None) -> list[str]:
    """What the model wants of its attention that transformers' sdpa takes and does not compute."""
    names = dict(softcap="capped attention scores", s_aux="attention sinks")
    return sorted({names[option] for layer in layers or [] for option in layer.options.keys() & names.keys()})


def fall_back_to_eager(hf_model: nn.Module, wanted: str) -> None:
    """A loaded model whose class has sdpa, but which gives it what it does not compute, gets eager. ConfigError if
    sdpa was asked for."""
    if attention_kind("auto", hf_model) != "sdpa" or not (left_out := leaves_out(layers_of(hf_model))):
        return
    if wanted != "auto":
        raise ConfigError(f"--attn_implementation={wanted} leaves out {' and '.join(left_out)}; auto takes eager.")
    hf_model.set_attn_implementation("eager")


def why_not_segments(hf_model: nn.Module, implementation: str, on_gpu: bool) -> str | None:
    """Why the model's attention cannot be computed here, behind shared prompts, or None if it can."""
    layers, name = layers_of(hf_model), hf_model.config.model_type
    if layers is None:
        config = hf_model.config.get_text_config()
        windows = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
        return f"how far the layers of {name} see cannot be found without values" if windows else None
    if not layers:  # recurrent layers alone, or
        return None if mixers_of(hf_model) else f"{name} has an attention of its own"
    if any(layer.window is None for layer in layers):
        return f"{name} has masks that are neither causal nor windows"
    if any("torch.arange(" in inspect.getsource(type(layer.module).forward) for layer in layers):
        return f"attention of {name} counts the places of a row by itself"
    if unknown := sorted({option for layer in layers for option in unknown_options(layer.options)}):
        return f"{name} gives its attention {', '.join(unknown)}"
    left_out = leaves_out(layers)
    if left_out and implementation.startswith("flash_attention_") and left_out != ["capped attention scores"]:
        return f"{implementation} has no {' and '.join(left_out)} for packed rows; auto has"
    if on_gpu and implementation in ("sdpa", "eager") and "capped attention scores" in left_out:
        return "torch's kernel for GPUs does not cap attention scores; flash_attention_2 does"
    if on_gpu and (width := max(layer.heads[2] for layer in layers)) > 256:
        return f"flash attention takes heads of up to 256 numbers, and {name} has {width}"
    with torch.device("cpu"):  # where models without values are made the default is another
        if implementation == "eager" and any(unlike(layer) for layer in distinct(layers)):
            return f"{name} computes its attention in another way"
    return None


def distinct(layers: list[Layer]) -> list[Layer]:
    return list({(type(x.module), x.heads, x.window, x.scaling, *x.options): x for x in layers}.values())


class Stand:
    """An attention module for whom its tensors, which may be without values, have some."""

    training = False

    def __init__(self, module: nn.Module):
        self.module = module

    def __getattr__(self, name):
        return self.valued(getattr(self.module, name))

    @staticmethod
    def valued(x):
        return torch.linspace(-1, 1, x.numel()).view(x.shape) if isinstance(x, Tensor) else x


def unlike(layer: Layer) -> bool:
    """Whether a model's own attention gives other results than `attend_segments` on a few drawn numbers."""
    heads, kv_heads, width, value_width = layer.heads
    table, draw = torch.tensor([[[[0, 5, 0, 0], [5, 7, 0, 5], [7, 11, 0, 5]]]]), torch.Generator().manual_seed(0)
    shapes = [(1, n, 11, d) for n, d in ((heads, width), (kv_heads, width), (kv_heads, value_width))]
    q, k, v = (torch.randn(shape, generator=draw) for shape in shapes)
    options = {name: Stand.valued(x) for name, x in layer.options.items() if name not in ("dropout", "position_ids")}
    mask = torch.zeros(1, 1, 11, 11).masked_fill(~dense_mask(table, layer.window), torch.finfo(torch.float32).min)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        own, _ = own_attention(layer.module)(Stand(layer.module), q, k, v, mask, scaling=layer.scaling, **options)
        more = (layer.scaling, "sdpa", options.get("s_aux"), options.get("softcap"))
        ours = attend_segments(q, k, v, table, layer.window, *more)
    return not torch.allclose(own, ours, atol=1e-4)


def dense_mask(table: Tensor, window: int = 0) -> Tensor:
    """What tokens of a packed row see, L x L: for checks.  bool [L, L]"""
    length = int(table[0, 0, :, 1].max())
    mask = torch.zeros(length, length, dtype=torch.bool)
    for start, stop, first, end in table[0, 0].tolist():
        keys = torch.cat([torch.arange(first, end), torch.arange(start, stop)])
        place = torch.arange(len(keys))  # in a plain row
        mine = place[end - first :, None]
        mask[start:stop, keys] = (place <= mine) & (place > mine - (window or len(keys)))
    return mask


# ---- packed rows -----------------------------------------------------------------------------------------------------


def use_shared_attention(model: nn.Module, implementation: str) -> None:
    """From now on the model takes a table of segments [1, 1, S, 4] as its attention mask, and others as before.

    implementation: "sdpa", "eager", or one of transformers' that are called flash_attention_..., whose kernel is taken.
    """
    number = implementation.removeprefix("flash_attention_")  # by "flash" in a name vision towers would take it for one
    name = NAME if implementation == "sdpa" else f"{NAME}_{number}"
    AttentionInterface.register(name, partial(attend, implementation=implementation))
    mask = "eager" if implementation == "eager" else "sdpa"
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[mask])  # which hands on what is 4-D
    model.set_attn_implementation(name)
    use_shared_states(model)


Piece = tuple["Places", "Places", bool]  # queries, the keys they see, whether in order: the nth sees the first n


@dataclass
class Places:
    """`count` runs of `size` places in a row of tokens, each a sequence of its own to a kernel."""

    where: slice | Tensor  # a single run that ascends; else the places, [count * size]
    count: int
    size: int

    @classmethod
    def of(cls, runs: list[tuple[int, int]], size: int, device: torch.device, backwards: bool = False) -> "Places":
        """runs: (first place, one behind the last)"""
        if len(runs) == 1 and not backwards:
            return cls(slice(*runs[0]), 1, size)
        places = torch.tensor([start for start, _ in runs])[:, None] + torch.arange(size)
        return cls(utils.sent((places.flip(1) if backwards else places).flatten(), device), len(runs), size)

    def take(self, x: Tensor) -> Tensor:
        """[L, heads, D] -> [count, heads, size, D]"""
        return x[self.where].unflatten(0, (self.count, self.size)).transpose(1, 2)

    def give(self, x: Tensor) -> Tensor:
        """The other way round."""
        return x.transpose(1, 2).flatten(0, 1)

    def add(self, whole: Tensor, x: Tensor) -> None:
        """To `whole` [L, heads, D], in which a place may be named more than once."""
        if isinstance(self.where, slice):
            whole[self.where] += self.give(x)
        else:
            whole.index_add_(0, self.where, self.give(x).to(whole.dtype))


@dataclass
class Layout:
    """Segments as the kernels want them."""

    segments: list[tuple[int, int, int, int]]
    keys: Tensor  # [K] for the GPU: what each segment sees of its prefix and itself, one after the other
    query_ends: Tensor  # [S + 1] int32: where segments begin and end among the queries,
    key_ends: Tensor  # [S + 1] int32: and among `keys`
    longest: tuple[int, int]  # segment, in queries and in keys
    window: int

    @cached_property
    def pieces(self) -> list[Piece]:
        """For the CPU. Each query is met first in a piece with itself."""
        return pieces_of(self.segments, self.window, self.keys.device)

    @property
    def window_size(self) -> tuple[int, int]:
        """As flash attention takes it: how many keys before the query's own place, and behind it. -1: all."""
        return (self.window - 1 if self.window else -1, 0)


@lru_cache(maxsize=4)  # the layers of a model are given the same tensor, and see in one of two ways
def layout_of(table: Tensor, window: int = 0) -> Layout:
    """table: [1, 1, S, 4].  window: how many tokens one sees, with itself; 0: all"""
    device, segments = table.device, table[0, 0].tolist()
    if window:  # without what no token sees of a prefix
        segments = [(a, b, max(c, min(d, d - window + 1)), d) for a, b, c, d in segments]
    keys = torch.cat([torch.cat([torch.arange(c, d), torch.arange(a, b)]) for a, b, c, d in segments])
    sizes = torch.tensor([[0, 0], *([b - a, b - a + d - c] for a, b, c, d in segments)])  # [S + 1, 2]
    ends = utils.sent(sizes.cumsum(0).int().T.contiguous(), device)  # [2, S + 1]
    return Layout(segments, utils.sent(keys, device), *ends, tuple(sizes.amax(0).tolist()), window)


def pieces_of(segments: list, window: int, device: torch.device) -> list[Piece]:
    """Squares in which the nth query sees the first n keys, and rectangles in which all see all: what kernels compute
    without a mask. Squares of one size are one piece, so are rectangles with the same keys.

    A window of w = 3: the first token of a block sees most of the block before, the last none of it. Kernels know the
    opposite alone, the nth query sees the first n keys. Listed backwards it is that, queries 5, 4, 3 against keys 2, 1:
                                                           keys     0 1 2 | 3 4 5        2 1
                                                           query 3    1 2 | 3         5
                                                                 4      2 | 3 4       4  2
                                                                 5        | 3 4 5     3  2 1
    """
    in_order, backwards, all_of = defaultdict(list), defaultdict(list), defaultdict(list)

    def look_back(first: int, n: int, key: int, m: int, unseen: int) -> None:
        """n queries from `first` on m keys from `key` on; query i does not see the first unseen + i of them."""
        whole = min(n, max(0, 1 - unseen))  # queries that see all keys
        if whole and m:
            all_of[key, key + m].append((first, first + whole))
        lowest = whole + unseen
        size = min(n - whole, m - lowest)
        if size > 0:
            begin = first + whole
            backwards[size].append(((begin, begin + size), (key + lowest, key + lowest + size)))
            if m > lowest + size:
                all_of[key + lowest + size, key + m].append((begin, begin + size))

    for start, stop, first, end in segments:
        reach = window or stop - start + end - first
        for begin in range(start, stop, reach):
            size = min(reach, stop - begin)
            in_order[size].append((begin, begin + size))
            if begin > start:
                look_back(begin, size, begin - reach, reach, 1)
        look_back(start, stop - start, first, end - first, end - first - reach + 1)
    pieces = [(places := Places.of(runs, size, device), places, True) for size, runs in in_order.items()]
    for size, pairs in backwards.items():
        pieces.append((*(Places.of(list(runs), size, device, True) for runs in zip(*pairs, strict=True)), True))
    for keys, runs in all_of.items():
        queries = joined(runs)
        if len(queries) > 1:
            places = utils.sent(torch.cat([torch.arange(*run) for run in queries]), device)
            queries = Places(places, 1, len(places))
        else:
            queries = Places.of(queries, queries[0][1] - queries[0][0], device)
        pieces.append((queries, Places.of([keys], keys[1] - keys[0], device), False))
    return pieces


def joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """[(3, 5), (5, 8), (9, 10)] -> [(3, 8), (9, 10)]"""
    found = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return found


@torch.compiler.disable  # else every table of segments would be compiled for itself
def attend(
    module, query, key, value, attention_mask, scaling=None, *, implementation="sdpa", **options
) -> tuple[Tensor, None]:
    """transformers' attention interface.  query [1, heads, L, D], key, value [1, kv heads, L, D] -> [1, L, heads, D]"""
    if attention_mask is None or attention_mask.dtype != torch.int64:
        plain = own_attention(module) if implementation == "eager" else ALL_ATTENTION_FUNCTIONS["sdpa"]
        return plain(module, query, key, value, attention_mask, scaling=scaling, **options)
    if unknown := unknown_options(options):
        raise ValueError(f"{type(module).__name__} gives its attention {', '.join(unknown)}: use --no-shared_prefix.")
    more = (scaling, implementation, options.get("s_aux"), options.get("softcap"))
    return attend_segments(query, key, value, attention_mask, window_of(module), *more), None


def unknown_options(options: dict) -> list[str]:
    """Names of what a model gives its attention that may change its result, and that is not looked at here."""
    known = ("s_aux", "softcap", "sliding_window", "dropout", "position_ids", "use_cache", "output_attentions")
    return sorted(name for name, option in options.items() if name not in known and option is not None)


def attend_segments(
    query, key, value, table: Tensor, window: int, scaling=None, implementation="sdpa", sinks=None, cap=None
) -> Tensor:
    """As `attend`, of a table of segments alone."""
    if torch.is_autocast_enabled(device := query.device.type):  # casts sdpa's arguments, but knows nothing of kernels
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    width, scaling = value.shape[-1], query.shape[-1] ** -0.5 if scaling is None else scaling
    on_gpu = query.is_cuda or implementation not in ("sdpa", "eager")
    # Of multi-head latent attention a value is narrower than a key. Kernels want one width, GPUs' a multiple of 8.
    whole = -(-query.shape[-1] // 8) * 8 if on_gpu else query.shape[-1]
    query, key, value = (pad(x, (0, whole - x.shape[-1])) for x in (query, key, value))
    layout = layout_of(table, window)
    if on_gpu:
        out = attend_in_one_call(query, key, value, layout, scaling, implementation, sinks, cap)
    else:
        out = Pieces.apply(query, key, value, sinks, layout, scaling, cap)
    return out.transpose(1, 2)[..., :width]


def own_attention(module: nn.Module):
    """What transformers calls "eager" in the file that a module's class stands in."""
    return sys.modules[type(module).__module__].eager_attention_forward


def attend_in_one_call(
    query, key, value, layout: Layout, scale: float, implementation="sdpa", sinks=None, cap: float | None = None
) -> Tensor:
    """All segments at once, for GPUs. A prompt's keys are given once per completion, as in plain rows; where there are
    more keys than queries, "causal" lets the last query see the last key (flash-attn: from 2.1 on)."""

    def give(x):  # in fp32, so that the gradient of a prompt's keys is summed over completions in fp32
        return x[0].transpose(0, 1).float().index_select(0, layout.keys).to(x.dtype)  # [K, kv heads, D]

    queries, keys, values = query[0].transpose(0, 1), give(key), give(value)
    if implementation in ("sdpa", "eager"):
        if cap is not None:
            raise ValueError("torch's kernel caps no scores; packing.why_not_shared refuses models that want it.")
        if sinks is not None:
            return WithSinks.apply(queries, keys, values, sinks, layout, scale).transpose(0, 1)[None]
        ends, options = (layout.query_ends, layout.key_ends), dict(scale=scale, window_size=layout.window_size)
        out = varlen.varlen_attn(queries, keys, values, *ends, *layout.longest, **GROUPED, **options)
    else:
        ends = dict(cu_seq_lens_q=layout.query_ends, cu_seq_lens_k=layout.key_ends)
        ends |= dict(max_length_q=layout.longest[0], max_length_k=layout.longest[1])
        options = dict(is_causal=True, softmax_scale=scale, attn_implementation=implementation, **ends)
        options |= dict(sliding_window=layout.window or None, softcap=cap)
        out = _flash_attention_forward(queries[None], keys[None], values[None], None, len(queries), **options)[0]
    return out.transpose(0, 1)[None]  # [L, heads, D] -> [1, heads, L, D]


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A sink is one more key of each head, with a score of its own and a value of 0.  [..., heads, D], [..., heads]"""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - total).exp()[..., None].to(out.dtype), total


def gradient_of_sinks(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Of a score is its share of the softmax, times what its value lies above the output in the gradient's direction.
    [L, heads, D], [L, heads, D], [L, heads] -> [heads]"""
    share = (sinks.to(lse.dtype) - lse).exp()  # [L, heads]
    return -(share * (grad.float() * out.float()).sum(-1)).sum(0).to(sinks.dtype)


class WithSinks(torch.autograd.Function):
    """varlen_attn with sinks. Its backward pass takes the log-sum-exp and the output that the sinks are part of."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, layout, scale):
        """query [L, heads, D], key, value [K, kv heads, D], sinks [heads] -> [L, heads, D]"""
        ends, options = (layout.query_ends, layout.key_ends), dict(scale=scale, window_size=layout.window_size)
        options |= dict(return_aux=varlen.AuxRequest(lse=True), **GROUPED)
        out, lse = varlen.varlen_attn(query, key, value, *ends, *layout.longest, **options)
        by_head = lse.shape == (query.shape[1], len(query))  # the kernel's; torch's documentation has [L, heads]
        out, lse = add_sinks(out, lse.T if by_head else lse, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.layout, ctx.scale, ctx.by_head = layout, scale, by_head
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        layout, state = ctx.layout, torch.zeros(2, dtype=torch.uint64, device=grad.device)  # of dropout, which is off
        given = (grad.contiguous(), query, key, value, out, lse.T.contiguous() if ctx.by_head else lse)
        ends, window = (layout.query_ends, layout.key_ends, *layout.longest), layout.window_size
        more = (window == (-1, 0), state, ctx.scale, list(window))
        grads = torch.ops.torch_attn._varlen_attn_backward(*given, *ends, *more)
        return *grads, gradient_of_sinks(grad, out, lse, sinks), None, None


class Pieces(torch.autograd.Function):
    """Softmax over keys that lie in several places: each place's output, weighted by its share of the sum of
    exponentials.

    The kernel's backward pass takes the log-sum-exp over all places and the merged output, and then gives one place's
    part of the gradient, as in ring attention (2310.01889).
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, layout, scale, cap):
        """query [1, heads, L, D], key, value [1, kv heads, L, D], sinks [heads] or None -> [1, heads, L, D]"""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [L, heads, D]
        out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2]).float()
        for queries, keys, in_order in layout.pieces:
            part = Kernel.forward(queries.take(q), keys.take(k), keys.take(v), in_order, scale, cap)
            part, part_lse = queries.give(part[0]), queries.give(part[1][..., None])[..., 0]
            if queries is not keys:  # these queries have been met
                total = torch.logaddexp(lse[queries.where], part_lse)
                share = (part_lse - total).exp()[..., None]
                part, part_lse = torch.lerp(out[queries.where].float(), part.float(), share).to(q.dtype), total
            out[queries.where], lse[queries.where] = part, part_lse
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.layout, ctx.scale, ctx.cap = layout, scale, cap
        return out.transpose(0, 1)[None]

    @staticmethod
    def backward(ctx, grad):
        *tensors, sinks, out, lse = ctx.saved_tensors
        q, k, v, grad = (x[0].transpose(0, 1) for x in (*tensors, grad))
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        for queries, keys, in_order in ctx.layout.pieces:
            seen, parts_lse = (keys.take(k), keys.take(v)), queries.take(lse[..., None])[..., 0]
            given = (queries.take(grad), queries.take(q), *seen, queries.take(out), parts_lse)
            parts = Kernel.backward(*given, in_order, ctx.scale, ctx.cap)
            for whole, places, part in zip(grads, (queries, keys, keys), parts, strict=True):
                places.add(whole, part)
        of_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        grads = (x.to(q.dtype).transpose(0, 1)[None] for x in grads)
        return *grads, of_sinks, None, None, None


class Kernel:
    """Attention of one piece: torch's flash kernel for CPUs, or where scores are capped, products of matrices."""

    @staticmethod
    def forward(q, k, v, in_order: bool, scale: float, cap: float | None) -> tuple[Tensor, Tensor]:
        """[n, heads, size, D], [n, kv heads, keys, D] twice -> as q, [n, heads, size]"""
        if cap is None:
            return flash(q, k, v, 0.0, in_order, scale=scale)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for rows, keys, scores, _ in capped_scores(q, k, in_order, scale, cap):
            lse[:, :, rows] = scores.logsumexp(-1).flatten(1, 2)
            p = (scores - scores.logsumexp(-1, keepdim=True)).exp()
            out[:, :, rows] = (p @ v[:, :, None, keys].float()).flatten(1, 2).to(q.dtype)
        return out, lse

    @staticmethod
    def backward(grad, q, k, v, out, lse, in_order: bool, scale: float, cap: float | None) -> tuple[Tensor, ...]:
        if cap is None:
            given = (grad, q, k, v, out)
            if min(q.shape[2], k.shape[2]) <= SMALL:
                given = (x.float() for x in given)
            return flash_backward(*given, lse, 0.0, in_order, scale=scale)
        grads = [torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v)]
        shape = (k.shape[1], -1)  # kv heads, heads that share one
        for rows, keys, scores, raw in capped_scores(q, k, in_order, scale, cap):
            p = (scores - lse[:, :, rows, None].unflatten(1, shape)).exp()  # [n, kv heads, heads of one, rows, keys]
            above, ours = (x[:, :, rows].float().unflatten(1, shape) for x in (grad, q))
            towards = above @ v[:, :, None, keys].float().transpose(-1, -2)
            mean = (above * out[:, :, rows].float().unflatten(1, shape)).sum(-1, keepdim=True)
            of_scores = p * (towards - mean) * (1 - raw.square()) * scale
            grads[0][:, :, rows] = (of_scores @ k[:, :, None, keys].float()).flatten(1, 2)
            grads[1][:, :, keys] += (of_scores.transpose(-1, -2) @ ours).sum(2)
            grads[2][:, :, keys] += (p.transpose(-1, -2) @ above).sum(2)
        return tuple(grads)


def capped_scores(q, k, in_order: bool, scale: float, cap: float) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Some rows of queries after the other, so that memory stays linear: rows, the keys they see, scores and their tanh
    [n, kv heads, heads of one, rows, keys]"""
    count, size = q.shape[2], k.shape[2]
    step = max(16, min(2**22 // (len(q) * q.shape[1] * size), max(64, count // 4)))  # in order half is left out
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        keys = slice(0, rows.stop if in_order else size)
        ours = q[:, :, rows].float().unflatten(1, (k.shape[1], -1))
        raw = torch.tanh(ours @ k[:, :, None, keys].float().transpose(-1, -2) * (scale / cap))
        scores = raw * cap
        if in_order:
            later = torch.ones(rows.stop - rows.start, keys.stop, dtype=torch.bool).triu(start + 1)
            scores = scores.masked_fill(later, -torch.inf)
        yield rows, keys, scores, raw
