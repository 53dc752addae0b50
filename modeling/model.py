"""A model of transformers: its parts by role; its logits; its adapters, folded in or alone."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers.pytorch_utils import Conv1D

from config import ConfigError, TrainConfig
from inputs.processor import takes_images

# Of each weight of a frozen base: 4 bits, a scale of 8 bits for 64 weights, and a float32 for 256 of those scales.
BYTES_IN_4_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)


# ---- parts -----------------------------------------------------------------------------------------------------------


def backbone(hf_model: nn.Module) -> nn.Module:
    """The part below the output layer: from token ids (and images) to `last_hidden_state`. ConfigError for a causal
    model within another."""
    if hf_model.base_model is hf_model:
        raise ConfigError(f"{type(hf_model).__name__} has no part below its output layer; train another family.")
    return hf_model.base_model


def rope_index_of(hf_model: nn.Module) -> Callable | None:
    """The model's function for a prompt's positions on three axes, if it has one."""
    return getattr(backbone(hf_model), "get_rope_index", None)


def image_weights(hf_model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, name of one of its own parameters) for the trained weights of the image tower and of the layers between
    it and the text: all but the text part and the output layer. [] for a model of text alone."""
    if not takes_images(hf_model.config):
        return []
    head = hf_model.get_output_embeddings()
    of_text = {*hf_model.get_decoder().parameters(), *(head.parameters() if head is not None else ())}
    named = ((module, *pair) for module in hf_model.modules() for pair in module.named_parameters(recurse=False))
    return [(module, name) for module, name, p in named if p.requires_grad and p not in of_text]


def experts_of(config) -> tuple[int, int]:
    """(experts per layer, experts per token), from a transformers config; (0, 0) for a dense model."""
    text = config.get_text_config()
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    chosen = getattr(text, "num_experts_per_tok", None) or 0
    return (experts, chosen) if experts > 1 and chosen else (0, 0)


def window_of(config) -> int | None:
    """How many tokens a model's positions are made for; None where it has no bound."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


# ---- logits ----------------------------------------------------------------------------------------------------------


class BackboneOutput(tuple):
    """The output of a backbone, with the hidden states alone. Other fields, which models look at, are None."""

    last_hidden_state = property(lambda self: self[0])

    def __getattr__(self, name: str) -> None:
        return None


def chunk_size(vocabulary: int, on_gpu: bool) -> int:
    """Default of cfg.logprob_chunk: tokens whose logits exist at a time. Each chunk's backward pass adds a gradient as
    large as the output layer to the sum so far, in bfloat16, so that on GPUs few chunks are faster and more exact;
    memory sets the limit (.6 GiB of float32 logits, several times that in a pass). On a CPU the size hardly matters:
    chunks of 256, 1,024 and 2,048 took 8.9, 8.0, 9.3 s for 2,048 tokens (SmolLM2, one core; in bfloat16 5.0, 5.4, 6.0).
    """
    return min(max(160_000_000 // vocabulary // 256 * 256, 256), 4096) if on_gpu else 256


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)


@contextlib.contextmanager
def replaced(module: nn.Module | ModuleType, **methods) -> Iterator[None]:
    """Within this context the module has these attributes instead of its own."""
    before = {name: module.__dict__[name] for name in methods if name in module.__dict__}
    module.__dict__.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del module.__dict__[name]
        module.__dict__.update(before)


def logits_of(hf_model: nn.Module, hidden: Tensor, float32: bool = False) -> Tensor:
    """The logits of tokens with these last hidden states.  [n, H] -> [n, V]

    The model's own forward runs, with a backbone that returns `hidden`, since families differ in what they do to
    logits: Gemma caps them, Granite divides them, Cohere multiplies them. float32: compute the product of the output
    layer in float32, rather than cast its result.
    """

    def give(*_, **__) -> BackboneOutput:
        return BackboneOutput([hidden[None]])

    output = hf_model.get_output_embeddings()

    def multiply(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if output.bias is None else output.bias.float()
            return nn.functional.linear(hidden.float(), output.weight.float(), bias)

    ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    with (
        replaced(backbone(hf_model), forward=give),
        replaced(hf_model.get_decoder(), forward=give),  # OPT calls this one
        replaced(output, forward=multiply) if float32 else contextlib.nullcontext(),
    ):
        return hf_model(input_ids=ids, use_cache=False).logits[0]


# ---- adapters --------------------------------------------------------------------------------------------------------


def lora_layers(model: nn.Module, cfg: TrainConfig) -> list[str]:
    """Names of the linear layers of --lora_targets: "all-linear" (without the output layer), ends of names, or regular
    expressions that match a whole name. ConfigError if there are none.

    Left out: layers that share a weight, since each needs its own to be folded into, and routers that are linear layers
    (Llama 4, Phi-3.5-MoE), which return more than a product.
    """
    users = Counter(weight for module in model.modules() for weight in module.parameters(recurse=False))
    frozen = model.get_encoder(modality="image") if cfg.freeze_vision and takes_images(model.config) else None
    left_out = set(frozen.modules()) if frozen is not None else set()
    linear = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (nn.Linear, Conv1D)) and users[layer.weight] == 1 and layer not in left_out
        if not type(layer).__name__.endswith("Router")
    }
    names: set[str] = set()
    for target in cfg.lora_targets:
        if target == "all-linear":
            matches = {name for name, layer in linear.items() if layer is not model.get_output_embeddings()}
        else:
            matches = {name for name in linear if f".{name}".endswith(f".{target}") or re.fullmatch(target, name)}
        if not matches:
            ends = sorted({name.split(".")[-1] for name in linear})
            raise ConfigError(f"--lora_targets {target}: no linear layer has that name. Names end in {ends}.")
        names |= matches
    return sorted(names)


def is_lora(module: nn.Module) -> bool:
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and len(module.lora_A) > 0


def folded_weight(layer: nn.Module, dtype: torch.dtype) -> Tensor:
    """W + scale * B A of one LoRA layer in `dtype`, as a new tensor: the live weights are never merged. Under FSDP2
    each rank folds its own rows of W, from its own rows of B and the whole A."""
    base = layer.base_layer.weight.detach().float()
    weight = base
    for name in layer.active_adapters:
        a, b = (part[name].weight.detach().float() for part in (layer.lora_A, layer.lora_B))
        if isinstance(a, DTensor):
            travels = a.to(a.device_mesh.device_type)  # with --offload it is in CPU memory
            a = travels.redistribute(placements=[Replicate()] * a.device_mesh.ndim).to(a.device)
        delta = (b @ a).T if layer.fan_in_fan_out else b @ a
        if isinstance(delta, DTensor):
            delta = delta.redistribute(placements=weight.placements)
        weight = torch.add(weight, delta, alpha=layer.scaling[name])
        del delta
    return dithered_weight(weight, base, dtype)


def dithered_weight(weight: Tensor, base: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 `weight` in `dtype`, each entry rounded up or down, more often to the nearer value, so that errors cancel
    in a sum.  [rows, columns]

    B A is small beside W. With rounding to the nearest value most entries of W + B A would be W again, and the sampler
    would hardly see what the first updates have learned. The direction depends on an entry's `base` weight and its
    column alone: a base weight that `dtype` can hold stays unchanged, and the bytes do not depend on the sharding.
    """
    drop = {torch.bfloat16: 16, torch.float16: 13}.get(dtype)  # bits of the fraction that `dtype` cannot hold
    if drop is None:
        return weight.to(dtype)
    if isinstance(weight, DTensor):
        local = dithered_weight(weight.to_local(), base.to_local(), dtype)
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
    column = torch.arange(weight.shape[-1], dtype=torch.int32, device=weight.device)
    bits = base.contiguous().view(torch.int32) + column * 0x3C6EF372  # mixed below; integers wrap around
    bits.mul_(0x5BD1E995).bitwise_right_shift_(16).bitwise_and_(2**drop - 1)  # [rows, columns] from 0 to 2^drop - 1
    bits.add_(weight.contiguous().view(torch.int32)).bitwise_and_(-(2**drop))
    return bits.view(torch.float32).add_(weight, alpha=0).to(dtype)  # keeps nan and inf, which a push refuses


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers with adapters, by the names that PEFT's checkpoints give them."""
    return {peft_name(name): module for name, module in model.named_modules() if is_lora(module)}


def peft_name(name: str) -> str:
    """A layer's name in PEFT's checkpoints, without the prefixes of DDP, FSDP and `Policy`."""
    name = re.sub(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.", "", name)
    return "base_model.model." + re.sub(r"^(module\.)?(model\.base_model\.model\.)?", "", name)


def shapes_of(model: nn.Module) -> dict[str, list[int]]:
    """[rank, inputs, outputs] of the adapter on each layer."""
    layers = adapted_layers(model).items()
    return {name: [layer.r[layer.active_adapters[0]], layer.in_features, layer.out_features] for name, layer in layers}


def why_not_alone(model: nn.Module) -> str | None:
    """Why a server cannot take the adapters alone: the model trains weights outside them, or has several. None if it
    can."""
    trained = (name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if others := [name for name in trained if not re.search(r"\.lora_[AB]\.\w+\.(\w+\.)*weight$", name)]:
        return f"{len(others)} trained weights belong to no adapter, such as {others[0]}"
    several = any(len(layer.active_adapters) != 1 for layer in adapted_layers(model).values())
    return "several adapters are active" if several else None


def adapter_weights(
    modules: Iterable[tuple[str, nn.Module]], dtype: torch.dtype, scaled: bool = True
) -> list[tuple[str, Tensor]]:
    """(PEFT's name, tensor in `dtype`) of all adapters: A of each layer, and B times its scale, so that a server adds
    B A. modules: (name, module) with whole weights or FSDP2's shards. scaled=False leaves B unscaled, as in PEFT's
    checkpoints."""
    weights = []
    for name, layer in modules:
        for key in ("lora_A", "lora_B") if is_lora(layer) else ():
            adapter = layer.active_adapters[0]
            scale = layer.scaling[adapter] if scaled and key == "lora_B" else 1.0
            weight = getattr(layer, key)[adapter].weight.detach().float() * scale
            weights.append((f"{peft_name(name)}.{key}.weight", weight.to(dtype)))
    return weights


def push_bucket_mb(parameters: int) -> int:
    """Default of --push_bucket_mb: larger for large models, whose servers would get a hundred requests a push."""
    return 1024 if parameters >= 30e9 else 256
