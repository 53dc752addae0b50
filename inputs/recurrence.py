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
from dataclasses import dataclass
from functools import cache, lru_cache, partial, wraps

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from inputs.backbone import text_model

MASK = "create_recurrent_attention_mask"  # transformers' function, by its name in the files of the models
WASTE = 0.25  # of places that are padding, at most


@cache
def takes_state(kind: type) -> bool:
    """Whether modules of this class keep a recurrent state in transformers' cache."""
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):  # not of Python
        return False
    return any(call in source for call in (".update_conv_state(", ".update_recurrent_state("))


def mixers_of(hf_model: nn.Module) -> list[nn.Module]:
    return [module for module in text_model(hf_model).modules() if takes_state(type(module))]


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
    with torch.device("cpu"):  # where models without values are made the default is another
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
    return in_segments(module, own, given["hidden_states"][0], layout_of(table))[None]


# ---- what goes through the layer together ----------------------------------------------------------------------------


@dataclass
class Bundle:
    """Segments of a packed row as rows of their own, padded to the longest."""

    places: Tensor  # [n, longest], in the packed row; 0 where there is none
    there: Tensor  # bool [n, longest]
    parents: Tensor | None  # [n] number of the prompt, as they come in the bundles before; None: these are prompts


@dataclass
class Layout:
    prompts: list[Bundle]
    completions: list[Bundle]
    order: Tensor  # [L] where each token of the row stands in what the bundles give, one behind the other


@lru_cache(maxsize=4)  # the layers of a model are given the same tensor
def layout_of(table: Tensor) -> Layout:
    """table: [1, 1, S, 4], see attention.py"""
    segments = table[0, 0].tolist()
    first = bundles([(a, b) for a, b, c, d in segments if c == d])
    number = {place: n for n, place in enumerate(place for runs in first for place in runs)}
    rest = bundles([(a, b) for a, b, c, d in segments if c < d])
    prompt_of = {(a, b): number[c, d] for a, b, c, d in segments if c < d}
    prompts = [bundle_of(runs, None) for runs in first]
    completions = [bundle_of(runs, [prompt_of[run] for run in runs]) for runs in rest]
    places = torch.cat([bundle.places[bundle.there] for bundle in prompts + completions])
    layout = Layout(prompts, completions, places.argsort())
    for part in [layout, *prompts, *completions]:
        for name, x in vars(part).items():
            setattr(part, name, x.to(table.device) if isinstance(x, Tensor) else x)
    return layout


def bundles(runs: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Runs of places (first, one behind the last) that are alike in length, the longest first."""
    found, places = [], 0
    for run in sorted(runs, key=lambda run: run[0] - run[1]):
        size, longest = run[1] - run[0], found[-1][0][1] - found[-1][0][0] if found else 0
        room = longest * (len(found[-1]) + 1) if found else 0
        if found and places + size >= (1 - WASTE) * room:
            found[-1].append(run)
            places += size
        else:
            found.append([run])
            places = size
    return found


def bundle_of(runs: list[tuple[int, int]], parents: list[int] | None) -> Bundle:
    side = "left" if parents is None else "right"  # nothing behind a prompt; what is behind a completion it never sees
    rows = [torch.arange(*run) for run in runs]
    if parents is not None:  # of a single token layers believe that it is sampled, and write over what they were given
        rows.append(torch.zeros(2, dtype=torch.long))
    places = pad_sequence(rows, batch_first=True, padding_side=side)[: len(runs)]
    sizes = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    there = pad_sequence(sizes, batch_first=True, padding_side=side)[: len(runs)]
    return Bundle(places, there, None if parents is None else torch.tensor(parents))


def in_segments(module: nn.Module, own, hidden: Tensor, layout: Layout) -> Tensor:
    """[L, H] -> [L, H]"""
    name = next(
        name
        for name in inspect.signature(type(module).forward).parameters
        if name in ("cache_params", "past_key_values")
    )
    found, states = [], []

    def run(bundle: Bundle, state: "State") -> None:
        given = hidden[bundle.places] * bundle.there[..., None].to(hidden.dtype)  # [n, longest, H]
        mask = None if bundle.parents is not None or bundle.there.all() else bundle.there.long()
        cache = Cache(layers=[state] * (module.layer_idx + 1))
        found.append(own(given, attention_mask=mask, **{name: cache})[bundle.there])
        states.append(state)

    for bundle in layout.prompts:
        run(bundle, State())
    before = State.joined(states)
    for bundle in layout.completions:
        run(bundle, before.of(bundle.parents))
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


def unlike(module: nn.Module, width: int) -> str:
    """How a layer's results or gradients behind prompts differ from those in plain rows, "" where they do not."""
    draw = torch.Generator().manual_seed(0)

    def drawn(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return torch.zeros(x.shape, dtype=x.dtype)
        return torch.randn(x.shape, generator=draw) / (x[0].numel() ** 0.5 if x.ndim > 1 else 1)

    values = {name: drawn(x) for name, x in [*module.named_parameters(), *module.named_buffers()]}
    table = torch.tensor([[[[0, 5, 0, 0], [5, 7, 0, 5], [7, 11, 0, 5], [11, 14, 0, 0], [14, 15, 11, 14]]]])
    alone = [[*range(7)], [*range(5), *range(7, 11)], [*range(11, 15)]]
    weights = torch.randn(15, width, generator=draw)

    def tried(run) -> tuple[Tensor, Tensor]:
        hidden = torch.randn(15, width, generator=torch.Generator().manual_seed(1), requires_grad=True)
        out = run(hidden)
        return out.detach(), torch.autograd.grad((out * weights).sum(), hidden)[0]

    def own(given: Tensor, **more) -> Tensor:
        return functional_call(module, values, (given,), more)

    def plain(hidden: Tensor) -> Tensor:
        rows, out = [own(hidden[row][None])[0] for row in alone], {}
        for row, found in zip(alone, rows, strict=True):
            out |= {place: (found[n], row) for n, place in enumerate(row)}
        return torch.stack([out[place][0] for place in range(15)])

    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            expected = tried(plain)
            found = tried(lambda hidden: in_segments(module, own, hidden, layout_of(table)))
    except Exception as error:  # noqa: BLE001 whatever a layer raises where it is not sampling
        return f"{type(error).__name__}: {error}".splitlines()[0]
    worst = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))
    return "" if worst < 1e-3 * max(1, *(x.abs().max().item() for x in expected)) else f"by {worst:.2g}"
