"""Recurrent layers behind shared prompts: linear attention, state-space layers, short convolutions.

A layer's state after the prompt (what it remembers, and the last tokens that its convolution still needs) is computed
once, and every completion begins with it, with gradient through it. The row of tokens is packed as it is for attention,
and only here taken apart: all prompts at once go through the layer's own forward, then all completions.

    row      p p p a a b b b q q q q c        hidden states of a packed row, and its table of segments
    first    . p p p                          prompts, ended by their last token: padding before them changes no state
             q q q q
    then     a a .                            completions, each with the state of its prompt
             b b b
             c . .

The layer is handed the state as transformers' cache would hand it, when it goes on sampling. That takes a layer that
goes on with several tokens at a time as it would have in one piece; whether it does is tried on drawn numbers.
"""

import inspect
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, lru_cache, partial, wraps

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

import utils
from inputs.backbone import text_model

MASK = "create_recurrent_attention_mask"  # transformers' function, by its name in the files of the models
WASTE = 0.25  # of places that are padding, at most


@cache
def states_of(kind: type) -> set[str]:
    """What modules of this class keep in transformers' cache, read in their source: "conv", "recurrent"."""
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):  # not of Python
        return set()
    return {state for state in ("conv", "recurrent") if f".update_{state}_state(" in source}


@cache
def cache_argument(kind: type) -> str:
    """The name by which a layer's forward is given transformers' cache."""
    names = inspect.signature(kind.forward).parameters
    return next(name for name in names if name in ("cache_params", "past_key_values"))


def mixers_of(hf_model: nn.Module) -> list[nn.Module]:
    return [module for module in text_model(hf_model).modules() if states_of(type(module))]


def why_not_states(hf_model: nn.Module) -> str | None:
    """Why the model's recurrent layers cannot begin with the state of a prompt, or None if they can, or if it has
    none."""
    mixers, config = mixers_of(hf_model), hf_model.config.get_text_config()
    attention = ("full_attention", "sliding_attention", "chunked_attention", "mlp", "moe")
    kinds = enumerate(getattr(config, "layer_types", None) or [])
    reached = {module.layer_idx for module in mixers}
    if others := {kind for layer, kind in kinds if kind not in attention and layer not in reached}:
        return f"layers of type {', '.join(sorted(others))} cannot begin behind a shared prompt"
    if not mixers:
        stateful = getattr(hf_model, "_is_stateful", False)
        return "recurrent layers cannot begin behind a shared prompt" if stateful else None
    if any(not hasattr(sys.modules[type(module).__module__], MASK) for module in mixers):
        return f"{hf_model.config.model_type} gives its recurrent layers no mask that could carry segments"
    for module in {type(module): module for module in mixers}.values():
        if difference := unlike(module, config.hidden_size):
            name = type(module).__name__
            return f"{name} goes on from the state of a prompt otherwise than in one piece ({difference})"
    return None


def use_shared_states(hf_model: nn.Module) -> None:
    """From now on the model's recurrent layers take a table of segments as their mask, and others as before."""
    for module in mixers_of(hf_model):
        file = sys.modules[type(module).__module__]
        if not hasattr(own := getattr(file, MASK), "hands_on_segments"):
            setattr(file, MASK, handing_on_segments(own))
        module.forward = partial(forward, module)


def handing_on_segments(own):
    """transformers' mask for recurrent layers, which is None for whatever is not [R, L]: a table stays what it is."""

    @wraps(own)
    def mask(config, inputs_embeds, attention_mask, *args, **kwargs):
        if is_table(attention_mask):
            return attention_mask
        return own(config, inputs_embeds, attention_mask, *args, **kwargs)

    mask.hands_on_segments = True
    return mask


def is_table(mask: Tensor | None) -> bool:
    return mask is not None and mask.ndim == 4 and mask.dtype == torch.int64


@torch.compiler.disable  # else every table of segments would be compiled for itself
def forward(module: nn.Module, *args, **kwargs) -> Tensor:
    """Of a recurrent layer.  [1, L, H] -> [1, L, H] with a table of segments; else as its own."""
    own = partial(type(module).forward, module)
    given = inspect.signature(own).bind(*args, **kwargs).arguments
    if not is_table(table := given.get("attention_mask")):
        return own(*args, **kwargs)
    return in_segments(module, own, given["hidden_states"][0], layout_of(table, chunk_of(module)))[None]


def chunk_of(module: nn.Module) -> int:
    """How many tokens the layer computes at a time: linear attention 64, an argument of its functions in no config."""
    if "recurrent" not in states_of(type(module)):
        return 1
    return getattr(module, "chunk_size", 64)


# ---- what goes through the layer together ----------------------------------------------------------------------------


@dataclass
class Row:
    """What goes through the layer as one sequence."""

    places: Tensor  # [n] in the packed row
    kept: int  # of its last tokens the layer's output counts
    prompt: tuple[int, int] | None = None  # the segment whose state it begins with

    def __len__(self) -> int:
        return len(self.places)


@dataclass
class Bundle:
    """Rows that are alike in length, padded to the longest."""

    places: Tensor  # [n, longest], in the packed row; 0 where there is none
    there: Tensor  # bool [n, longest, 1]
    mask: Tensor | None  # [n, longest] of ones and zeros, if something stands before a row
    parents: Tensor | None  # [n] number of the row whose state each begins with, as the bundles before have them


@dataclass
class Layout:
    bundles: list[Bundle]  # prompts, or what stands alone, and then what begins with their states
    order: Tensor  # [L] where each token of the packed row stands in what the bundles give, padding and all


@lru_cache(maxsize=4)  # the layers of a model are given the same tensor
def layout_of(table: Tensor, chunk: int) -> Layout:
    """table: [1, 1, S, 4], see attention.py.  chunk: as many tokens a layer computes at a time, and pads to that. Where
    a prompt and its completions are so short that they take more chunks apart, rows stay whole."""
    first, rest, behind = [], [], defaultdict(list)
    for start, stop, *prompt in table[0, 0].tolist():
        if prompt[0] < prompt[1]:
            behind[tuple(prompt)].append((start, stop))
        else:
            behind[start, stop] = []
    for prompt, completions in behind.items():
        before, own = torch.arange(*prompt), [torch.arange(*completion) for completion in completions]
        whole = [Row(torch.cat([before, places]), len(places)) for places in own]
        if own and chunks(whole, chunk) < chunks([before, *own], chunk):
            whole[0].kept = len(whole[0])
            first += whole
        else:
            first += [Row(before, len(before), prompt)]
            rest += [Row(places, len(places), prompt) for places in own]
    first, rest = alike(first), alike(rest)
    number = {row.prompt: n for n, row in enumerate(sum(first, []))}
    bundles, order, end = [], torch.empty(int(table[..., 1].max()), dtype=torch.long), 0
    for n, rows in enumerate(first + rest):
        parents = [number[row.prompt] for row in rows] if n >= len(first) else None
        bundle, kept = bundle_of(rows, parents, table.device)
        order[torch.cat([row.places[-row.kept :] for row in rows])] = end + kept
        end += bundle.places.numel()
        bundles.append(bundle)
    return Layout(bundles, utils.sent(order, table.device))


def chunks(rows: list, chunk: int) -> int:
    return sum(-(-len(row) // chunk) for row in rows)


def alike(rows: list[Row]) -> list[list[Row]]:
    """Rows that are alike in length together, the longest first."""
    found, places = [], 0
    for row in sorted(rows, key=len, reverse=True):
        if found and places + len(row) >= (1 - WASTE) * len(found[-1][0]) * (len(found[-1]) + 1):
            found[-1].append(row)
            places += len(row)
        else:
            found.append([row])
            places = len(row)
    return found


def bundle_of(rows: list[Row], parents: list[int] | None, device: torch.device) -> tuple[Bundle, Tensor]:
    """And where the tokens that count stand in it, flattened."""
    # Nothing may stand behind a prompt; what stands behind a completion it never sees. Of a single token layers believe
    # that it is sampled, and write over the state that they were given.
    longest = max(len(rows[0]), 1 if parents is None else 2)
    starts = [longest - len(row) if parents is None else 0 for row in rows]
    places, there = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.bool)
    for n, (row, start) in enumerate(zip(rows, starts, strict=True)):
        places[n, start : start + len(row)], there[n, start : start + len(row)] = row.places, True
    ends = [n * longest + start + len(row) for n, (row, start) in enumerate(zip(rows, starts, strict=True))]
    kept = torch.cat([torch.arange(end - row.kept, end) for row, end in zip(rows, ends, strict=True)])
    places, there = utils.sent(places, device), utils.sent(there, device)  # [rows, longest] each
    numbers = None if parents is None else utils.sent(torch.tensor(parents), device)
    return Bundle(places, there[..., None], there.long() if any(starts) else None, numbers), kept


def in_segments(module: nn.Module, own, hidden: Tensor, layout: Layout) -> Tensor:
    """[L, H] -> [L, H]"""
    name, found, states, before = cache_argument(type(module)), [], [], None
    goes_on = layout.bundles[-1].parents is not None
    for bundle in layout.bundles:
        if bundle.parents is not None and before is None:
            before = State.joined(states)
        states.append(State() if bundle.parents is None else before.of(bundle.parents))
        given = hidden[bundle.places] * bundle.there.to(hidden.dtype)  # [n, longest, H]
        cache = Cache(layers=[states[-1]] * (module.layer_idx + 1)) if goes_on else None
        found.append(own(given, attention_mask=bundle.mask, **{name: cache}).flatten(0, 1))
    return torch.cat(found)[layout.order]


class State(LinearAttentionLayer):
    """What transformers' cache keeps of one recurrent layer, with its gradient: nothing is written over."""

    def __init__(self, conv: dict | None = None, recurrent: dict | None = None):
        super().__init__()
        self.conv_states, self.recurrent_states = conv or {}, recurrent or {}
        self.has_previous_state = {number: True for number in self.conv_states} or {0: False}

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_):
        """[n, channels, T] -> what stood before it, and it"""
        before, size = self.conv_states.get(state_idx), conv_kernel_size or conv_states.shape[-1]
        whole = conv_states if before is None else torch.cat([before, conv_states], -1)
        self.conv_states[state_idx] = pad(whole, (max(0, size - whole.shape[-1]), 0))[..., -size:]
        self.has_previous_state[state_idx] = True
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    @classmethod
    def joined(cls, states: list["State"]) -> "State":
        def join(parts: list[dict]) -> dict:
            return {number: torch.cat([part[number] for part in parts]) for number in parts[0]}

        return cls(join([state.conv_states for state in states]), join([state.recurrent_states for state in states]))

    def of(self, rows: Tensor) -> "State":
        """Of some rows, which may be named more than once."""
        parts = (self.conv_states, self.recurrent_states)
        return State(*({number: x.index_select(0, rows) for number, x in part.items()} for part in parts))


# ---- tried on drawn numbers ------------------------------------------------------------------------------------------


def unlike(module: nn.Module, width: int, device: str | torch.device | None = None) -> str:
    """How a layer's results or gradients behind prompts differ from those in plain rows, "" where they do not.

    On a GPU, if there is one: packages of kernels, which layers take where they are installed, want it.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    table = torch.tensor(
        [[[[0, 5, 0, 0], [5, 7, 0, 5], [7, 11, 0, 5], [11, 14, 0, 0], [14, 15, 11, 14]]]], device=device
    )
    alone = [[*range(7)], [*range(5), *range(7, 11)], [*range(11, 15)]]
    draw = torch.Generator(device).manual_seed(0)

    def drawn(shape, like: Tensor | None = None) -> Tensor:
        if like is not None and not like.is_floating_point():
            return torch.zeros(shape, dtype=like.dtype)
        return torch.randn(shape, generator=draw) / (shape[1:].numel() ** 0.5 if len(shape) > 1 else 1)

    def own(given: Tensor, **more) -> Tensor:
        return functional_call(module, values, (given,), more)

    def plain(hidden: Tensor) -> Tensor:
        out = {}
        for row in alone:
            out |= dict(zip(row, own(hidden[row][None])[0], strict=True))
        return torch.stack([out[place] for place in range(15)])

    layout = layout_of(table, 1)  # made on the CPU and sent, so outside of the context below

    def behind_prompts(hidden: Tensor) -> Tensor:
        return in_segments(module, own, hidden, layout)

    try:
        with torch.device(device), torch.enable_grad(), torch.autocast(device, enabled=False):
            values = {name: drawn(x.shape, x) for name, x in [*module.named_parameters(), *module.named_buffers()]}
            hidden, weights = (drawn(torch.Size([15, width])) * width**0.5 for _ in range(2))
            found = []
            for run in (plain, behind_prompts):
                out = run(hidden.requires_grad_())
                found.append((out.detach(), *torch.autograd.grad((out * weights).sum(), hidden)))
    except Exception as error:  # whatever a layer raises that is made to go on with one token
        return f"{type(error).__name__}: {error}".splitlines()[0]
    worst = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*found, strict=True))
    return "" if worst < (1e-3 if device == "cpu" else 0.02) else f"by {worst:.2g} of the largest number"
