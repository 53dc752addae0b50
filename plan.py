"""Does it fit, how long is a step, and which commands to type: estimates from the model's config, on any laptop.

    python plan.py --model_id Qwen/Qwen2.5-7B-Instruct --gpus 8 --gpu_memory 80 --prompt 500 --completion 4000

Takes every flag of train_grpo.py, and a few more. Weights, gradients and optimizer are exact. Activations and logits
are a rule of thumb, so peaks are right within about MARGIN, and SPARE of each GPU stays free. Checked against
benchmarks/results/simulate.md (1.5B to 72B, up to 256 GPUs) and against updates on CPUs. Images are not counted.
train_grpo.py uses the same estimates at start to choose settings left open. Times follow from two assumed rates of your
GPUs, --tflops and --memory_bandwidth.
"""
# ruff: noqa: E402 - as in train_grpo.py, errors on the command line appear before torch is imported

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

from config import BY_DOMAIN, ConfigError, TrainConfig, knobs_of, parse_args, words_of


class PlanConfig(TrainConfig):
    # --- plan ---
    strategy: Literal["auto", "ddp", "fsdp", "fsdp2"] = "auto"  # auto: ddp if it fits, else fsdp2
    gpus: int = 8  # GPUs in total; a single one is shared by server and trainer
    node_gpus: int = 8  # GPUs per machine; with several machines, each serves or trains
    gpu_memory: float = 80.0  # GiB of each GPU
    server_gpus: int | None = None  # GPUs that sample; unset: the split with the shortest step
    prompt: int | None = None  # mean tokens of a prompt; unset: max_prompt_length
    completion: int | None = None  # mean tokens of a completion; raises max_completion_length if above it
    overlap: bool = False  # train_async.py: sampling and update at the same time
    critic: bool = False  # train_ppo.py: a critic as large as the model
    gradient_checkpointing: bool | None = True  # recompute activations: less memory, 1/3 slower
    tflops: float = 350.0  # 10^12 bfloat16 operations per second of a GPU; 350 is 40 % of an H100's
    memory_bandwidth: float = 2000.0  # GB/s of a GPU reading its memory; 2000 is 60 % of an H100's

    def __post_init__(self):
        super().__post_init__()
        self.prompt = self.prompt or self.max_prompt_length
        self.completion = self.completion or self.max_completion_length
        self.max_prompt_length = max(self.max_prompt_length, self.prompt)
        self.max_completion_length = max(self.max_completion_length, self.completion)


CONFIG = parse_args(PlanConfig, description=__doc__.split("\n")[0]) if __name__ == "__main__" else None

import shlex
import sys
from collections import Counter

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

import utils
from inputs.processor import load_config
from modeling.loading import load_hf_model, to_train
from modeling.model import BYTES_IN_4_BITS, chunk_size, experts_of, push_bucket_mb

GIB = 2**30
MARGIN = 0.12  # error of the peaks: -6 % to +10 % against simulated ones
SPARE = 0.1  # share of a GPU's memory left to CUDA, NCCL and fragmentation
BUDGETS = [16384, 12288, 8192, 6144, 4096, 3072, 2048, 1024]  # --tokens_per_microbatch to choose from
VLLM_SHARE = 0.92  # share of a GPU's memory that vLLM takes by default (--gpu-memory-utilization)
VLLM_SPARE = 3 * GIB  # part of that share, for activations and graphs
MAX_SEQUENCES = 1024  # most that vLLM samples at the same time
HF_SEQUENCES = 256  # most that --generator hf decodes at a time

# ---- the trainer's bytes --------------------------------------------------------------------------------------------


@dataclass
class Sizes:
    """Parameter counts of a policy, by use."""

    trained: int
    frozen: int  # including those in 4 bits
    packed: int  # frozen in 4 bits
    layer: int  # of the largest decoder layer, which FSDP gathers at once
    learning: int  # trained ones in that layer
    head: int  # of the output layer, tied to the embeddings or not
    embedded: int  # of the embeddings if they are not tied, else 0
    tower: int  # outside decoder layers and embeddings, such as an image encoder: gathered with the head
    path: int  # inputs and outputs of a layer's matrices, which a token passes
    active: int  # weights used for one token; of a mixture's experts only the chosen ones
    text: PreTrainedConfig  # of the language model


def sizes_of(policy: nn.Module) -> Sizes:
    """Sizes of a policy without values, on the meta device: train_grpo.Policy, or the transformers model with its
    adapters."""
    model = next(module for module in policy.modules() if isinstance(module, PreTrainedModel))
    parameters = list(policy.named_parameters())
    text = model.config.get_text_config()
    experts, experts_per_token = experts_of(text)
    share = experts_per_token / experts if experts else 1.0

    def active(name: str, count: int) -> float:
        return count * (share if ".experts." in name else 1)

    def path(layer: nn.Module) -> float:
        """Inputs plus outputs of matrices [out, in], and of the experts [experts, out, in] that a token meets. Adapters
        do not count, as they share inputs."""
        matrices = [(name, p.shape) for name, p in layer.named_parameters() if p.ndim > 1 and "lora_" not in name]
        return sum(active(name, sum(shape[-2:]) * (shape[0] if len(shape) == 3 else 1)) for name, shape in matrices)

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    kinds = set(model._no_split_modules or [])
    layers = [module for module in model.get_decoder().modules() if type(module).__name__ in kinds] or [model]
    largest, head = max(layers, key=count), text.vocab_size * text.hidden_size
    embedded = 0 if getattr(text, "tie_word_embeddings", False) else head
    return Sizes(
        trained=sum(p.numel() for _, p in parameters if p.requires_grad),
        frozen=sum(p.numel() for _, p in parameters if not p.requires_grad),
        packed=sum(p.numel() for _, p in parameters if getattr(p, "in_4_bits", False)),
        layer=count(largest),
        learning=sum(p.numel() for p in largest.parameters() if p.requires_grad),
        head=head,
        embedded=embedded,
        tower=max(count(policy) - sum(map(count, layers)) - head - embedded, 0),
        path=round(max(map(path, layers))),
        active=round(sum(active(name, p.numel()) for name, p in parameters)),
        text=text,
    )


def longest_pass(cfg: TrainConfig, ranks: int) -> int:
    """Tokens of the largest possible micro-batch."""
    groups = max(cfg.prompts_per_step // ranks // cfg.num_minibatches, 1)
    prompts = 1 if cfg.shared_prefix else cfg.num_generations
    rank_tokens = groups * (prompts * cfg.max_prompt_length + cfg.num_generations * cfg.max_completion_length)
    return max(min(cfg.tokens_per_microbatch or 16384, rank_tokens), cfg.max_prompt_length + cfg.max_completion_length)


def bytes_needed(sizes: Sizes, cfg: TrainConfig, ranks: int, critic: bool = False) -> Counter:
    """Bytes on a rank's GPU at the peak of an update, by kind; "in CPU memory" is elsewhere.

    Fitted to measurements by benchmarks/simulate.py: forward and backward pass of a layer hold 1.8 times the numbers
    that its tokens pass in it, and logits exist in five float32 copies. Pixels are not counted.
    """
    master, compute = getattr(torch, cfg.dtype).itemsize, getattr(torch, cfg.compute_dtype).itemsize
    trained_in, unsharded = 4 if cfg.use_peft else master, cfg.strategy == "ddp"  # adapters are float32
    shards, all_weights = 1 if unsharded else cfg.shard_size or ranks, sizes.trained + sizes.frozen
    trained = trained_in * sizes.trained / shards
    frozen = (master * (sizes.frozen - sizes.packed) + sizes.packed / 2) / shards
    scales = (BYTES_IN_4_BITS - 0.5) * sizes.packed  # complete on each rank
    need = Counter(weights=trained + frozen + scales, optimizer=2 * trained)
    need["gradients"] = trained * (2 if unsharded and ranks > 1 else 1)  # with DDP's buckets
    if critic:
        need["critic"] = (3 + (unsharded and ranks > 1)) * trained + frozen  # its gradients are freed first
    if cfg.beta > 0 and not cfg.use_peft:
        need["reference"] = (4 if cfg.ref_sync_steps else compute) * all_weights / (1 if unsharded else shards)
    if cfg.teacher_id:  # its size is unknown here; assumed to be the policy's
        need["reference"] += compute * all_weights / shards
    if cfg.offload:
        need["in CPU memory"] = sum(need.pop(kind, 0) for kind in [*need])
    if cfg.generator == "hf" and not cfg.load_in:
        need["generator"] = compute * all_weights

    tokens = longest_pass(cfg, ranks)
    layer_inputs = compute * sizes.text.hidden_size * tokens * sizes.text.num_hidden_layers  # the input of each layer
    in_layer = 1.8 * compute * sizes.path * tokens
    if cfg.offload_activations:
        need["in CPU memory"] += layer_inputs
    elif not (cfg.gradient_checkpointing or cfg.offload_activations):
        need["activations"] = 0.9 * compute * sizes.path * tokens * sizes.text.num_hidden_layers
    else:
        need["activations"] = layer_inputs
    chunk = min(cfg.logprob_chunk or chunk_size(sizes.text.vocab_size, on_gpu=True), tokens)
    logits = 5 * 4 * chunk * sizes.text.vocab_size + compute * sizes.head
    if unsharded:  # weights of a layer, cast to the compute dtype
        gathered = compute * (sizes.layer if sizes.packed or master != compute else 0)
        at_head = 0
    else:
        gathered = compute * (2 * sizes.layer + sizes.learning + sizes.tower) + 4 * sizes.learning
        gathered += compute * (sizes.head + sizes.embedded * (cfg.strategy == "fsdp"))  # the root's, throughout
        at_head = compute * (sizes.head + sizes.tower)
    if in_layer + gathered > logits + at_head:
        return need + Counter({"a layer": in_layer, "gathered": gathered})
    return need + Counter({"logits": logits, "gathered": at_head})


def peak(need: Counter) -> int:
    return round(sum(size for kind, size in need.items() if kind != "in CPU memory"))


def kept_bytes(need: Counter) -> int:
    """Bytes that remain between two steps."""
    return round(sum(need[kind] for kind in ("weights", "optimizer", "critic", "reference", "generator")))


def fit_budget(sizes: Sizes, cfg: TrainConfig, ranks: int, usable: float, critic: bool) -> tuple[TrainConfig, Counter]:
    """The settings with the given --tokens_per_microbatch, or else the largest of BUDGETS with which a step fits into
    `usable` bytes (the smallest if none does); and the bytes that they need."""
    for tokens in [cfg.tokens_per_microbatch] if cfg.tokens_per_microbatch else BUDGETS:
        choice = replace(cfg, tokens_per_microbatch=tokens)
        need = bytes_needed(sizes, choice, ranks, critic)
        if peak(need) <= usable:
            break
    return choice, need


def settings_for(
    make_policy: Callable[[TrainConfig], nn.Module], cfg: TrainConfig, ranks: int, free: float | None, critic=False
) -> tuple[TrainConfig, str]:
    """The settings with train_grpo.py's own choices filled in; and a warning if they cannot fit, else "".

    make_policy: (cfg) -> the policy, unsharded, without values (train_grpo.empty_policy). free: bytes on the GPU with
    the least; None without GPUs: then no checkpointing, and 16,384 tokens. critic: whether there is one, as large as
    the policy.
    """
    if free is None:
        tokens = cfg.tokens_per_microbatch or BUDGETS[0]
        return replace(cfg, gradient_checkpointing=bool(cfg.gradient_checkpointing), tokens_per_microbatch=tokens), ""
    if cfg.gradient_checkpointing is None:
        cfg = replace(cfg, gradient_checkpointing=True)
    usable = free * (1 - SPARE)
    with torch.device("meta"):
        sizes = sizes_of(make_policy(cfg))
    choice, need = fit_budget(sizes, cfg, ranks, usable, critic)
    if peak(need) <= usable:
        return choice, ""
    return choice, (
        f"Warning: this needs about {peak(need) / GIB:.1f} GiB on a GPU, and {usable / GIB:.1f} GiB can be used "
        f"(--strategy {cfg.strategy}, {ranks} rank(s), {choice.tokens_per_microbatch} tokens per micro-batch). "
        "Less memory: --strategy fsdp2 on several ranks, --offload, --use_peft, --load_in 4bit; plan.py says what fits."
    )


def settings_by_memory(
    make_policy: Callable, cfg: TrainConfig, groups: list[int], device: torch.device, critic: bool
) -> TrainConfig:
    """`settings_for` the free memory of `device` and the largest of `groups`, the numbers of completions per row.
    Prints the warning. Collective."""
    largest = replace(cfg, num_generations=max(groups, default=cfg.num_generations))
    choice, warning = settings_for(make_policy, largest, utils.world_size(), utils.free_memory(device), critic=critic)
    if warning and utils.is_main():
        print(warning)
    return replace(choice, num_generations=cfg.num_generations)


# ---- the server, and seconds ----------------------------------------------------------------------------------------


def kv_bytes(config, split: int) -> int:
    """Bytes of a token's keys and values, in 16 bits, on each of `split` GPUs."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * 2 * text.num_hidden_layers * max(heads // split, 1) * width


def push_bytes(sizes: Sizes, cfg: PlanConfig) -> int:
    """Bytes that a push takes on a GPU of the server: the largest bucket, which may exceed its size by a layer, and the
    layer into which vLLM loads it. Adapters alone travel as files."""
    bucket = (cfg.push_bucket_mb or push_bucket_mb(sizes.trained + sizes.frozen)) * 2**20
    return 0 if cfg.push_lora == "adapters" else 2 * max(bucket + 2 * sizes.layer, 2 * sizes.head)


def serve(cfg: PlanConfig, config, sizes: Sizes, gpus: int, sequences: int) -> dict | None:
    """The fastest way to sample `sequences` completions of mean length on `gpus` GPUs, with the model of each server
    split over 1 to 8 of them; None if the model does not fit."""
    ways, heads = [], config.get_text_config().num_attention_heads
    for split in (n for n in (1, 2, 4, 8) if min(gpus, cfg.node_gpus) % n == 0 and heads % n == 0):
        kv, weights = kv_bytes(config, split), 2 * (sizes.trained + sizes.frozen) / split
        share = min(VLLM_SHARE, int(100 * (1 - (push_bytes(sizes, cfg) + GIB) / (cfg.gpu_memory * GIB))) / 100)
        room = cfg.gpu_memory * GIB * share - VLLM_SPARE - weights
        if room < kv * (cfg.max_prompt_length + cfg.max_completion_length):
            continue
        per_server = -(-sequences // (gpus // split))
        at_once = max(min(per_server, int(room / kv / (cfg.prompt + cfg.completion)), MAX_SEQUENCES), 1)
        bytes_read = weights * sizes.active / (sizes.trained + sizes.frozen) if at_once == 1 else weights
        bytes_read += at_once * kv * (cfg.prompt + cfg.completion / 2)  # per token, for all completions at once
        token = bytes_read / (cfg.memory_bandwidth * 1e9) + 2 * sizes.active * at_once / (cfg.tflops * 1e12 * split)
        seconds = cfg.completion * token * per_server / at_once
        ways.append(dict(split=split, weights=weights, kv=room, at_once=at_once, seconds=seconds, share=share))
    return min(ways, key=lambda way: way["seconds"], default=None)


def update_seconds(cfg: PlanConfig, sizes: Sizes, ranks: int) -> float:
    """Seconds of an update, counting matrix products alone. Operations per weight and token: 2 forward, 4 backward, 2
    to recompute a layer, 2 for each further pass (log-probs before the update, of a reference, of a critic)."""
    prompts = 1 if cfg.shared_prefix else cfg.num_generations
    tokens = cfg.prompts_per_step * (prompts * cfg.prompt + cfg.num_generations * cfg.completion)
    per_token = 2 + (2 if cfg.use_peft else 4) + 2 * bool(cfg.gradient_checkpointing)
    passes = per_token * cfg.num_iterations * (1 + cfg.critic)
    passes += 2 * (cfg.num_iterations * cfg.num_minibatches > 1) + 2 * (cfg.beta > 0)
    return passes * sizes.active * tokens / (ranks * cfg.tflops * 1e12)


# ---- a split, and the output -----------------------------------------------------------------------------------------


def split(cfg: PlanConfig, config, sizes: Sizes, server_gpus: int) -> dict:
    """The plan for one way to divide the GPUs: the first strategy that fits, else the last."""
    ranks, usable = cfg.gpus - server_gpus, cfg.gpu_memory * GIB * (1 - SPARE)
    unit = ranks * cfg.num_minibatches
    cfg = replace(cfg, prompts_per_step=max(round(cfg.prompts_per_step / unit), 1) * unit)
    choices = [cfg]
    if cfg.strategy == "auto":
        sharded = replace(cfg, strategy="fsdp2")
        choices = [replace(cfg, strategy="ddp"), sharded] + ([] if cfg.load_in else [replace(sharded, offload=True)])
    for choice in choices:
        choice, need = fit_budget(sizes, choice, ranks, usable, cfg.critic)
        if trains := peak(need) <= usable:
            break
    server = serve(choice, config, sizes, server_gpus, choice.sequences_per_step)
    sample, update = server["seconds"] if server else float("inf"), update_seconds(choice, sizes, ranks)
    step = max(sample, update) if cfg.overlap else sample + update
    shards = f" --shard_size {cfg.shard_size}" if cfg.shard_size else ""
    return dict(
        cfg=choice, need=need, server=server, ranks=ranks, server_gpus=server_gpus, sample=sample,
        rest=update, step=step, fits=trains and bool(server), pace=choice.sequences_per_step / step,
        strategy=f"{choice.strategy}{shards}" + " --offload" * choice.offload,
    )  # fmt: skip


def server_line(cfg: TrainConfig, port: int, gpus: str, options: str) -> str:
    model = "unpacked" if cfg.load_in else shlex.quote(cfg.model_id)
    lora = " --enable-lora" * (cfg.push_lora == "adapters")
    window = cfg.max_prompt_length + cfg.max_completion_length
    return f"{gpus}python vllm_server.py --model {model} --port {port} --max-model-len {window}{options}{lora} &"


def commands(plan: dict, cfg: PlanConfig) -> list[str]:
    """The lines to type: one per server, then the trainer's. For several machines only one server's and the script's,
    as launchers differ (docs/serving.md)."""
    server, choice = plan["server"], replace(plan["cfg"], server_timeout=1800.0)
    options = f" --tensor-parallel-size {server['split']}" * (server["split"] > 1)
    options += f" --gpu-memory-utilization {server['share']:g}" * (server["share"] < VLLM_SHARE)
    if cfg.gpus > cfg.node_gpus:
        script = f"{script_of(cfg)} {shlex.join(flags(choice))}"
        return ["# docs/serving.md, Several nodes:", server_line(choice, 8000, "", " --host 0.0.0.0" + options), script]
    lines, urls = before(cfg), []
    for number, first in enumerate(range(0, plan["server_gpus"], server["split"])):
        urls.append(f"http://127.0.0.1:{8000 + number}")
        lines.append(server_line(choice, 8000 + number, visible(first, first + server["split"]), options))
    trainer = f"torchrun --nproc_per_node={plan['ranks']} {script_of(cfg)}"
    arguments = shlex.join(flags(replace(choice, server_urls=urls)))
    return [*lines, f"{visible(plan['server_gpus'], cfg.gpus)}{trainer} {arguments}"]


def visible(first: int, end: int) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(first, end)))} "


def before(cfg: PlanConfig) -> list[str]:
    secret = "export VLLM_SERVER_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(16))')"
    unpack = f"python scripts/unpacked.py {shlex.quote(cfg.model_id)} unpacked"  # what the server loads
    return [secret, *([unpack] if cfg.load_in else [])]


def script_of(cfg: PlanConfig) -> str:
    return "train_async.py" if cfg.overlap else "train_ppo.py" if cfg.critic else "train_grpo.py"


def flags(cfg: PlanConfig) -> list[str]:
    """Command-line words of the model, and of every setting that differs from the script's default. With domains,
    --config has to name the file that lists them; settings that may differ by domain are left to that file."""
    defaults, settings = knobs_of(script_of(cfg).removesuffix(".py"))(), {"model_id": cfg.model_id}
    for field in fields(TrainConfig):
        value, default = getattr(cfg, field.name), getattr(defaults, field.name)
        in_file = bool(cfg.domains) and field.name in {"domains", *BY_DOMAIN}
        if value not in (default, field.default if cfg.critic else default) and field.repr and not in_file:
            settings[field.name] = value
    return ["--config", "MIX.yaml"] * bool(cfg.domains) + words_of(settings)


def table(need: Counter, cfg: PlanConfig) -> str:
    usable = cfg.gpu_memory * (1 - SPARE)
    lines = [f"  {kind:<15}{need[kind] / GIB:8.1f} GiB" for kind in need if need[kind] and kind != "in CPU memory"]
    verdict = "fits" if peak(need) / GIB <= usable else "does NOT fit"
    lines.append(f"  {'peak':<15}{peak(need) / GIB:8.1f} GiB within {MARGIN:.0%}, of {usable:.0f}: {verdict}")
    if need["in CPU memory"]:
        lines.append(f"  {'in CPU memory':<15}{need['in CPU memory'] / GIB:8.1f} GiB for each GPU")
    return "\n".join(lines)


def on_one_gpu(cfg: PlanConfig, config, sizes: Sizes) -> int:
    """Prints whether a server and the trainer fit on one GPU, at the same time or in turns, or the trainer with
    --generator hf; and what to type. Returns 1 if nothing fits."""
    cfg = replace(cfg, strategy="ddp" if cfg.strategy == "auto" else cfg.strategy)
    usable, kv = cfg.gpu_memory * GIB * (1 - SPARE), kv_bytes(config, 1)
    window = cfg.max_prompt_length + cfg.max_completion_length
    server_bytes = 2 * (sizes.trained + sizes.frozen) + VLLM_SPARE + push_bytes(sizes, cfg)
    server_bytes += cfg.num_generations * kv * window  # at least one group
    hf_bytes = min(cfg.sequences_per_step, HF_SEQUENCES) * kv * window
    # (name, settings, bytes while sampling, bytes of it that stay while the trainer works)
    ways = [("a server beside the trainer", dict(generator="vllm", colocate=False), server_bytes, server_bytes)]
    if not cfg.load_in and cfg.strategy == "ddp":  # the script refuses it otherwise
        ways.append(("by turns", dict(generator="vllm", colocate=True, push_lora="auto"), server_bytes, 0))
    ways.append(("--generator hf, no server", dict(generator="hf", push_lora="auto"), hf_bytes, 0))
    any_fits = False
    for name, changes, sampler, resident in ways:
        choice, need = fit_budget(sizes, replace(cfg, **changes), 1, usable - resident, False)
        total = max(peak(need) + resident, sampler + kept_bytes(need) * (choice.generator == "hf"))
        any_fits = any_fits or total <= usable
        fits = "yes" if total <= usable else "NO"
        print(f"On one GPU, {name}: {fits}, {total / GIB:.1f} of {usable / GIB:.1f} GiB, {sampler / GIB:.1f} to sample")
        print(table(need, cfg))
        if total > usable:
            continue
        if choice.generator == "vllm":
            share = int(100 * (usable - (0 if choice.colocate else peak(need))) / (cfg.gpu_memory * GIB)) / 100
            options = f" --gpu-memory-utilization {min(share, VLLM_SHARE):g}" + " --enable-sleep-mode" * choice.colocate
            print("\n".join([*before(cfg), server_line(choice, 8000, "", options)]))
        print(f"python {script_of(cfg)} {shlex.join(flags(replace(choice, server_timeout=1800.0)))}\n")
    return int(not any_fits)


def check(cfg: PlanConfig) -> None:
    if cfg.server_gpus is not None and not 1 <= cfg.server_gpus < cfg.gpus:
        raise ConfigError(f"--server_gpus={cfg.server_gpus} of --gpus={cfg.gpus}: server and trainer need one each.")
    if cfg.gpus > cfg.node_gpus and (cfg.gpus % cfg.node_gpus or (cfg.server_gpus or 0) % cfg.node_gpus):
        given = f"--gpus={cfg.gpus} --server_gpus={cfg.server_gpus}"
        raise ConfigError(f"{given}: beyond --node_gpus={cfg.node_gpus}, give multiples of it (whole machines).")
    if cfg.critic and cfg.overlap:
        raise ConfigError("--critic --overlap: train_async.py has no critic; plan one of them at a time.")


def main(cfg: PlanConfig) -> int:
    """Print the plan. Returns 1 if nothing fits."""
    check(cfg)

    if cfg.use_peft and cfg.generator == "vllm" and cfg.push_lora == "auto":
        cfg = replace(cfg, push_lora="adapters")  # as the printed server commands allow
    config = load_config(cfg.model_id)
    with torch.device("meta"):
        sizes = sizes_of(to_train(load_hf_model(cfg, getattr(torch, cfg.dtype), config), cfg))
    name = f"{cfg.model_id}: {(sizes.trained + sizes.frozen) / 1e9:.2f} B parameters"
    if cfg.gpus == 1:
        print(f"{name}, one GPU of {cfg.gpu_memory:g} GiB\n")
        return on_one_gpu(cfg, config, sizes)
    unit = cfg.node_gpus if cfg.gpus > cfg.node_gpus else 1
    shares = [cfg.server_gpus] if cfg.server_gpus else range(unit, cfg.gpus, unit)
    shares = [share for share in shares if (cfg.gpus - share) % (cfg.shard_size or 1) == 0]
    if not shares:
        given = f"--shard_size={cfg.shard_size} of --gpus={cfg.gpus} --server_gpus={cfg.server_gpus}"
        raise ConfigError(f"{given}: it must divide the trainer's GPUs; give a smaller one, or other GPUs.")
    plans = [split(cfg, config, sizes, share) for share in shares]
    best = max(plans, key=lambda plan: (plan["fits"], plan["pace"]))
    choice, server = best["cfg"], best["server"]
    print(f"{name}, {cfg.gpus} GPUs of {cfg.gpu_memory:g} GiB\n")
    micro_batches = f"micro-batches of {choice.tokens_per_microbatch} tokens"
    print(f"Trainer: {best['ranks']} of {cfg.gpus} GPUs, {best['strategy']}, {micro_batches}")
    print(table(best["need"], cfg))
    if server:
        at_once = f"{server['split']} a server, {server['at_once']} completions at once"
        print(f"Server: {best['server_gpus']} of {cfg.gpus} GPUs, {at_once}")
        print(f"  {'weights':<15}{server['weights'] / GIB:8.1f} GiB\n  {'KV cache':<15}{server['kv'] / GIB:8.1f} GiB")
    else:
        print(f"Server: the model and one completion do not fit on {best['server_gpus']} GPU(s)")
    prompts = choice.prompts_per_step
    rounded = f" ({cfg.prompts_per_step} cannot be shared evenly)" * (prompts != cfg.prompts_per_step)
    print(f"Step of {prompts} prompts{rounded} x {choice.num_generations} completions, by the two rates:")
    print(f"  sampling {best['sample']:.2f} s, the rest {best['rest']:.2f} s" + " beside it" * cfg.overlap)
    if len(plans) > 1:
        print("\nserver GPUs   trainer GPUs   strategy         peak GiB   s a step   completions/s")
    for plan in plans if len(plans) > 1 else ():
        row = f"{plan['server_gpus']:<14}{plan['ranks']:<15}{plan['strategy']:<17}{peak(plan['need']) / GIB:<11.1f}"
        print(f"{row}{plan['step']:<11.1f}{plan['pace']:.2f}{'' if plan['fits'] else '   does not fit'}")
    if best["fits"]:
        print("\nTo type:\n\n" + "\n".join(commands(best, cfg)))
    return 0 if best["fits"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main(CONFIG))
    except ConfigError as error:
        sys.exit(f"plan.py: error: {error}")
