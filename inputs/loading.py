"""How a model of transformers is loaded: whole, as plain weights or in 4 bits; and how it gets adapters."""

import copy
import logging
import re
from importlib.util import find_spec

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from config import ConfigError, TrainConfig
from inputs.attention import attention_of, leave_nothing_out
from inputs.model import check_adapted, image_encoder, lora_targets, names_as_they_are
from inputs.processor import load_config, loading, takes_images
from safety.calls import say_once

# PEFT imports bitsandbytes where it is installed, which then warns of an optional kernel for CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def load_hf_model(cfg: TrainConfig, dtype: torch.dtype, config=None, body=False) -> nn.Module:
    """The transformers model of --model_id, dropout off.

    Within `torch.device("meta")` no weights are read: the same modules without values. config: transformers', if known.
    body: its output layer is not read, and may be missing in its files.
    """
    own = config or load_config(cfg.model_id)
    quantised, config = taken_out(own), without_noise(own)
    auto = auto_class(config)
    with attention_of(cfg.attn_implementation) as attention:
        how = dict(dtype=dtype, attn_implementation=attention)
        if torch.get_default_device().type == "meta":
            model = auto.from_config(config, **how)
            mark_4_bits(model, cfg)
        else:
            model = load_whole(auto, config, quantised, cfg, body, **how)
            set_up_4_bits(model, cfg)
    leave_nothing_out(model, cfg.attn_implementation)
    model.own_config = own  # which checkpoints say
    if takes_images(own) and cfg.freeze_vision:
        image_encoder(model).requires_grad_(False)
    for module in (m for m in model.modules() if isinstance(m, nn.Dropout)):  # not every one is in the config
        module.p = 0.0
    return model


def auto_class(config) -> type:
    """AutoModelForImageTextToText for a config of a model that takes images, else AutoModelForCausalLM. ConfigError if
    it makes no model of this config."""
    auto = transformers.AutoModelForImageTextToText if takes_images(config) else transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping:
        raise ConfigError(
            f"--model_id={config.name_or_path}: transformers has no causal language model for {config.model_type}; "
            "give a model that generates text."
        )
    return auto


def without_noise(config):
    """A copy of a config with every rate of dropout, and of a router's jitter, 0, in its parts, too: ratios between two
    passes must be those of the weights. Modules read the rates when they are built; many then call a function, not a
    module that could be found."""

    def clear(part) -> None:
        for name, value in vars(part).items():
            if ("drop" in name or "jitter" in name) and type(value) in (int, float):
                setattr(part, name, type(value)(0))  # some configs check types
            elif name in part.sub_configs and value is not None:
                clear(value)

    clear(config := copy.deepcopy(config))
    return config


def taken_out(config) -> dict | None:
    """What a config says of weights that were published quantised, which it says no longer: a model that is trained has
    plain ones, and so do its checkpoints."""
    found = [vars(part).pop("quantization_config", None) for part in (config, config.get_text_config())]
    return next(filter(None, found), None)


def as_published(given: dict, cfg: TrainConfig) -> dict:
    """Arguments for `from_pretrained` of a model that is published quantised: FP8 and MXFP4 become plain weights, 4
    bits of bitsandbytes stay as they are with --load_in 4bit. ConfigError for others. given: by `taken_out`."""
    method, in_4_bits = given.get("quant_method", "bitsandbytes"), given.get("load_in_4bit")
    if in_4_bits and cfg.load_in:
        return {"quantization_config": None}
    if cfg.load_in or method not in ("fp8", "mxfp4"):
        adapters = ", or train adapters on this one: --use_peft --load_in 4bit" * bool(in_4_bits)
        raise ConfigError(
            f"--model_id={cfg.model_id} is quantised ({method}), from which no weights are made here that could be "
            f"trained. Give the model that it was made from{adapters}."
        )
    say_once(f"{cfg.model_id} is published quantised ({method}): it is trained, and saved, as plain weights.")
    return {"quantization_config": AUTO_QUANTIZATION_CONFIG_MAPPING[method](dequantize=True)}


def load_whole(auto, config, given: dict | None, cfg: TrainConfig, body: bool, **how) -> nn.Module:
    """The model of --model_id. ConfigError naming weights that its files lack: they would be random, and others on each
    rank. body: the output layer, which a critic does not read, may be missing."""
    how |= in_4_bits(cfg)
    if given:
        config.quantization_config = given
        how |= as_published(given, cfg)
    with loading(cfg.model_id):
        model, found = auto.from_pretrained(cfg.model_id, config=config, output_loading_info=True, **how)
    if given and not cfg.load_in:
        model._weight_conversions = None  # else checkpoints would have the pieces in which it was published
    check_missing(model, found, cfg.model_id, body)
    return model


def check_missing(model, found: dict, model_id: str, body=False, flag: str = "--model_id") -> None:
    """ConfigError naming weights that the files lack, by what `from_pretrained` has found."""
    head = model.get_output_embeddings() if body else None
    unread = set() if head is None else set(head.parameters())
    held = [*model.named_parameters(), *model.named_buffers()]  # a router's bias is a buffer
    missing = [n for n, tensor in held if n in found["missing_keys"] and tensor not in unread]
    if missing:
        raise ConfigError(
            f"{flag}={model_id} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}: they "
            "would be random. Give a whole model of this kind, or copy the folder again."
        )


# ---- 4 bits ----------------------------------------------------------------------------------------------------------


def in_4_bits(cfg: TrainConfig) -> dict:
    """Arguments for `from_pretrained` with --load_in 4bit (QLoRA, 2305.14314): bitsandbytes packs each weight as it is
    read, on this rank's device; the output layer, embeddings, norms and experts stay in --dtype. ConfigError without
    bitsandbytes."""
    if not cfg.load_in:
        return {}
    if find_spec("bitsandbytes") is None:
        raise ConfigError("--load_in 4bit needs bitsandbytes, which is not installed: pip install bitsandbytes==0.50.2")
    how = dict(bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    compute = getattr(torch, cfg.compute_dtype)
    return dict(
        quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=compute, **how)
    )


def mark_4_bits(empty: nn.Module, cfg: TrainConfig) -> None:
    """Of a model without values, for plan.py: note at its weights which of them will be in 4 bits."""
    for layer in empty.modules() if cfg.load_in else ():
        if isinstance(layer, (nn.Linear, Conv1D)) and layer is not empty.get_output_embeddings():
            layer.weight.in_4_bits = True


def set_up_4_bits(model: nn.Module, cfg: TrainConfig) -> None:
    for layer in model.modules():
        if hasattr(getattr(layer, "weight", None), "quant_state"):
            # In eval mode bitsandbytes would lay the weights out anew for a kernel of some CPUs, which has no gradient
            # and computes in bfloat16 whatever the compute dtype.
            layer.support_avx512bf16_for_cpu = False
            layer.compute_dtype = getattr(torch, cfg.compute_dtype)  # of a model that was published so, too


def share_adapters(policy: nn.Module) -> None:
    """Rank 0's to all, but for what is in shards by now. Every rank has read the base in 4 bits itself. Collective."""
    for parameter in policy.parameters() if dist.is_initialized() else ():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            dist.broadcast(parameter.data, 0)


# ---- adapters --------------------------------------------------------------------------------------------------------


def add_lora(model: nn.Module, cfg: TrainConfig) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    frozen = set(image_encoder(model).modules()) if cfg.freeze_vision and takes_images(model.config) else ()
    left_out = [  # routers that are linear layers return more than a product (Llama 4, Phi-3.5-MoE)
        name for name, part in model.named_modules() if part in frozen or type(part).__name__.endswith("Router")
    ]
    how = dict(target_modules=lora_targets(cfg), exclude_modules=left_out or None, task_type="CAUSAL_LM")
    try:  # adapters in float32, whatever --dtype the frozen weights have
        with names_as_they_are():
            adapted = get_peft_model(model, LoraConfig(r=cfg.lora_r, lora_alpha=cfg.lora_alpha, **how))
    except (ValueError, re.error) as error:
        names = sorted({n.split(".")[-1] for n, part in model.named_modules() if isinstance(part, nn.Linear)})
        raise ConfigError(f"--lora_targets {' '.join(cfg.lora_targets)}: {error}; linear layers: {names}") from error
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer) and autocasts(cfg):  # autocast casts: PEFT would keep a float32 copy
            layer.cast_input_dtype_enabled = False
    check_adapted(adapted, cfg)
    return adapted


def autocasts(cfg: TrainConfig) -> bool:
    """Whether the policy autocasts to bfloat16. FSDP casts its shards itself."""
    return cfg.strategy == "ddp" and cfg.compute_dtype == "bfloat16"


def to_train(model: nn.Module, cfg: TrainConfig) -> nn.Module:
    """Adds adapters and gradient checkpointing. In train mode, which checkpointing needs; dropout is 0."""
    whole, model = model, add_lora(model, cfg) if cfg.use_peft else model
    if cfg.head_dtype == "float32" and type(whole.get_output_embeddings()) is not nn.Linear:
        raise ConfigError("--head_dtype float32 needs a plain linear output layer; leave it out of --lora_targets.")
    if cfg.gradient_checkpointing or cfg.offload_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()  # else nothing reaches adapters below frozen embeddings
    return model.train()
