"""A frozen base in 4 bits below adapters (`--load_in 4bit`): QLoRA, 2305.14314.

Linear layers keep NF4 numbers in blocks of 64 with a scale each; the scales are quantised, too. Each pass makes a
layer's weights anew in the compute dtype. Embeddings, norms, the output layer and experts stay in --dtype. bitsandbytes
does the packing and the products, transformers loads. Under --strategy fsdp2 the numbers are in shards between passes,
their scales are whole on each rank; each rank has read the whole base before.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from config import ConfigError, TrainConfig
from inputs.lora import LINEAR, is_packed, linear_layers
from utils import world_size

# A number of 4 bits, a scale of 8 bits for each 64 of them, and a scale in float32 for each 256 of those.
BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


def mark(empty: nn.Module, cfg: TrainConfig) -> None:
    """Of a model without values, for memory.py: note at its weights which of them will be in 4 bits. ConfigError where
    the package for it is missing."""
    if cfg.load_in and find_spec("bitsandbytes") is None:
        raise ConfigError("--load_in 4bit needs bitsandbytes, which is not installed: pip install bitsandbytes==0.50.2")
    for name in linear_layers(empty) if cfg.load_in else ():
        layer = empty.get_submodule(name)
        layer.weight.in_4_bits = type(layer) in LINEAR  # those of a class of their own stay


def how_to_load(cfg: TrainConfig, make: Callable[[], nn.Module]) -> dict:
    """Arguments for `from_pretrained`, which packs each weight as it is read, on this rank's device: the model is never
    whole in 16 bits, not on rank 0 either. make: the model without values, on the meta device."""
    if not cfg.load_in:
        return {}
    from transformers import BitsAndBytesConfig

    with torch.device("meta"):
        empty = make()
    packed = set(linear_layers(empty))
    others = [name for name, part in empty.named_modules() if isinstance(part, nn.Linear) and name not in packed]
    how = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, llm_int8_skip_modules=others)
    compute = getattr(torch, cfg.compute_dtype)
    return dict(quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=compute, **how))


@torch.no_grad()
def check_packed(model: nn.Module, cfg: TrainConfig) -> None:
    """ConfigError if nothing of a loaded model is in 4 bits, or what is was not finite."""
    layers = {name: layer for name, layer in model.named_modules() if is_packed(layer)}
    if cfg.load_in and not layers:
        raise ConfigError(f"--load_in 4bit: {type(model).__name__} has no plain linear layers to pack; leave it out.")
    states = {name: layer.weight.quant_state for name, layer in layers.items()}
    scales = {name: state.absmax if state.offset is None else state.offset for name, state in states.items()}
    if bad := [name for name, scale in scales.items() if not scale.isfinite().all()]:
        raise ConfigError(
            f"--model_id={cfg.model_id}: weights of {len(bad)} layers hold nan or infinity, first {bad[0]}."
        )
    for layer in layers.values():
        # In eval mode bitsandbytes would lay the weights out anew for a kernel of some CPUs, which has no gradient and
        # computes in bfloat16 whatever the compute dtype.
        layer.support_avx512bf16_for_cpu = False
        layer.compute_dtype = getattr(torch, cfg.compute_dtype)  # of a model that was published so, too


def share_adapters(policy: nn.Module) -> None:
    """Rank 0's to all, but for what is in shards by now. Every rank has read the base itself. Collective."""
    for parameter in policy.parameters() if world_size() > 1 else ():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            dist.broadcast(parameter.data, 0)
