"""A model of transformers: its parts by what they do; its logits; its adapters, folded in or alone."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from config import ConfigError, TrainConfig
from inputs.processor import takes_images
from safety.calls import say_once

# Of a frozen base in 4 bits: 4 bits a number, a scale of 8 bits for each 64, and one of float32 for each 256 scales.
BYTES_IN_4_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)


# ---- parts -----------------------------------------------------------------------------------------------------------


def backbone(hf_model: nn.Module) -> nn.Module:
    """Takes token ids (and images), returns `last_hidden_state`.

    It is `base_model`, unless that is the model itself because its parts have other names than its class says: then it
    is the part with the input embeddings.
    """
    if (base := hf_model.base_model) is not hf_model:
        return base
    embeddings = hf_model.get_input_embeddings()
    parts = (child for child in hf_model.children() if child is not embeddings)
    found = next((part for part in parts if any(module is embeddings for module in part.modules())), None)
    if found is None or found.get_output_embeddings() is not None:  # a causal model within another: no hidden states
        raise ConfigError(
            f"{type(hf_model).__name__} has no part of its own below the output layer, whose hidden states the policy "
            "reads; train its text model, or another family."
        )
    return found


def text_model(hf_model: nn.Module) -> PreTrainedModel:
    """The part with the layers that text goes through: of a model that takes images a part of the backbone.

    transformers' get_decoder looks for a part called "decoder", which may be an output layer, or the model itself.
    """
    found = hf_model.get_decoder()
    return found if isinstance(found, PreTrainedModel) and found is not hf_model else backbone(hf_model)


def image_encoder(hf_model: nn.Module) -> nn.Module:
    """What --freeze_vision leaves as it is. transformers gives the model itself where it finds no such part."""
    found = hf_model.get_encoder(modality="image")
    if found in (hf_model, hf_model.base_model):
        raise ConfigError(f"--freeze_vision: {type(hf_model).__name__} has no image encoder of its own; leave it out.")
    return found


def image_weights(hf_model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, name of a parameter of its own) of what is trained of an image tower and what lies between it and the
    text: all but the text part and the output layer. [] for a model of text alone."""
    if not takes_images(hf_model.config):
        return []
    head = hf_model.get_output_embeddings()
    of_text = {*text_model(hf_model).parameters(), *(head.parameters() if head is not None else ())}
    named = ((module, *pair) for module in hf_model.modules() for pair in module.named_parameters(recurse=False))
    return [(module, name) for module, name, p in named if p.requires_grad and p not in of_text]


EXPERTS = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok", "top_k"),
}


def experts_of(config) -> tuple[int, int]:
    """(experts of a layer, experts of a token), from a transformers config; (0, 0) for a dense model."""
    text = config.get_text_config()
    experts, chosen = (
        next((found for name in names if isinstance(found := getattr(text, name, None), int)), 0)
        for names in EXPERTS.values()
    )
    return (experts, chosen) if experts > 1 and chosen else (0, 0)


def window_of(config) -> int | None:
    """How many tokens a model's positions are made for; None where it has no bound."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_window(config, cfg: TrainConfig) -> None:
    """Says if the model itself, which is to sample in this process, has no room for the longest prompt and completion:
    a completion of one turn ends there. ConfigError with several turns, as the next one would have no room at all."""
    window, needed = window_of(config), cfg.max_prompt_length + cfg.max_completion_length
    if not window or needed <= window:
        return
    said = (
        f"--model_id={cfg.model_id} has a window of {window} tokens (max_position_embeddings); prompts and completions "
        f"need up to {needed}: lower --max_prompt_length={cfg.max_prompt_length} or "
        f"--max_completion_length={cfg.max_completion_length}"
    )
    if any(own.rollout != "single_turn" for own in cfg.by_domain()):
        raise ConfigError(f"{said}.")
    say_once(f"{said}, or some completions end at the window.")


# ---- logits ----------------------------------------------------------------------------------------------------------


class Given(tuple):
    """What a backbone returns, of which only the hidden states are known. Models read more, each of its own kind."""

    last_hidden_state = property(lambda self: self[0])

    def __getattr__(self, name: str) -> None:
        return None


def chunk_size(vocabulary: int, on_gpu: bool) -> int:
    """Tokens whose logits exist at a time, where cfg.logprob_chunk leaves it to us. Each chunk's backward pass adds a
    gradient as large as the output layer to the sum of those before, in bfloat16: on GPUs few chunks are faster and
    closer, as far as memory goes (.6 GiB of float32 logits, several times that in a pass). On a CPU 256, 1,024 and
    2,048 of 2,048 tokens take as long (SmolLM2, one core, measured: 8.9, 8.0, 9.3 s; in bfloat16 5.0, 5.4, 6.0)."""
    return min(max(160_000_000 // vocabulary // 256 * 256, 256), 4096) if on_gpu else 256


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was in training.items():
            part.training = was


@contextlib.contextmanager
def replaced(module: nn.Module, **methods) -> Iterator[None]:
    """For so long these of its attributes are others, for this module alone."""
    before = {name: module.__dict__.get(name) for name in methods}
    module.__dict__.update(methods)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del module.__dict__[name]
            else:
                module.__dict__[name] = old


def logits_of(hf_model: nn.Module, hidden: Tensor, float32: bool = False) -> Tensor:
    """What `hf_model` answers for tokens with these last hidden states; float32: the output layer's product in it, not
    a cast behind it.  [n, H] -> [n, V]

    Its own forward runs, in which the backbone gives them. So nothing that it does to logits is written here again:
    Gemma caps them, Granite divides them, Cohere multiplies them, ModernBERT has one more layer before.
    """

    def give(*_, **__) -> Given:
        return Given([hidden[None]])

    output = hf_model.get_output_embeddings()

    def multiply(hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if output.bias is None else output.bias.float()
            return nn.functional.linear(hidden.float(), output.weight.float(), bias)

    ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    with (
        replaced(backbone(hf_model), forward=give),
        replaced(text_model(hf_model), forward=give),  # OPT calls this one
        replaced(output, forward=multiply) if float32 else contextlib.nullcontext(),
    ):
        return hf_model(input_ids=ids, use_cache=False).logits[0]


# ---- adapters --------------------------------------------------------------------------------------------------------


def users_of_weights(model: nn.Module) -> Counter:
    """How many modules have each parameter."""
    return Counter(weight for module in model.modules() for weight in module.parameters(recurse=False))


def lora_targets(cfg: TrainConfig) -> list[str] | str:
    """--lora_targets for PEFT: all-linear, ends of names, or a regular expression, which whole names have to match."""
    first, *others = cfg.lora_targets
    plain = first != "all-linear" and re.fullmatch(r"[\w.-]+", first)
    return cfg.lora_targets if others or plain else first


@contextlib.contextmanager
def names_as_they_are() -> Iterator[None]:
    """In mixtures of experts PEFT takes names such as gate_proj, and all-linear, for the experts' parameters, too: once
    experts were linear layers. Here a name is that of a layer, as an adapter of experts can be neither folded nor
    served."""
    from peft.utils import transformers_weight_conversion as conversion  # here, as PEFT takes seconds

    known = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = known


def check_adapted(model: nn.Module, cfg: TrainConfig) -> None:
    """ConfigError if adapters lie on what is no linear layer, or on a weight that several layers share: they could not
    be folded into what is pushed and saved."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if experts_of(model.config)[0]:
        say_once("LoRA on a mixture of experts: linear layers get adapters, experts stay as they are.")
    users, given = users_of_weights(model), f"--lora_targets {' '.join(cfg.lora_targets)}"
    for name, layer in model.named_modules():
        base = getattr(layer, "base_layer", None)
        folds = isinstance(base, (nn.Linear, Conv1D)) and users[base.weight] == 1
        if isinstance(layer, BaseTunerLayer) and not folds:
            raise ConfigError(
                f"{given}: {name.removeprefix('base_model.model.')} is no linear layer with a weight of its own. "
                "Embeddings, experts and shared weights take no adapters here: give all-linear, which leaves them as "
                "they are, or names of linear layers alone."
            )


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


def push_bucket_mb(parameters: int) -> int:
    """For --push_bucket_mb: a large model's servers would else be asked a hundred times a push."""
    return 1024 if parameters >= 30e9 else 256
