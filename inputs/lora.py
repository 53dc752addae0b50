"""Adapters: which layers of a model take them; the weights with them folded in, or adapters alone."""

import contextlib
import functools
import inspect
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.pytorch_utils import Conv1D

from config import ConfigError, TrainConfig
from inputs.backbone import experts_of
from safety.calls import say_once

# PEFT imports bitsandbytes where it is installed, which then warns of an optional kernel for CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

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


def lora_targets(hf_model: nn.Module, cfg: TrainConfig) -> list[str] | str:
    """--lora_targets for PEFT: ends of names; a single one with signs that no name has is a regular expression, which
    whole names have to match."""
    if cfg.lora_targets == ["all-linear"]:
        return linear_layers(hf_model)
    first, *others = cfg.lora_targets
    return cfg.lora_targets if others or re.fullmatch(r"[\w.-]+", first) else first


@torch.no_grad()
def is_linear(layer: nn.Module | None) -> bool:
    """Of the classes in LINEAR, or of a class of its own that computes the same, as Falcon's. Routers do more."""
    if type(layer) in LINEAR or not isinstance(layer, nn.Linear):
        return type(layer) in LINEAR
    if is_packed(layer):
        return True
    given = layer.weight.new_ones(1, layer.in_features)
    try:
        out = layer(given)
    except Exception:  # it wants something else than hidden states
        return False
    expected = nn.functional.linear(given, layer.weight, layer.bias)
    same = isinstance(out, torch.Tensor) and out.shape == expected.shape
    return same and (out.is_meta or torch.allclose(out, expected, rtol=1e-2, atol=1e-3))


def is_packed(layer: nn.Module) -> bool:
    """Whether it is a linear layer with its weights in 4 bits (four_bits.py), which were a plain one's."""
    return isinstance(layer, nn.Linear) and hasattr(layer.weight, "quant_state")


def users_of_weights(model: nn.Module) -> Counter:
    """How many modules have each parameter."""
    return Counter(weight for module in model.modules() for weight in module.parameters(recurse=False))


@contextlib.contextmanager
def names_as_they_are() -> Iterator[None]:
    """In mixtures of experts PEFT takes names such as gate_proj, of dense layers too, for the experts' parameters: once
    such a layer was an expert. Here a name is that of a layer."""
    from peft.utils import transformers_weight_conversion as conversion  # here, as PEFT takes seconds

    known = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = known


def check_adapted(model: nn.Module, cfg: TrainConfig) -> None:
    """ConfigError if adapters lie on what is no linear layer, such as a router, on a weight that several layers share,
    or are more than B A: they could not be folded into what is pushed and saved. Of a mixture of experts it says what
    is left as it is."""
    if experts_of(model.config)[0]:
        say_once("LoRA on a mixture of experts: linear layers get adapters, experts and routers stay as they are.")
    users, given = users_of_weights(model), f"--lora_targets {' '.join(cfg.lora_targets)}"

    def folds(layer: nn.Module | None) -> bool:
        return is_linear(layer) and users[layer.weight] == 1

    others = {
        name.removeprefix("base_model.model.").replace(".base_layer", "")
        for name, module in model.named_modules()
        if has_adapter(module) and not folds(getattr(module, "base_layer", None))
    }
    if others:
        raise ConfigError(
            f"{given}: {len(others)} of these are no linear layers with a weight of their own, such as {min(others)}. "
            "Embeddings, experts, routers and shared weights take no adapters here: give all-linear, which leaves them "
            "as they are, or names of linear layers alone."
        )
    if dora := [name for name, module in model.named_modules() if len(getattr(module, "lora_magnitude_vector", ()))]:
        raise ConfigError(f"{dora[0]} has DoRA's magnitudes, which are neither folded nor served: leave use_dora out.")


def has_adapter(module: nn.Module) -> bool:
    """Of any kind: those of embeddings have a name of their own in PEFT, and an empty lora_A."""
    return any(getattr(module, name, None) for name in ("lora_A", "lora_embedding_A"))


def is_lora(module: nn.Module) -> bool:
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and len(module.lora_A) > 0


def folded(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """W + scale * B A of one LoRA layer in `dtype`, as a new tensor: the live weights are never merged and unmerged.
    Under FSDP2 each rank folds its own rows of W, from its own rows of B and the whole A."""
    base = layer.base_layer.weight.detach().float()
    weight = base
    for name in layer.active_adapters:
        a, b = (part[name].weight.detach().float() for part in (layer.lora_A, layer.lora_B))
        if isinstance(a, DTensor):
            travels = a.to(a.device_mesh.device_type)  # with --offload it waits in CPU memory
            a = travels.redistribute(placements=[Replicate()] * a.device_mesh.ndim).to(a.device)
        delta = (b @ a).T if layer.fan_in_fan_out else b @ a
        if isinstance(delta, DTensor):
            delta = delta.redistribute(placements=weight.placements)
        weight = torch.add(weight, delta, alpha=layer.scaling[name])
        del delta
    return dithered(weight, base, dtype)


def dithered(weight: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `weight` in `dtype`: entries go up or down, the nearer the more often, so that errors cancel in a sum.

    B A is small beside W. Rounded to the nearest, most entries of W + B A are W again, and the sampler hardly sees what
    the first updates have learned. Which way an entry goes depends on its `base` weight and its column alone: a base
    weight that `dtype` can hold stays as it is, and equal weights are equal bytes, however sharded.  [rows, columns]
    """
    drop = {torch.bfloat16: 16, torch.float16: 13}.get(dtype)  # bits of the fraction that `dtype` has no room for
    if drop is None:
        return weight.to(dtype)
    if isinstance(weight, DTensor):
        local = dithered(weight.to_local(), base.to_local(), dtype)
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    column = torch.arange(weight.shape[-1], dtype=torch.int32, device=weight.device)
    bits = base.contiguous().view(torch.int32) + column * 0x3C6EF372  # to be mixed; integers wrap around
    bits.mul_(0x5BD1E995).bitwise_right_shift_(16).bitwise_and_(2**drop - 1)  # [rows, columns] from 0 to 2^drop - 1
    bits.add_(weight.contiguous().view(torch.int32)).bitwise_and_(-(2**drop))
    return bits.view(torch.float32).add_(weight, alpha=0).to(dtype)  # nan and inf stay what a push refuses


# ---- alone ---------------------------------------------------------------------------------------------------------


def adapted(model: nn.Module) -> dict[str, nn.Module]:
    """Layers with adapters, by the names that PEFT's checkpoints give them."""
    return {peft_name(name): module for name, module in model.named_modules() if is_lora(module)}


def peft_name(name: str) -> str:
    """Of a layer, without what DDP, FSDP and `Policy` put around it."""
    name = re.sub(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.", "", name)
    return "base_model.model." + re.sub(r"^(module\.)?(model\.base_model\.model\.)?", "", name)


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """[rank, inputs, outputs] of the adapter on each layer."""
    layers = adapted(model).items()
    return {name: [layer.r[layer.active_adapters[0]], layer.in_features, layer.out_features] for name, layer in layers}


def why_not_alone(model: nn.Module) -> str | None:
    """What a model learns that is no matrix of an adapter, which a server would lack."""
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if others := [name for name in trained if not re.search(r"\.lora_[AB]\.\w+\.(\w+\.)*weight$", name)]:
        return f"{len(others)} trained weights are no adapters, such as {others[0]}"
    if several := [name for name, layer in adapted(model).items() if len(layer.active_adapters) != 1]:
        return f"several adapters are active on {several[0]}"
    return None


def adapter_buckets(
    modules: Iterable[tuple[str, nn.Module]], max_bytes: int, dtype: torch.dtype, scaled: bool = True
) -> Iterator[list[tuple[str, Tensor]]]:
    """Lists of (PEFT's name, tensor in `dtype`) of about `max_bytes`: of each layer A, and B times its scale, so that a
    server adds B A. modules: by name, with whole weights, or FSDP2's shards. scaled: without it B comes as it is, as
    PEFT's checkpoints have it."""
    bucket, size = [], 0
    for name, layer in modules:
        if not is_lora(layer):
            continue
        adapter = layer.active_adapters[0]
        for key, scale in (("lora_A", 1.0), ("lora_B", layer.scaling[adapter])):
            weight = getattr(layer, key)[adapter].weight.detach().float() * (scale if scaled else 1.0)
            bucket.append((f"{peft_name(name)}.{key}.weight", weight.to(dtype)))
            size += weight.numel() * dtype.itemsize
        if size >= max_bytes:
            yield bucket
            bucket, size = [], 0
    if size:
        yield bucket
