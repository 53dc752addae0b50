"""Which layers of a model take adapters."""

import contextlib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from config import ConfigError

LINEAR = (nn.Linear, Conv1D)  # the latter is GPT-2's


@functools.cache
def read_by(kind: type) -> set[str]:
    """Names of layers whose weights a module of this class computes with itself, as fused kernels of state-space layers
    do: an adapter there would never be asked."""
    try:
        return set(re.findall(r"self\.(\w+)\.weight", inspect.getsource(kind)))
    except (OSError, TypeError):
        return set()


def linear_layers(hf_model: nn.Module) -> list[str]:
    """Names of all that are called as plain linear layers, but the output layer, for --lora_targets all-linear. Experts
    are parameters of one module, and routers are of classes of their own: neither is among them; nor are layers that
    share their weights with others, as each of them would have an adapter of its own."""
    output, names, users = hf_model.get_output_embeddings(), [], users_of_weights(hf_model)
    for parent_name, parent in hf_model.named_modules():
        for name, child in parent.named_children():
            plain = is_linear(child) and child is not output and name not in read_by(type(parent))
            if plain and users[child.weight] == 1:
                names.append(f"{parent_name}.{name}" if parent_name else name)
    return names


@torch.no_grad()
def is_linear(layer: nn.Module | None) -> bool:
    """Of the classes in LINEAR, or of a class of its own that computes the same, as Falcon's. Routers do more."""
    if type(layer) in LINEAR or not isinstance(layer, nn.Linear):
        return type(layer) in LINEAR
    given = layer.weight.new_ones(1, layer.in_features)
    try:
        out = layer(given)
    except Exception:  # it wants something else than hidden states
        return False
    expected = nn.functional.linear(given, layer.weight, layer.bias)
    same = isinstance(out, torch.Tensor) and out.shape == expected.shape
    return same and (out.is_meta or torch.allclose(out, expected, rtol=1e-2, atol=1e-3))


def users_of_weights(model: nn.Module) -> Counter:
    """How many modules have each parameter."""
    return Counter(weight for module in model.modules() for weight in module.parameters(recurse=False))


@contextlib.contextmanager
def names_as_they_are() -> Iterator[None]:
    """In mixtures of experts PEFT takes names such as gate_proj, of dense layers too, for the experts' parameters: once
    such a layer was an expert. Here a name is that of a layer."""
    from peft.utils import transformers_weight_conversion as conversion

    known = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = known


def check_adapted(model: nn.Module, wanted: list[str]) -> None:
    """ConfigError if adapters lie on what is no linear layer, such as a router, or on a weight that several layers
    share: they could not be folded into what is pushed and saved."""
    users = users_of_weights(model)

    def folds(layer: nn.Module | None) -> bool:
        return is_linear(layer) and users[layer.weight] == 1

    others = {
        name.removeprefix("base_model.model.").replace(".base_layer", "")
        for name, module in model.named_modules()
        if getattr(module, "lora_A", None) and not folds(getattr(module, "base_layer", None))
    }
    if others:
        raise ConfigError(
            f"--lora_targets {' '.join(wanted)}: {len(others)} of these are no linear layers with a weight of their "
            f"own, such as {min(others)}. Experts, routers and shared weights take no adapters here: give all-linear, "
            "which leaves them as they are, or names of linear layers alone."
        )
