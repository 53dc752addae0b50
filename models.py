"""The policy as a module, loading, LoRA, sharding, the sampler: what --model_id, --use_peft, --strategy and --generator
ask for. What one edits to try an idea is in the train script."""

import contextlib
import functools
import json
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import checks
import prompts
import utils
from config import ConfigError, TrainConfig
from packing import with_blank


class Policy(nn.Module):
    """A causal LM that answers with log-probs of chosen tokens. Logits exist for `chunk` sampled tokens at a time only.

    The wrapper exists because DDP and FSDP want everything that uses parameters inside one `forward`.
    """

    def __init__(self, model: nn.Module, cfg: TrainConfig, autocast: bool):
        super().__init__()
        self.model, self.temperature, self.chunk, self.autocast = model, cfg.temperature, cfg.logprob_chunk, autocast
        self.entropy_gradient = cfg.entropy_coef != 0 or cfg.entropy_target is not None
        self.squares = False  # whether to sum squared probabilities, a pass over [n, V]
        self.never = prompts.placeholder_tokens(model.config)  # sampled by no sampler
        several = utils.world_size() > 1 and is_vision(model.config)
        self.blank = prompts.blank_inputs(load_processor(cfg.model_id), cfg, model) if several else {}

    @property
    def hf_model(self) -> nn.Module:  # the transformers model, below PEFT
        return self.model.get_base_model() if isinstance(self.model, _peft_model()) else self.model

    def forward(self, inputs: dict, rows: Tensor, columns: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-prob of `targets` [N], given what stands up to (rows, columns) [N] of `inputs`; entropy and sum of
        squared probabilities of the distribution it is drawn from.  [N] each"""
        device = targets.device.type
        with torch.autocast(device, torch.bfloat16) if self.autocast else contextlib.nullcontext():
            if self.blank:
                inputs = with_blank(inputs, self.blank)
            hidden = self.hf_model.base_model(**inputs, use_cache=False).last_hidden_state  # [R, L, H]
            unused = 0 * hidden[-1, 0].sum() if self.blank else 0  # ties the row with the image to the gradient
            hidden = hidden[rows, columns] + unused  # [N, H]
            if len(hidden) <= self.chunk or not torch.is_grad_enabled():
                parts = [self.head(h, t) for h, t in self._chunks(hidden, targets)]
            else:  # several chunks: recompute each one's logits in the backward pass
                parts = [checkpoint(self.head, h, t, use_reentrant=False) for h, t in self._chunks(hidden, targets)]
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def _chunks(self, hidden: Tensor, targets: Tensor):
        return zip(hidden.split(self.chunk), targets.split(self.chunk), strict=True)

    def head(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output layer on sampled positions.  [n, H], [n] -> [n], [n], [n]"""
        logits = self.hf_model.get_output_embeddings()(hidden).float()  # [n, V]
        if cap := getattr(self.hf_model.config.get_text_config(), "final_logit_softcapping", None):  # Gemma
            logits = cap * torch.tanh(logits / cap)
        if self.never:
            logits = logits.index_fill(1, torch.tensor(self.never, device=logits.device), -1e9)  # -inf * 0 would be nan
        if self.temperature != 1:  # the sampler did the same
            logits = logits / self.temperature
        log_p = logits.log_softmax(-1)  # [n, V]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_gradient):
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1)  # [n]
            squares = (p.detach() ** 2).sum(-1) if self.squares else torch.zeros_like(entropy)
        return log_p.gather(1, targets[:, None])[:, 0], entropy, squares


def _peft_model() -> type:
    from peft import PeftModel

    return PeftModel


def is_vision(config) -> bool:
    """Whether a model's config is one of those that take images."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


@contextlib.contextmanager
def loading(model_id: str) -> Iterator[None]:
    """ConfigError with folder, file and remedy where transformers' loaders say one of them at best."""
    try:
        yield
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        if not os.path.isdir(model_id):
            raise ConfigError(f"--model_id={model_id}: no such folder, and not found on the hub ({error})") from error
        what = ", ".join(unreadable(Path(model_id))) or "a file that it needs"
        fault = f"{what} is missing or damaged ({type(error).__name__}: {error})"
        raise ConfigError(f"--model_id={model_id}: {fault}. Copy the folder again, or save the model anew.") from error


def unreadable(folder: Path) -> Iterator[str]:
    """Files of a model that are no JSON or no safetensors; their last part may be missing."""
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text())
            elif path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
        except (OSError, ValueError, SafetensorError):
            yield path.name


@functools.cache
def load_processor(model_id: str):
    """The processor of text and images of a model that takes images, of others the tokenizer."""
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    checks.check_model_id(model_id)
    with loading(model_id):
        vision = is_vision(AutoConfig.from_pretrained(model_id))
        return (AutoProcessor if vision else AutoTokenizer).from_pretrained(model_id)


def load_hf_model(cfg: TrainConfig, dtype: torch.dtype) -> nn.Module:
    """The transformers model of --model_id, dropout off (ratios between two passes must be those of the weights)."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    if not sys.stderr.isatty():  # in a log file a progress bar is one long line
        logging.disable_progress_bar()
    with loading(cfg.model_id):
        vision = is_vision(AutoConfig.from_pretrained(cfg.model_id))
        auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
        model = auto.from_pretrained(cfg.model_id, dtype=dtype, attn_implementation=cfg.attn_implementation)
    checks.check_finite(model, cfg.model_id)
    model.config.use_cache = False
    if vision and cfg.freeze_vision:
        model.get_encoder(modality="image").requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
    return model


def add_lora(model: nn.Module, cfg: TrainConfig) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = cfg.lora_targets[0] if cfg.lora_targets == ["all-linear"] else cfg.lora_targets
    try:
        lora = LoraConfig(r=cfg.lora_r, lora_alpha=cfg.lora_alpha, target_modules=targets, task_type="CAUSAL_LM")
        if cfg.freeze_vision and is_vision(model.config):
            tower = set(model.get_encoder(modality="image").modules())
            lora.exclude_modules = [name for name, module in model.named_modules() if module in tower]
        return get_peft_model(model, lora, autocast_adapter_dtype=False)
    except ValueError as error:
        names = sorted({n.split(".")[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ValueError(f"--lora_targets {' '.join(cfg.lora_targets)}: {error}; linear layers: {names}") from error


def shard(policy: nn.Module, cfg: TrainConfig, device: torch.device, trained: bool) -> nn.Module:
    """The policy under --strategy. The reference model is sharded like the policy."""
    layer_names = set(policy.hf_model._no_split_modules or [])
    layers = [m for m in policy.modules() if type(m).__name__ in layer_names]
    param_dtype = getattr(torch, cfg.compute_dtype)
    if cfg.strategy == "ddp":
        policy = policy.to(device)
        if not trained or utils.world_size() == 1:
            return policy
        return nn.parallel.DistributedDataParallel(
            policy,
            device_ids=[device.index] if device.index is not None else None,
            find_unused_parameters=is_vision(policy.hf_model.config),  # some towers end before their last layer
        )
    if cfg.strategy == "fsdp":
        from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        # Adapters and frozen weights share a flat parameter; torch warns of that with a page of names per layer.
        warnings.filterwarnings("ignore", message="(?s).*requires_grad=", module="torch.distributed.fsdp")
        return FullyShardedDataParallel(
            policy,
            auto_wrap_policy=ModuleWrapPolicy({type(m) for m in layers}),
            mixed_precision=MixedPrecision(param_dtype=param_dtype, reduce_dtype=torch.float32),
            cpu_offload=CPUOffload(cfg.offload),
            use_orig_params=True,
            device_id=device,
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    options = dict(
        mesh=init_device_mesh(device.type, (utils.world_size(),)),
        mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=device.type == "cuda") if cfg.offload else OffloadPolicy(),
    )
    if not cfg.offload:
        policy = policy.to(device)
    for layer in layers:
        fully_shard(layer, **options)
    return fully_shard(policy, **options)


def make_generator(cfg: TrainConfig, hf_model: nn.Module, processor, device: torch.device):
    """The sampler of --generator; servers are checked to serve this model before anything is trained."""
    rope_index = prompts.rope_index_of(hf_model)
    if cfg.generator == "hf":
        from hf_generator import HFGenerator

        generator = HFGenerator(load_hf_model(cfg, getattr(torch, cfg.compute_dtype)).to(device), processor)
        generator.rope_index = rope_index
        return generator
    from vllm_client import VLLMClient

    limits = dict(timeout=cfg.server_timeout, request_timeout=cfg.request_timeout)
    client = VLLMClient(cfg.server_urls, cfg.server_token, **limits)
    if utils.is_main():
        if any(word.startswith("--server_token") for word in sys.argv):
            print("torchrun shows --server_token in `ps`; rather set VLLM_SERVER_TOKEN or VLLM_SERVER_TOKEN_FILE")
        print(f"waiting up to {cfg.server_timeout:g} s for {', '.join(cfg.server_urls)}", flush=True)
    client.wait_ready(cfg.server_timeout)
    checks.check_servers(client, hf_model.config.get_text_config(), cfg.max_prompt_length + cfg.max_completion_length)
    client.tokenizer, client.rope_index, client.receives_weights = processor, rope_index, utils.is_main()
    client.convert = functools.partial(utils.as_in_a_checkpoint, hf_model)
    client.weight_dtype = getattr(torch, client.server_info()[0]["dtype"])
    if client.receives_weights:
        client.connect_weights(device)
    client.instances = utils.gather_objects(client.instances)[0]  # every rank looks whether its answers are theirs
    return client


def clip_gradients(policy: nn.Module, max_norm: float) -> float:
    """Scale gradients to a global norm of at most max_norm; returns the norm before."""
    if isinstance(policy, torch.distributed.fsdp.FullyShardedDataParallel):
        return float(policy.clip_grad_norm_(max_norm))
    norm = nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.grad is not None], max_norm)
    return float(norm.full_tensor() if isinstance(norm, utils._dtensor()) else norm)


def make_optimizer(module: nn.Module, cfg: TrainConfig) -> torch.optim.Optimizer:
    """AdamW on what is trained; the update sets its learning rate."""
    trained, betas = [p for p in module.parameters() if p.requires_grad], (cfg.adam_beta1, cfg.adam_beta2)
    return torch.optim.AdamW(trained, lr=cfg.learning_rate, betas=betas, weight_decay=cfg.weight_decay, fused=True)
