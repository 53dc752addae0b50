"""Will it fit, about how long is a step, and what to type: arithmetic on the model's config, on any laptop.

    python plan.py --model_id Qwen/Qwen2.5-7B-Instruct --gpus 8 --gpu_memory 80 --prompt 500 --completion 4000

Takes every flag of train_grpo.py, and a few of its own. Weights, gradients and optimizer are exact. Activations and
logits are a rule of thumb, so peaks are right within about MARGIN, and SPARE of each GPU stays free. Checked against
benchmarks/results/simulate.md (1.5B to 72B, up to 256 GPUs) and against updates on CPUs; pictures are not counted.
train_grpo.py uses the same at start, to choose what was left open. Seconds are two rates, assumptions about your GPUs.
"""
# ruff: noqa: E402 - as in train_grpo.py, mistakes on the command line answer before torch is imported

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Literal

from config import BY_DOMAIN, ConfigError, TrainConfig, knobs_of, parse_args, words_of


class PlanConfig(TrainConfig):
    # --- plan ---
    strategy: Literal["auto", "ddp", "fsdp", "fsdp2"] = "auto"  # auto: ddp if it fits, else fsdp2
    gpus: int = 8  # GPUs in all; of one, server and trainer have a part each
    node_gpus: int = 8  # GPUs of a machine; of several machines each serves or trains
    gpu_memory: float = 80.0  # GiB of each
    server_gpus: int | None = None  # how many of them sample; unset: the split with the shortest step
    prompt: int | None = None  # mean tokens of a prompt; unset: max_prompt_length
    completion: int | None = None  # mean tokens of a completion, and max_completion_length where that is less
    overlap: bool = False  # train_async.py: sampling and update at the same time
    critic: bool = False  # train_ppo.py: a critic as large as the model
    tflops: float = 350.0  # 10^12 operations a second of a GPU in bfloat16; 350 is 40 % of an H100's
    memory_bandwidth: float = 2000.0  # GB/s of a GPU reading its memory; 2000 is 60 % of an H100's

    def __post_init__(self):
        super().__post_init__()
        self.prompt = self.prompt or self.max_prompt_length
        self.completion = self.completion or self.max_completion_length
        self.max_prompt_length = max(self.max_prompt_length, self.prompt)
        self.max_completion_length = max(self.max_completion_length, self.completion)
        if self.gradient_checkpointing is None:
            self.gradient_checkpointing = True


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
MARGIN = 0.12  # within which peaks are right: -6 % to +10 % of those simulated
SPARE = 0.1  # of a GPU's memory that is left to CUDA, NCCL and fragmentation
BUDGETS = [16384, 12288, 8192, 6144, 4096, 3072, 2048, 1024]  # --tokens_per_microbatch to choose from
VLLM_SHARE = 0.92  # of a GPU's memory that vLLM takes, unless told (--gpu-memory-utilization)
VLLM_SPARE = 3 * GIB  # of it, for its activations and graphs
MAX_SEQUENCES = 1024  # that vLLM samples at the same time
HF_SEQUENCES = 256  # that --generator hf decodes at a time

# ---- the trainer's bytes --------------------------------------------------------------------------------------------


@dataclass
class Sizes:
    """Numbers of a policy, by what becomes of them."""

    trained: int
    frozen: int  # in 4 bits or not
    packed: int  # in 4 bits
    layer: int  # of the largest decoder layer, which FSDP gathers at once
    learning: int  # of these, trained
    head: int  # of the output layer, tied to the embeddings or not
    embedded: int  # of the embeddings where they are not tied, else 0
    tower: int  # of what is in no decoder layer and no embedding, such as images' encoder: gathered with the head
    path: int  # that a token passes in a layer: inputs and outputs of its matrices
    active: int  # weights that a token is multiplied with: of a mixture's experts, the chosen ones
    text: PreTrainedConfig  # of the language model


def sizes_of(policy: nn.Module) -> Sizes:
    """policy: without values, on the meta device; train_grpo.Policy, or the transformers model with its adapters."""
    model = next(module for module in policy.modules() if isinstance(module, PreTrainedModel))
    named = list(policy.named_parameters())
    text = model.config.get_text_config()
    experts, chosen = experts_of(text)
    share = chosen / experts if experts else 1.0

    def active(name: str, count: int) -> float:
        return count * (share if ".experts." in name else 1)

    def path(layer: nn.Module) -> float:
        """Of [out, in], and of experts [experts, out, in] those that a token meets. Adapters share their inputs."""
        matrices = [(name, p.shape) for name, p in layer.named_parameters() if p.ndim > 1 and "lora_" not in name]
        return sum(active(name, sum(shape[-2:]) * (shape[0] if len(shape) == 3 else 1)) for name, shape in matrices)

    def count(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    kinds = set(model._no_split_modules or [])
    layers = [module for module in model.get_decoder().modules() if type(module).__name__ in kinds] or [model]
    largest, head = max(layers, key=count), text.vocab_size * text.hidden_size
    embedded = 0 if getattr(text, "tie_word_embeddings", False) else head
    return Sizes(
        trained=sum(p.numel() for _, p in named if p.requires_grad),
        frozen=sum(p.numel() for _, p in named if not p.requires_grad),
        packed=sum(p.numel() for _, p in named if getattr(p, "in_4_bits", False)),
        layer=count(largest),
        learning=sum(p.numel() for p in largest.parameters() if p.requires_grad),
        head=head,
        embedded=embedded,
        tower=max(count(policy) - sum(map(count, layers)) - head - embedded, 0),
        path=round(max(map(path, layers))),
        active=round(sum(active(name, p.numel()) for name, p in named)),
        text=text,
    )


def longest_pass(cfg: TrainConfig, ranks: int) -> int:
    """Tokens of the largest micro-batch there can be."""
    groups = max(cfg.prompts_per_step // ranks // cfg.num_minibatches, 1)
    prompts = 1 if cfg.shared_prefix else cfg.num_generations
    everything = groups * (prompts * cfg.max_prompt_length + cfg.num_generations * cfg.max_completion_length)
    return max(min(cfg.tokens_per_microbatch or 16384, everything), cfg.max_prompt_length + cfg.max_completion_length)


def bytes_needed(sizes: Sizes, cfg: TrainConfig, ranks: int, critic: bool = False) -> Counter:
    """Bytes on a rank's GPU at the peak of an update, by kind; "in CPU memory" lies elsewhere.

    Fitted to what benchmarks/simulate.py counts: a layer's forward and backward pass hold 1.8 times the numbers that
    its tokens pass in it, and of logits there are five copies in float32. Pixels are not counted.
    """
    master, compute = getattr(torch, cfg.dtype).itemsize, getattr(torch, cfg.compute_dtype).itemsize
    trained_in, alone = 4 if cfg.use_peft else master, cfg.strategy == "ddp"  # adapters are float32
    shards, everything = 1 if alone else cfg.shard_size or ranks, sizes.trained + sizes.frozen
    trained = trained_in * sizes.trained / shards
    frozen = (master * (sizes.frozen - sizes.packed) + sizes.packed / 2) / shards
    scales = (BYTES_IN_4_BITS - 0.5) * sizes.packed  # whole on each rank
    need = Counter(weights=trained + frozen + scales, optimizer=2 * trained)
    need["gradients"] = trained * (2 if alone and ranks > 1 else 1)  # DDP's buckets beside them
    if critic:
        need["critic"] = (3 + (alone and ranks > 1)) * trained + frozen  # its gradients are gone when the policy's come
    if cfg.beta > 0 and not cfg.use_peft:
        need["reference"] = (4 if cfg.ref_sync_steps else compute) * everything / (1 if alone else shards)
    if cfg.teacher_id:  # its size is not known here: taken for the policy's
        need["reference"] += compute * everything / shards
    if cfg.offload:
        need["in CPU memory"] = sum(need.pop(kind, 0) for kind in [*need])
    if cfg.generator == "hf" and not cfg.load_in:
        need["generator"] = compute * everything

    tokens = longest_pass(cfg, ranks)
    between = compute * sizes.text.hidden_size * tokens * sizes.text.num_hidden_layers  # the input of each layer
    within = 1.8 * compute * sizes.path * tokens
    if cfg.offload_activations:
        need["in CPU memory"] += between
    elif not (cfg.gradient_checkpointing or cfg.offload_activations):
        need["activations"] = 0.9 * compute * sizes.path * tokens * sizes.text.num_hidden_layers
    else:
        need["activations"] = between
    chunk = min(cfg.logprob_chunk or chunk_size(sizes.text.vocab_size, on_gpu=True), tokens)
    logits = 5 * 4 * chunk * sizes.text.vocab_size + compute * sizes.head
    if alone:  # weights in the compute dtype, made for a layer
        gathered = compute * (sizes.layer if sizes.packed or master != compute else 0)
        at_head = 0
    else:
        gathered = compute * (2 * sizes.layer + sizes.learning + sizes.tower) + 4 * sizes.learning
        gathered += compute * (sizes.head + sizes.embedded * (cfg.strategy == "fsdp"))  # the root's, from end to end
        at_head = compute * (sizes.head + sizes.tower)
    if within + gathered > logits + at_head:
        return need + Counter({"a layer": within, "gathered": gathered})
    return need + Counter({"logits": logits, "gathered": at_head})


def peak(need: Counter) -> int:
    return round(sum(size for kind, size in need.items() if kind != "in CPU memory"))


def kept(need: Counter) -> int:
    """Bytes between two steps."""
    return round(sum(need[kind] for kind in ("weights", "optimizer", "critic", "reference", "generator")))


def fitted(sizes: Sizes, cfg: TrainConfig, ranks: int, usable: float, critic: bool) -> tuple[TrainConfig, Counter]:
    """The settings with the given --tokens_per_microbatch, or the largest of BUDGETS with which a step fits into
    `usable` bytes, the smallest if none does; and what they need."""
    for tokens in [cfg.tokens_per_microbatch] if cfg.tokens_per_microbatch else BUDGETS:
        chosen = replace(cfg, tokens_per_microbatch=tokens)
        need = bytes_needed(sizes, chosen, ranks, critic)
        if peak(need) <= usable:
            break
    return chosen, need


def settled(
    make_policy: Callable[[TrainConfig], nn.Module], cfg: TrainConfig, ranks: int, free: float | None, critic=False
) -> tuple[TrainConfig, str]:
    """The settings with what was left to train_grpo.py, and a warning where they cannot fit, else "".

    make_policy: (cfg) -> the policy, unsharded, without values (train_grpo.empty_policy). free: bytes on the GPU that
    has least; None without one: then no checkpointing, and 16,384 tokens. critic: there is one as large as the policy.
    """
    if free is None:
        tokens = cfg.tokens_per_microbatch or BUDGETS[0]
        return replace(cfg, gradient_checkpointing=bool(cfg.gradient_checkpointing), tokens_per_microbatch=tokens), ""
    if cfg.gradient_checkpointing is None:
        cfg = replace(cfg, gradient_checkpointing=True)
    usable = free * (1 - SPARE)
    with torch.device("meta"):
        sizes = sizes_of(make_policy(cfg))
    chosen, need = fitted(sizes, cfg, ranks, usable, critic)
    if peak(need) <= usable:
        return chosen, ""
    return chosen, (
        f"Warning: this needs about {peak(need) / GIB:.1f} GiB on a GPU, and {usable / GIB:.1f} GiB can be used "
        f"(--strategy {cfg.strategy}, {ranks} rank(s), {chosen.tokens_per_microbatch} tokens a micro-batch). Less take "
        "--strategy fsdp2 on several ranks, --offload, --use_peft, --load_in 4bit; plan.py says which of them fits."
    )


def planned(
    make_policy: Callable, cfg: TrainConfig, groups: list[int], device: torch.device, critic: bool
) -> TrainConfig:
    """`settled` on the free memory of `device`, for the largest of `groups`, which are the completions of each row;
    prints the warning. Collective."""
    asked = replace(cfg, num_generations=max(groups, default=cfg.num_generations))
    chosen, warning = settled(make_policy, asked, utils.world_size(), utils.free_memory(device), critic=critic)
    if warning and utils.is_main():
        print(warning)
    return replace(chosen, num_generations=cfg.num_generations)


# ---- the server, and seconds ----------------------------------------------------------------------------------------


def kv_bytes(config, split: int) -> int:
    """Of a token's keys and values in 16 bits, on each of `split` GPUs."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * 2 * text.num_hidden_layers * max(heads // split, 1) * width


def push_bytes(sizes: Sizes, cfg: PlanConfig) -> int:
    """What a push takes on a GPU of the server: the largest bucket, which may be a layer over its size, and the layer
    that vLLM loads it into. Adapters alone travel as files."""
    bucket = (cfg.push_bucket_mb or push_bucket_mb(sizes.trained + sizes.frozen)) * 2**20
    return 0 if cfg.push_lora == "adapters" else 2 * max(bucket + 2 * sizes.layer, 2 * sizes.head)


def serve(cfg: PlanConfig, config, sizes: Sizes, gpus: int, sequences: int) -> dict | None:
    """The fastest way to sample `sequences` completions of mean length on `gpus` GPUs, each server with the model split
    over 1 to 8 of them; None if the model does not fit."""
    ways, heads = [], config.get_text_config().num_attention_heads
    for split in (n for n in (1, 2, 4, 8) if min(gpus, cfg.node_gpus) % n == 0 and heads % n == 0):
        kv, weights = kv_bytes(config, split), 2 * (sizes.trained + sizes.frozen) / split
        share = min(VLLM_SHARE, int(100 * (1 - (push_bytes(sizes, cfg) + GIB) / (cfg.gpu_memory * GIB))) / 100)
        room = cfg.gpu_memory * GIB * share - VLLM_SPARE - weights
        if room < kv * (cfg.max_prompt_length + cfg.max_completion_length):
            continue
        each = -(-sequences // (gpus // split))
        at_once = max(min(each, int(room / kv / (cfg.prompt + cfg.completion)), MAX_SEQUENCES), 1)
        read = weights * sizes.active / (sizes.trained + sizes.frozen) if at_once == 1 else weights
        read += at_once * kv * (cfg.prompt + cfg.completion / 2)  # by each token of all that are sampled
        token = read / (cfg.memory_bandwidth * 1e9) + 2 * sizes.active * at_once / (cfg.tflops * 1e12 * split)
        seconds = cfg.completion * token * each / at_once
        ways.append(dict(split=split, weights=weights, kv=room, at_once=at_once, seconds=seconds, share=share))
    return min(ways, key=lambda way: way["seconds"], default=None)


def update_seconds(cfg: PlanConfig, sizes: Sizes, ranks: int) -> float:
    """Of what follows sampling: products alone. Forward 2 operations a weight and token, backward 4, 2 to compute a
    layer again, 2 for each further pass (log-probs before the update, of a reference, of a critic)."""
    prompts = 1 if cfg.shared_prefix else cfg.num_generations
    tokens = cfg.prompts_per_step * (prompts * cfg.prompt + cfg.num_generations * cfg.completion)
    each = 2 + (2 if cfg.use_peft else 4) + 2 * bool(cfg.gradient_checkpointing)
    passes = each * cfg.num_iterations * (1 + cfg.critic)
    passes += 2 * (cfg.num_iterations * cfg.num_minibatches > 1) + 2 * (cfg.beta > 0)
    return passes * sizes.active * tokens / (ranks * cfg.tflops * 1e12)


# ---- a split, and what to print -------------------------------------------------------------------------------------


def split(cfg: PlanConfig, config, sizes: Sizes, server_gpus: int) -> dict:
    """Everything about one way to divide the GPUs: the first strategy that fits, else the last."""
    ranks, usable = cfg.gpus - server_gpus, cfg.gpu_memory * GIB * (1 - SPARE)
    unit = ranks * cfg.num_minibatches
    cfg = replace(cfg, prompts_per_step=max(round(cfg.prompts_per_step / unit), 1) * unit)
    tried = [cfg]
    if cfg.strategy == "auto":
        sharded = replace(cfg, strategy="fsdp2")
        tried = [replace(cfg, strategy="ddp"), sharded] + ([] if cfg.load_in else [replace(sharded, offload=True)])
    for choice in tried:
        choice, need = fitted(sizes, choice, ranks, usable, cfg.critic)
        if trains := peak(need) <= usable:
            break
    server = serve(choice, config, sizes, server_gpus, choice.sequences_per_step)
    sample, rest = server["seconds"] if server else float("inf"), update_seconds(choice, sizes, ranks)
    step = max(sample, rest) if cfg.overlap else sample + rest
    return dict(
        cfg=choice, need=need, server=server, ranks=ranks, server_gpus=server_gpus, sample=sample,
        rest=rest, step=step, fits=trains and bool(server), pace=choice.sequences_per_step / step,
    )  # fmt: skip


def server_line(cfg: TrainConfig, port: int, gpus: str, more: str) -> str:
    model = "unpacked" if cfg.load_in else shlex.quote(cfg.model_id)
    lora = " --enable-lora" * (cfg.push_lora == "adapters")
    window = cfg.max_prompt_length + cfg.max_completion_length
    return f"{gpus}python vllm_server.py --model {model} --port {port} --max-model-len {window}{more}{lora} &"


def commands(plan: dict, cfg: PlanConfig) -> list[str]:
    """The lines to type: one a server, then the trainer's. On several machines one server's and the script's, as
    launchers differ (docs/serving.md)."""
    server, choice = plan["server"], replace(plan["cfg"], server_timeout=1800.0)
    more = f" --tensor-parallel-size {server['split']}" * (server["split"] > 1)
    more += f" --gpu-memory-utilization {server['share']:g}" * (server["share"] < VLLM_SHARE)
    if cfg.gpus > cfg.node_gpus:
        script = f"{script_of(cfg)} {shlex.join(flags(choice))}"
        return ["# docs/serving.md, Several nodes:", server_line(choice, 8000, "", " --host 0.0.0.0" + more), script]
    lines, urls = before(cfg), []
    for number, first in enumerate(range(0, plan["server_gpus"], server["split"])):
        urls.append(f"http://127.0.0.1:{8000 + number}")
        lines.append(server_line(choice, 8000 + number, visible(first, first + server["split"]), more))
    trainer = f"torchrun --nproc_per_node={plan['ranks']} {script_of(cfg)}"
    words = shlex.join(flags(replace(choice, server_urls=urls)))
    return [*lines, f"{visible(plan['server_gpus'], cfg.gpus)}{trainer} {words}"]


def visible(first: int, end: int) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, range(first, end)))} "


def before(cfg: PlanConfig) -> list[str]:
    secret = "export VLLM_SERVER_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(16))')"
    unpack = f"python scripts/unpacked.py {shlex.quote(cfg.model_id)} unpacked"  # what the server has beside 4 bits
    return [secret, *([unpack] if cfg.load_in else [])]


def script_of(cfg: PlanConfig) -> str:
    return "train_async.py" if cfg.overlap else "train_ppo.py" if cfg.critic else "train_grpo.py"


def flags(cfg: PlanConfig) -> list[str]:
    """Command-line words of every setting that differs from the script's default, the model always. With domains the
    file that lists them has to be given, and what it may set is left to it."""
    usual, settings = knobs_of(script_of(cfg).removesuffix(".py"))(), {"model_id": cfg.model_id}
    for field in fields(TrainConfig):
        value, default = getattr(cfg, field.name), getattr(usual, field.name)
        listed = bool(cfg.domains) and field.name in {"domains", *BY_DOMAIN}
        if value not in (default, field.default if cfg.critic else default) and field.repr and not listed:
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
    """Prints whether a server and the trainer fit on one GPU, at the same time or by turns, and the trainer with
    --generator hf; and what to type. Returns 1 if nothing fits."""
    cfg = replace(cfg, strategy="ddp" if cfg.strategy == "auto" else cfg.strategy)
    usable, kv = cfg.gpu_memory * GIB * (1 - SPARE), kv_bytes(config, 1)
    window = cfg.max_prompt_length + cfg.max_completion_length
    served = 2 * (sizes.trained + sizes.frozen) + VLLM_SPARE + push_bytes(sizes, cfg)
    served += cfg.num_generations * kv * window  # at the least
    decoded = min(cfg.sequences_per_step, HF_SEQUENCES) * kv * window
    # What samples, and how much of it is there while the trainer works.
    ways = [("a server beside the trainer", dict(generator="vllm", colocate=False), served, served)]
    if not cfg.load_in and cfg.strategy == "ddp":  # others are refused by the script
        ways.append(("by turns", dict(generator="vllm", colocate=True, push_lora="auto"), served, 0))
    ways.append(("--generator hf, no server", dict(generator="hf", push_lora="auto"), decoded, 0))
    any_fits = False
    for name, changes, sampling, together in ways:
        choice, need = fitted(sizes, replace(cfg, **changes), 1, usable - together, False)
        most = max(peak(need) + together, sampling + kept(need) * (choice.generator == "hf"))
        any_fits = any_fits or most <= usable
        fits = "yes" if most <= usable else "NO"
        print(f"On one GPU, {name}: {fits}, {most / GIB:.1f} of {usable / GIB:.1f} GiB, {sampling / GIB:.1f} to sample")
        print(table(need, cfg))
        if most > usable:
            continue
        if choice.generator == "vllm":
            share = int(100 * (usable - (0 if choice.colocate else peak(need))) / (cfg.gpu_memory * GIB)) / 100
            more = f" --gpu-memory-utilization {min(share, VLLM_SHARE):g}" + " --enable-sleep-mode" * choice.colocate
            print("\n".join([*before(cfg), server_line(choice, 8000, "", more)]))
        print(f"python {script_of(cfg)} {shlex.join(flags(replace(choice, server_timeout=1800.0)))}\n")
    return int(not any_fits)


def check(cfg: PlanConfig) -> None:
    for name in ("gpus", "node_gpus", "gpu_memory", "tflops", "memory_bandwidth"):
        if not getattr(cfg, name) > 0:
            raise ConfigError(f"--{name}={getattr(cfg, name)}: must be above 0.")
    if cfg.server_gpus is not None and not 1 <= cfg.server_gpus < cfg.gpus:
        raise ConfigError(f"--server_gpus={cfg.server_gpus} of --gpus={cfg.gpus}: server and trainer need one each.")
    if cfg.gpus > cfg.node_gpus and (cfg.gpus % cfg.node_gpus or (cfg.server_gpus or 0) % cfg.node_gpus):
        given = f"--gpus={cfg.gpus} --server_gpus={cfg.server_gpus}"
        raise ConfigError(f"{given}: more than --node_gpus={cfg.node_gpus} are whole machines; give multiples of it.")
    if cfg.critic and cfg.overlap:
        raise ConfigError("--critic --overlap: train_async.py has no critic; plan them one at a time.")


def main(cfg: PlanConfig) -> int:
    """Print the plan; 1 if nothing fits."""
    check(cfg)

    if cfg.use_peft and cfg.generator == "vllm" and cfg.push_lora == "auto":
        cfg = replace(cfg, push_lora="adapters")  # what the lines to type let the server have
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
    used = (
        choice.strategy + f" --shard_size {choice.shard_size}" * bool(choice.shard_size) + " --offload" * choice.offload
    )
    print(f"Trainer: {best['ranks']} GPUs, {used}, micro-batches of {choice.tokens_per_microbatch} tokens")
    print(table(best["need"], cfg))
    if server:
        print(
            f"Server: {best['server_gpus']} GPUs, {server['split']} a server, {server['at_once']} completions at once"
        )
        print(f"  {'weights':<15}{server['weights'] / GIB:8.1f} GiB\n  {'KV cache':<15}{server['kv'] / GIB:8.1f} GiB")
    else:
        print(f"Server: the model and one completion do not fit on {best['server_gpus']} GPUs")
    print(f"Step of {choice.prompts_per_step} prompts x {choice.num_generations} completions, by the two rates:")
    print(f"  sampling {best['sample']:.0f} s, the rest {best['rest']:.0f} s" + " beside it" * cfg.overlap)
    if len(plans) > 1:
        print("\nserver GPUs   trainer GPUs   strategy         peak GiB   s a step   completions/s")
    for plan in plans if len(plans) > 1 else ():
        used = plan["cfg"].strategy + " --offload" * plan["cfg"].offload
        row = f"{plan['server_gpus']:<14}{plan['ranks']:<15}{used:<17}{peak(plan['need']) / GIB:<11.1f}"
        print(f"{row}{plan['step']:<11.1f}{plan['pace']:.2f}{'' if plan['fits'] else '   does not fit'}")
    if best["fits"]:
        print("\nTo type:\n\n" + "\n".join(commands(best, cfg)))
    return 0 if best["fits"] else 1


if __name__ == "__main__":
    try:
        sys.exit(main(CONFIG))
    except ConfigError as error:
        sys.exit(f"plan.py: error: {error}")
