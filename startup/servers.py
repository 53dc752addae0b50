"""Make a run's generator. Servers must serve the trained model, with a large enough window, and take pushes."""

import functools
import re
import uuid

import torch
from torch import nn

import utils
from config import ConfigError, TrainConfig
from inputs import prompts
from inputs.vision import placeholder_tokens
from modeling import router_replay
from modeling.loading import load_hf_model
from modeling.model import rope_index_of, shapes_of, why_not_alone, window_of
from modeling.parameters import as_in_a_checkpoint
from safety.results import say_once
from vllm_client import VLLMClient


def make_generator(cfg: TrainConfig, hf_model: nn.Module, processor, device: torch.device):
    """The generator: vLLM servers, after a check that they serve this model, or a copy of the model in this process,
    or, with a base in 4 bits, the policy itself. A generator of your own needs the interface of HFGenerator
    (hf_generator.py)."""
    if cfg.generator == "vllm":
        generator = connect(cfg, hf_model, device)
    else:
        from hf_generator import HFGenerator, PolicyGenerator

        window, needed = window_of(hf_model.config), cfg.max_prompt_length + cfg.max_completion_length
        if window and needed > window:
            flags = f"--max_prompt_length + --max_completion_length = {needed}"
            say_once(f"{cfg.model_id} has a window of {window} tokens, less than {flags}: some completions end there.")
        if cfg.load_in:
            generator = PolicyGenerator(hf_model, processor, getattr(torch, cfg.compute_dtype))
        else:
            generator = HFGenerator(load_hf_model(cfg, getattr(torch, cfg.compute_dtype)).to(device), processor)
    generator.tokenizer, generator.stop_token_ids = processor, sorted(prompts.end_ids(hf_model, processor))
    generator.rope_index = rope_index_of(hf_model)  # for positions of prompts with images
    router_replay.ask(generator, hf_model, cfg)  # with --router_replay it reports its experts
    return generator


def reach(cfg: TrainConfig) -> VLLMClient:
    """The client of --server_urls, once the servers are ready. ConfigError if --colocate needs them to sleep and they
    cannot."""
    client = VLLMClient(cfg.server_urls, cfg.server_token, None, cfg.server_timeout, cfg.request_timeout)
    if utils.is_main():
        print(f"waiting up to {cfg.server_timeout:g} s for {', '.join(cfg.server_urls)}", flush=True)
    client.wait_ready(cfg.server_timeout)
    if cfg.colocate and not all(info.can_sleep for info in client.server_info()):
        raise ConfigError(f"--colocate: start the server at {client.urls[0]} with --enable-sleep-mode.")
    return client


def connect(cfg: TrainConfig, hf_model: nn.Module, device: torch.device) -> VLLMClient:
    """The client of --server_urls, checked against this model, and connected on rank 0 to push. Collective."""
    client = reach(cfg)
    infos, config = client.server_info(), hf_model.config.get_text_config()
    check_model(client.urls, infos, config, cfg.max_prompt_length + cfg.max_completion_length)
    # Each start gets a name of its own, which tells its weights from those of an earlier run of the same name.
    name = re.sub(r"[^\w.-]", "-", cfg.run_name or "run", flags=re.ASCII)[:48]
    client.run = utils.gather_objects(f"{name}-{uuid.uuid4().hex[:6]}")[0]
    client.receives_weights, client.asleep = utils.is_main(), cfg.colocate  # train_grpo.py put it to sleep
    client.weight_dtype = getattr(torch, infos[0].dtype)
    client.convert = functools.partial(as_in_a_checkpoint, hf_model)
    client.never = placeholder_tokens(hf_model.config)  # the trainer would take one for an image
    client.versions = getattr(cfg, "max_staleness", 0) + 1
    if cfg.use_peft and cfg.push_lora != "folded":
        choose_adapters(client, infos, hf_model, cfg)
    if client.receives_weights:
        client.connect_weights(device)
        if client.adapter is None:
            print(f"weights travel by the server's {client.engine!r} engine")
    return client


def check_model(urls: list[str], infos: list, config, window: int) -> None:
    """ConfigError unless the servers serve the trained model, with a window for prompt and completion."""
    trained_sizes = (config.vocab_size, config.hidden_size, config.num_hidden_layers)
    for url, info in zip(urls, infos, strict=True):
        served_sizes = (info.vocab_size, info.hidden_size, info.num_layers)
        if served_sizes != trained_sizes and info.vocab_size is not None:
            raise ConfigError(
                f"{url} serves {info.model} with (vocabulary, hidden size, layers) {served_sizes}, not the trainer's "
                f"{trained_sizes}. Start the server with the trainer's --model_id as its --model."
            )
        if info.window < window:
            needed = f"--max_prompt_length + --max_completion_length come to {window}"
            remedy = f"lower them, or start it with --max-model-len {window}"
            raise ConfigError(f"{url} has a window of {info.window} tokens, but {needed}: {remedy}.")


def choose_adapters(client: VLLMClient, infos: list, hf_model: nn.Module, cfg: TrainConfig) -> None:
    """Push adapters alone if every server can take them; on CPUs only if --push_lora adapters asks for it, since vLLM
    samples at least ten times slower with adapters there. Else LoRA is folded into the weights, with a printed reason,
    or ConfigError under --push_lora adapters. Collective."""
    is_required = cfg.push_lora == "adapters" or cfg.load_in
    reason = why_not_alone(hf_model)
    if cfg.colocate:
        reason = "with --colocate the server drops its weights at each step, so all are pushed"
    elif not is_required and any(None in info.gpus for info in infos):
        reason = "the server is on CPUs, where sampling is faster that way"
    if reason is None and client.receives_weights:
        reason = client.why_no_adapters(shapes_of(hf_model))
    reason, client.adapter = utils.gather_objects((reason, client.adapter))[0]
    if reason is not None and cfg.load_in:
        raise ConfigError(f"--load_in {cfg.load_in}: {reason}. Adapters must travel alone, or use --generator hf.")
    if reason is not None and cfg.push_lora == "adapters":
        raise ConfigError(f"--push_lora adapters: {reason}. Or have LoRA folded into the weights: --push_lora folded.")
    if utils.is_main():
        manner = "travels as adapters alone" if reason is None else "is folded into the weights that are pushed: "
        print(f"LoRA {manner}{reason or ''}.")
