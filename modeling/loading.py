"""Loads a model of transformers, as plain weights or in 4 bits, and adds adapters."""

import copy
import logging

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from config import ConfigError, TrainConfig
from inputs.processor import load_config, loading, takes_images
from modeling.model import experts_of, lora_layers, replaced
from safety.results import say_once

# PEFT imports bitsandbytes if it is installed, and bitsandbytes warns that it lacks an optional kernel for CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def load_hf_model(cfg: TrainConfig, dtype: torch.dtype, config=None, body=False) -> nn.Module:
    """The transformers model of --model_id, dropout off.

    Within `torch.device("meta")` no weights are read: the same modules without values. config: transformers' config, if
    it has been read already. body: the output layer is not used, and may be missing in the model's files.
    """
    original = config or load_config(cfg.model_id)
    published, config = taken_out(original), without_noise(original)
    auto = transformers.AutoModelForImageTextToText if takes_images(original) else transformers.AutoModelForCausalLM
    # "auto" is transformers' own choice: sdpa for each part that has it, else eager.
    attention = None if cfg.attn_implementation == "auto" else cfg.attn_implementation
    kwargs = dict(dtype=dtype, attn_implementation=attention)
    with loading(cfg.model_id):
        if torch.get_default_device().type == "meta":
            model = auto.from_config(config, **kwargs)
            mark_4_bits(model, cfg)
        else:
            if published:
                config.quantization_config = published
            kwargs |= quantisation(published, cfg)
            model, loading_info = auto.from_pretrained(cfg.model_id, config=config, output_loading_info=True, **kwargs)
            check_missing(model, loading_info, cfg.model_id, body)
            set_up_4_bits(model, cfg)
            if published and not cfg.load_in:
                model._weight_conversions = None  # else checkpoints would be cut into the pieces of the published files
    use_eager_where_capped(model)
    model.own_config = original  # which checkpoints contain
    if takes_images(original) and cfg.freeze_vision:
        model.get_encoder(modality="image").requires_grad_(False)
    for module in (m for m in model.modules() if isinstance(m, nn.Dropout)):  # the config does not name all of them
        module.p = 0.0
    return model


def use_eager_where_capped(hf_model: nn.Module) -> None:
    """Gemma 2 caps its attention scores. transformers' sdpa accepts the cap and does not apply it."""
    config = hf_model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        hf_model.set_attn_implementation("eager")


def without_noise(config):
    """A copy of a config, and of its parts, with every rate of dropout and of a router's jitter set to 0: the ratio
    between two passes must come from the weights alone. It is done in the config since many models call dropout as a
    function, where no module could be switched off."""

    def clear(part) -> None:
        for name, value in vars(part).items():
            if ("drop" in name or "jitter" in name) and type(value) in (int, float):
                setattr(part, name, type(value)(0))  # some configs check types
            elif name in part.sub_configs and value is not None:
                clear(value)

    clear(config := copy.deepcopy(config))
    return config


def taken_out(config) -> dict | None:
    """Remove from a config, and return, its settings of weights that were published quantised: the model that is
    trained has plain weights, and so do its checkpoints."""
    settings = [vars(part).pop("quantization_config", None) for part in (config, config.get_text_config())]
    return next(filter(None, settings), None)


def quantisation(published: dict | None, cfg: TrainConfig) -> dict:
    """Arguments for `from_pretrained`. With --load_in 4bit (QLoRA, 2305.14314) bitsandbytes packs each weight when it
    is read, on this rank's device; the output layer, embeddings, norms and experts stay in --dtype.

    published: from `taken_out`, of a model that is published quantised. FP8 and MXFP4 become plain weights; 4 bits of
    bitsandbytes stay, with --load_in 4bit. ConfigError for other kinds.
    """
    if cfg.load_in and not published:
        kwargs = dict(bnb_4bit_compute_dtype=getattr(torch, cfg.compute_dtype), bnb_4bit_quant_type="nf4")
        kwargs |= dict(load_in_4bit=True, bnb_4bit_use_double_quant=True)
        return {"quantization_config": transformers.BitsAndBytesConfig(**kwargs)}
    if not published or (cfg.load_in and published.get("load_in_4bit")):
        return {}
    method = published.get("quant_method", "bitsandbytes")
    if cfg.load_in or method not in ("fp8", "mxfp4"):
        adapters = ", or train adapters on this one: --use_peft --load_in 4bit" * bool(published.get("load_in_4bit"))
        fault = f"is quantised ({method}), and cannot be turned into weights to train here"
        raise ConfigError(f"--model_id={cfg.model_id} {fault}. Give the model that it was made from{adapters}.")
    say_once(f"{cfg.model_id} is published quantised ({method}): it is trained, and saved, as plain weights.")
    return {"quantization_config": AUTO_QUANTIZATION_CONFIG_MAPPING[method](dequantize=True)}


def check_missing(model, loading_info: dict, model_id: str, body=False) -> None:
    """ConfigError if the files lack weights, which would then be random, and different on each rank. loading_info: what
    `from_pretrained` reports. body: the output layer may be missing, as a critic does not use it."""
    head = {n for n, part in model.named_modules() if body and part is model.get_output_embeddings()}
    if missing := [name for name in sorted(loading_info["missing_keys"]) if name.rpartition(".")[0] not in head]:
        fault = f"lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}: they would be random"
        raise ConfigError(f"{model_id} {fault}. Give a complete model of this kind, or copy the folder again.")


# ---- 4 bits ----------------------------------------------------------------------------------------------------------


def mark_4_bits(empty: nn.Module, cfg: TrainConfig) -> None:
    """For plan.py: mark, in a model without values, the weights that will be in 4 bits."""
    for layer in empty.modules() if cfg.load_in else ():
        if isinstance(layer, (nn.Linear, Conv1D)) and layer is not empty.get_output_embeddings():
            layer.weight.in_4_bits = True


def set_up_4_bits(model: nn.Module, cfg: TrainConfig) -> None:
    for layer in model.modules():
        if hasattr(getattr(layer, "weight", None), "quant_state"):
            # In eval mode bitsandbytes would rearrange the weights for a kernel of some CPUs, which has no gradient and
            # computes in bfloat16 whatever the compute dtype.
            layer.support_avx512bf16_for_cpu = False
            layer.compute_dtype = getattr(torch, cfg.compute_dtype)  # a model published in 4 bits brings another


def share_adapters(policy: nn.Module) -> None:
    """Send rank 0's adapters to all ranks, except those that are in shards already. Each rank has read the base in 4
    bits itself. Collective."""
    for parameter in policy.parameters() if dist.is_initialized() else ():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            dist.broadcast(parameter.data, 0)


# ---- adapters --------------------------------------------------------------------------------------------------------


def add_lora(model: nn.Module, cfg: TrainConfig) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer
    from peft.utils import transformers_weight_conversion as conversion

    if experts_of(model.config)[0]:
        say_once("LoRA on a mixture of experts: linear layers get adapters, experts get none.")
    kwargs = dict(target_modules=lora_layers(model, cfg), task_type="CAUSAL_LM")
    # For adapters made with transformers 4, in which experts were linear layers, PEFT takes a shared expert's gate_proj
    # for the parameters of the experts. An adapter of experts can be neither folded nor served.
    names_as_given = replaced(conversion, convert_peft_config_for_transformers=lambda *_, **__: None)
    try:  # adapters in float32, whatever --dtype the frozen weights have
        with names_as_given:
            adapted = get_peft_model(model, LoraConfig(r=cfg.lora_r, lora_alpha=cfg.lora_alpha, **kwargs))
    except ValueError as error:  # layers that PEFT refuses, such as out_proj of Mamba
        raise ConfigError(f"--lora_targets {' '.join(cfg.lora_targets)}: {error}") from error
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer) and autocasts(cfg):  # autocast casts: PEFT would keep a float32 copy
            layer.cast_input_dtype_enabled = False
    return adapted


def autocasts(cfg: TrainConfig) -> bool:
    """Whether the policy autocasts to bfloat16. FSDP casts its shards itself."""
    return cfg.strategy == "ddp" and cfg.compute_dtype == "bfloat16"


def to_train(model: nn.Module, cfg: TrainConfig) -> nn.Module:
    """Add adapters and gradient checkpointing. Returns the model in train mode, which checkpointing needs; dropout is
    0."""
    base, model = model, add_lora(model, cfg) if cfg.use_peft else model
    if cfg.head_dtype == "float32" and type(base.get_output_embeddings()) is not nn.Linear:
        raise ConfigError("--head_dtype float32 needs a plain linear output layer; leave it out of --lora_targets.")
    if cfg.gradient_checkpointing or cfg.offload_activations:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()  # else no gradient reaches adapters behind frozen embeddings
    return model.train()
