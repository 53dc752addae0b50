"""How far each layer of a model sees, and what else it gives its attention: taken from its own forward pass.

The pass runs on torch's meta device, which has shapes and no values: it takes some milliseconds and no memory. In place
of masks the model is handed marks, and each attention module brings back the mark of the mask that it was given. What
that mask lets a token see is then asked of transformers' own function, token by token. A config's `sliding_window` is
not believed: some families count the token itself, some halve the number, some have it and do not use it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from inputs.backbone import text_model

NAME = "how_far_layers_see"  # among transformers' attentions


@dataclass
class Layer:
    """What an attention module was given."""

    module: nn.Module
    window: int | None  # how many tokens the last one sees, with itself; 0: all. None: another kind of mask
    heads: tuple[int, int, int, int]  # heads, heads of keys, width of a key, width of a value
    options: dict = field(default_factory=dict)  # beyond query, key, value, mask and scaling, what is not None
    scaling: float | None = None


TRACED: WeakKeyDictionary[nn.Module, list[Layer] | None] = WeakKeyDictionary()  # by the transformers model
WINDOWS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # by the attention module


def window_of(module: nn.Module) -> int:
    return WINDOWS.get(module, 0)


def layers_of(hf_model: nn.Module) -> list[Layer] | None:
    """Each call of attention by the model's text part in one pass. None if the model cannot run without values."""
    if hf_model not in TRACED:
        with torch.device("cpu"):  # where models without values are made the default is another
            TRACED[hf_model] = trace(text_model(hf_model))
        for layer in TRACED[hf_model] or []:
            WINDOWS[layer.module] = layer.window or 0
    return TRACED[hf_model]


def trace(model: PreTrainedModel) -> list[Layer] | None:
    marks: list[tuple[Tensor, int | None]] = []
    layers: list[Layer] = []

    def marked(*_, mask_function: Callable, local_size: int | None = None, **__) -> Tensor:
        marks.append(
            (torch.empty(1, 1, 1, 1, dtype=torch.bool, device="meta"), window_behind(mask_function, local_size))
        )
        return marks[-1][0]

    def attention(module, query, key, value, attention_mask, scaling=None, **options) -> tuple[Tensor, None]:
        window = next((window for mark, window in marks if mark is attention_mask), None)
        heads = (query.shape[1], key.shape[1], query.shape[3], value.shape[3])
        given = {name: option for name, option in options.items() if option is not None}
        layers.append(Layer(module, window, heads, given, scaling))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, marked)
    configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    ids = torch.zeros(1, 3, dtype=torch.long, device="meta")
    # In bf16, in which alone the meta device knows experts that are multiplied in groups.
    values = {
        name: torch.empty_like(x, device="meta", dtype=torch.bfloat16 if x.is_floating_point() else None)
        for name, x in [*model.named_parameters(), *model.named_buffers()]
    }
    try:
        for config in configs.values():
            config._attn_implementation_internal = NAME
        with torch.no_grad():
            mask = torch.ones(1, 3, dtype=torch.long)  # with values: some models ask whether all of them are ones
            functional_call(model, values, (), dict(input_ids=ids, attention_mask=mask, use_cache=False))
    except (RuntimeError, TypeError, ValueError):  # NotImplementedError is a RuntimeError: it looks at values
        return None
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
    windows = {layer.module: layer.window for layer in layers}
    for layer in layers:
        if windows[layer.module] != layer.window:  # one module, with masks of two kinds
            layer.window = None
    return layers


def window_behind(mask_function: Callable, size: int | None) -> int | None:
    """As Layer.window. size: that of a window as far as transformers tells it, to know where to look."""
    far, zero = 3 * size + 5 if size else 2**20, torch.zeros((), dtype=torch.long)

    def seen(place: int) -> Tensor:
        keys = torch.arange(place + 3)
        return mask_function(zero, zero, torch.tensor(place), keys).expand(len(keys))

    def expected(place: int, window: int) -> Tensor:
        keys = torch.arange(place + 3)
        return (keys <= place) & (keys > place - (window or place + 1))

    try:
        lowest = int(seen(far).int().argmax())
        window = far - lowest + 1 if lowest else 0
        places = {max(0, n * (window or 1000) + d) for n in (0, 1, 2) for d in (-1, 0, 1)} | {far}
        return window if all(torch.equal(seen(place), expected(place, window)) for place in places) else None
    except (RuntimeError, TypeError, IndexError):  # it reads a tensor of the pass: of padding, or of images
        return None
