"""Will it fit, how long does a step take, and what to type: from the model's config alone, on any laptop.

    python plan.py --model_id Qwen/Qwen2.5-7B-Instruct --gpus 8 --gpu_memory 80 --prompt 500 --completion 4000

Takes every flag of train_grpo.py, and a few of its own. Bytes: memory.py (checked against measured ones). Seconds are
arithmetic on the rates given below, which are assumptions about your GPUs: measure one step, then put yours in.
"""
# ruff: noqa: E402 - as in train_grpo.py, mistakes on the command line answer before torch is imported

from dataclasses import fields, replace
from typing import Literal

from config import BY_DOMAIN, ConfigError, TrainConfig, parse_args


class PlanConfig(TrainConfig):
    starts_ranks = False

    # --- plan ---
    strategy: Literal["auto", "ddp", "fsdp", "fsdp2"] = "auto"  # auto: ddp if it fits, else fsdp2
    gpus: int = 8  # GPUs in all; of one, server and trainer have a part each, at the same time
    node_gpus: int = 8  # GPUs of a machine; of several machines each serves or trains
    gpu_memory: float = 80.0  # GiB of each
    cpu_memory: float = 1000.0  # GiB of a machine, for offload
    server_bytes: float = 2.0  # of a weight on the server; 1 with vLLM's --quantization fp8_per_tensor, say
    server_gpus: int | None = None  # how many of them sample; unset: the split with the shortest step
    prompt: int | None = None  # mean tokens of a prompt; unset: max_prompt_length
    completion: int | None = None  # mean tokens of a completion, and max_completion_length where that is less
    overlap: bool = False  # train_async.py: sampling and update at the same time
    critic: bool = False  # train_ppo.py: a critic as large as the model
    tflops: float | None = None  # 10^12 operations a second of a GPU in bfloat16; unset: 350 (H100: 40 % of 989)
    memory_bandwidth: float | None = None  # GB/s of a GPU reading its memory; unset: 2000 (H100: 60 % of 3350)
    link_bandwidth: float | None = None  # GB/s at which a GPU gathers or reduces shards in a machine; unset: 150
    node_bandwidth: float | None = None  # GB/s of each GPU's network card; unset: 40 (400 Gb/s: 80 %)
    cpu_bandwidth: float | None = None  # GB/s of each GPU to CPU memory, and of AdamW there; unset: 25
    push_bandwidth: float | None = None  # GB/s of a weight push; unset: 2
    tokens_per_second: float | None = None  # sampled by one server GPU; unset: by memory bandwidth

    def __post_init__(self):
        super().__post_init__()
        self.prompt = self.prompt or self.max_prompt_length
        self.completion = self.completion or self.max_completion_length
        self.max_prompt_length = max(self.max_prompt_length, self.prompt)
        self.max_completion_length = max(self.max_completion_length, self.completion)
        if self.gradient_checkpointing is None:
            self.gradient_checkpointing = True
        for name, rate in RATES.items():
            if getattr(self, name, 0) is None:
                setattr(self, name, rate)


RATES = dict(tflops=350.0, memory_bandwidth=2000.0, link_bandwidth=150.0, node_bandwidth=40.0)
RATES |= dict(cpu_bandwidth=25.0, push_bandwidth=2.0)


CONFIG = parse_args(PlanConfig, description=__doc__.split("\n")[0]) if __name__ == "__main__" else None

import contextlib
import io
import shlex
import sys
from collections import Counter
from types import SimpleNamespace

import torch

import memory
import train_ppo
from inputs.model import experts_of
from memory import GIB
from train_grpo import empty_policy, load_config

# Published shapes, for machines that reach no hub: hidden, feed-forward, layers, heads, key heads, vocabulary, tied.
SHAPES = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 4864, 24, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-3B": ("qwen2", 2048, 11008, 36, 16, 2, 151936, True),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen/Qwen2.5-Coder-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "Qwen/Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 152064, False),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064, False),
    "Qwen/Qwen2.5-72B": ("qwen2", 8192, 29568, 80, 64, 8, 152064, False),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 14336, 32, 32, 8, 128256, False),
    "meta-llama/Llama-3.3-70B": ("llama", 8192, 28672, 80, 64, 8, 128256, False),
}
MORE_SHAPES = {  # of kinds that take more to describe: arguments of transformers' config
    "Qwen/Qwen2.5-VL-3B": (
        "qwen2_5_vl",
        dict(
            text_config=dict(
                **dict(hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16),
                **dict(num_key_value_heads=2, vocab_size=151936, max_window_layers=36),
            ),
            vision_config=dict(
                **dict(hidden_size=1280, intermediate_size=3420, depth=32, num_heads=16, out_hidden_size=2048),
                **dict(patch_size=14, window_size=112, fullatt_block_indexes=[7, 15, 23, 31]),
            ),
            tie_word_embeddings=True,
        ),
    ),
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe",
        dict(
            **dict(hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48),
            **dict(num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128),
            **dict(num_experts_per_tok=8, vocab_size=151936, norm_topk_prob=True, tie_word_embeddings=False),
        ),
    ),
}
VLLM_SHARE = 0.92  # of a GPU's memory that vLLM takes, unless told (--gpu-memory-utilization)
VLLM_SPARE = 3 * GIB  # of it, for its activations and graphs
VLLM_BESIDE = 1 * GIB  # of the rest, for CUDA and NCCL
HF_SEQUENCES = 256  # that --generator hf decodes at a time
MAX_SEQUENCES = 1024  # that vLLM samples at the same time


def model_config(model_id: str):
    """transformers' config: of a folder, of the hub, or of a shape in SHAPES if no hub can be reached."""
    try:
        return load_config(model_id)
    except ConfigError:
        name = model_id.removesuffix("-Instruct")
        if name not in SHAPES | MORE_SHAPES:
            raise
    from transformers import AutoConfig

    print(f"The hub cannot be asked for {model_id}: its shape is taken from plan.py.", file=sys.stderr)
    if name in MORE_SHAPES:
        kind, sizes = MORE_SHAPES[name]
        return AutoConfig.for_model(kind, **sizes)
    kind, hidden, wide, layers, heads, kv_heads, words, tied = SHAPES[name]
    return AutoConfig.for_model(
        kind, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=words, tie_word_embeddings=tied,
    )  # fmt: skip


# ---- the server -----------------------------------------------------------------------------------------------------


def serve(
    cfg: PlanConfig, config, sizes: list[int], server_gpus: int, sequences: int, adapters: int = 0, active: int = 0
) -> dict | None:
    """The fastest way to serve on `server_gpus` GPUs, as one or several servers: bytes on a GPU, seconds to sample
    `sequences` completions of mean length. None if the model does not fit. sizes: elements of each parameter; adapters:
    of all adapters, where these are pushed alone; active: those that a token meets, 0: all."""
    heads = config.get_text_config().num_attention_heads
    splits = [n for n in (1, 2, 4, 8) if min(server_gpus, cfg.node_gpus) % n == 0 and heads % n == 0]
    ways = [serve_split(cfg, config, sizes, server_gpus // n, n, sequences, adapters, active) for n in splits]
    return min(filter(None, ways), key=lambda way: way["seconds"], default=None)


def serve_split(
    cfg: PlanConfig,
    config,
    sizes: list[int],
    servers: int,
    split: int,
    sequences: int,
    adapters: int = 0,
    active: int = 0,
) -> dict | None:
    """`serve` by `servers` servers, each with the model split over `split` GPUs."""
    kv, parameters = kv_bytes(config, split), sum(sizes)
    weights, push = cfg.server_bytes * parameters / split + slots(adapters, split), received(cfg, sizes, split)
    free = 1 - (push + VLLM_BESIDE) / (cfg.gpu_memory * GIB)  # the KV cache stays during a push
    share = min(VLLM_SHARE, int(100 * free) / 100)
    room = cfg.gpu_memory * GIB * share - VLLM_SPARE - weights
    if room < kv * (cfg.max_prompt_length + cfg.max_completion_length):
        return None
    each = -(-sequences // servers)
    at_once = min(each, int(room / kv / (cfg.prompt + cfg.completion)), MAX_SEQUENCES)
    flops, bandwidth = cfg.tflops * 1e12 * split, cfg.memory_bandwidth * 1e9
    read = weights + at_once * kv * (cfg.prompt + cfg.completion / 2)  # by each token of all that are sampled
    token = read / bandwidth + 2 * (active or parameters) * at_once / flops
    seconds = cfg.completion * token * each / at_once
    if cfg.tokens_per_second:
        seconds = sequences * cfg.completion / (cfg.tokens_per_second * servers * split)
    seconds += (
        2 * (active or parameters) * cfg.prompt * each / cfg.num_generations / flops
    )  # a prompt once for its group
    used = at_once * kv * (cfg.prompt + cfg.completion)
    return dict(
        servers=servers, split=split, weights=weights, kv=room, kv_used=used, at_once=at_once, seconds=seconds,
        push=push, share=share,
    )  # fmt: skip


def kv_bytes(config, split: int) -> int:
    """Of a token's keys and values in 16 bits, on each of `split` GPUs."""
    text = config.get_text_config()
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * 2 * text.num_hidden_layers * max(kv_heads // split, 1) * width


def received(cfg: PlanConfig, sizes: list[int], split: int) -> int:
    """Bytes that a push takes on each GPU of a server. Adapters arrive in CPU memory."""
    return 0 if cfg.push_lora == "adapters" else memory.receiving(sizes, cfg, split)


def slots(adapters: int, split: int) -> int:
    """Bytes of vLLM's slots for adapters (vllm_server.py --enable-lora: four, in 16 bits), at the most."""
    return 4 * 2 * adapters // split


def served_as(cfg: PlanConfig, flag: str) -> tuple[str, str]:
    """(the server's --model as a shell's word, the flag that lets adapters travel alone)"""
    model = "unpacked" if cfg.load_in else cfg.model_id
    return shlex.quote(model), flag * (cfg.push_lora == "adapters")


# ---- the trainer ----------------------------------------------------------------------------------------------------


def strategies(cfg: PlanConfig, ranks: int) -> list[TrainConfig]:
    """What to try, the fastest first: on several machines, shards within each, which hold copies of one another."""
    named = [cfg]
    if cfg.strategy == "auto":
        sharded = replace(cfg, strategy="fsdp2")
        named = [replace(cfg, strategy="ddp", shard_size=None), sharded]
        named += [] if cfg.load_in else [replace(sharded, offload=True)]
    if ranks <= cfg.node_gpus or cfg.shard_size:
        return named
    within = [(replace(choice, shard_size=cfg.node_gpus), choice) for choice in named]
    return [each for pair in within for each in (pair[1:] if pair[1].strategy == "ddp" else pair)]


def trainer(cfg: PlanConfig, make_policy, ranks: int) -> tuple[TrainConfig, Counter]:
    """The first strategy that fits on `ranks` GPUs, with the tokens a micro-batch may have; if none does, the last."""
    unit = ranks * cfg.num_minibatches
    cfg = replace(cfg, prompts_per_step=max(round(cfg.prompts_per_step / unit), 1) * unit)
    for choice in strategies(cfg, ranks):
        choice, need = memory.fitted(make_policy, choice, ranks, cfg.gpu_memory * GIB, cfg.critic)
        if fits(cfg, need, ranks):
            break
    return choice, need


def usable(cfg: PlanConfig) -> float:
    return cfg.gpu_memory * GIB * (1 - memory.SPARE)


def fits(cfg: PlanConfig, need: Counter, ranks: int) -> bool:
    return memory.peak(need) <= usable(cfg) and in_cpu_memory(cfg, need, ranks) <= cfg.cpu_memory * GIB


def in_cpu_memory(cfg: PlanConfig, need: Counter, ranks: int) -> int:
    """Bytes on a machine."""
    return need["in CPU memory"] * min(ranks, cfg.node_gpus)


def seconds(
    cfg: TrainConfig, config, parameters: int, ranks: int, adapters: int = 0, active: int = 0
) -> dict[str, float]:
    """Of the phases after sampling, by arithmetic; the slower of computing and communicating counts. adapters, active:
    as for `serve`."""
    text, tokens = config.get_text_config(), cfg.prompts_per_step * (cfg.prompt + cfg.num_generations * cfg.completion)
    prompts = 1 if cfg.shared_prefix else cfg.num_generations
    tokens += cfg.prompts_per_step * cfg.prompt * (prompts - 1)
    pairs = prompts * cfg.prompt**2 / 2 + cfg.num_generations * cfg.completion * (cfg.prompt + cfg.completion / 2)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention = 4 * text.num_hidden_layers * text.num_attention_heads * width * pairs * cfg.prompts_per_step
    forward = (2 * (active or parameters) * tokens + attention) / ranks / (cfg.tflops * 1e12)
    passes = -(-tokens // ranks // (cfg.tokens_per_microbatch or 16384))
    size = cfg.shard_size or ranks  # of a copy, cut into shards
    here = min(size, cfg.node_gpus)  # whose network cards carry together what comes from other machines
    byte = max((size - 1) / cfg.link_bandwidth, (size - here) / (here * cfg.node_bandwidth)) / size / 1e9  # seconds
    gather = parameters * 2 * byte * (cfg.strategy != "ddp")
    reduce = parameters * 4 * byte * (not cfg.use_peft)
    # Once an update the copies add up their shards' gradients, there and back.
    among = 0 if cfg.use_peft else 2 * parameters * 4 / size * (1 - size / ranks) / (cfg.node_bandwidth * 1e9)
    backward = forward * ((1 if cfg.use_peft else 2) + cfg.gradient_checkpointing)
    updates = cfg.num_iterations * cfg.num_minibatches
    reduces = passes if cfg.strategy != "ddp" else 2 * cfg.num_minibatches  # there and back, once an update
    extra = (updates > 1 and cfg.old_logprobs == "recompute" or cfg.kl_in_reward) + (cfg.beta > 0)
    shards = cfg.offload * parameters / ranks / (cfg.cpu_bandwidth * 1e9)  # each byte a parameter: to the GPU, or back
    update = max(forward + backward, passes * 2 * gather + reduces * reduce + cfg.num_minibatches * among)
    return {
        "critic": cfg.critic * (max(forward, passes * gather) + update),
        "logprobs": extra * max(forward, passes * gather),
        "update": cfg.num_iterations * update,
        "offload": (updates + cfg.critic) * shards * (passes * 3 * 4 + 28),
        "push": 2 * (adapters or parameters) / (cfg.push_bandwidth * 1e9),
    }


# ---- a split, and what to print -------------------------------------------------------------------------------------


def split(cfg: PlanConfig, config, make_policy, sizes: list[int], adapters: int, active: int, server_gpus: int) -> dict:
    """Everything about one way to divide the GPUs."""
    ranks = cfg.gpus - server_gpus
    choice, need = trainer(cfg, make_policy, ranks)
    server = serve(cfg, config, sizes, server_gpus, choice.sequences_per_step, adapters, active)
    generate = server["seconds"] if server else float("inf")
    phases = seconds(choice, config, sum(sizes), ranks, adapters, active)
    rest = sum(phases.values())
    step = max(generate, rest) if cfg.overlap else generate + rest
    phases = {"generate": generate} | phases
    return dict(
        cfg=choice, need=need, server=server, phases=phases, step=step, ranks=ranks, server_gpus=server_gpus,
        fits=bool(server) and fits(cfg, need, ranks), per_completion=step / choice.sequences_per_step,
    )  # fmt: skip


def commands(plan: dict, cfg: PlanConfig) -> list[str]:
    """The lines to type: one a server, then the trainer's; on several machines under the name of each."""
    server, trains = plan["server"], plan["cfg"]
    several = cfg.gpus > cfg.node_gpus
    each = (cfg.node_gpus if several else plan["server_gpus"]) // server["split"]  # servers of a machine
    nodes = plan["server_gpus"] // cfg.node_gpus if several else 1
    lines, urls = [], []
    for node in range(nodes):
        lines += [f"# node-{node}"] * several
        for number in range(each):
            urls.append(f"http://{f'node-{node}' if several else '127.0.0.1'}:{8000 + number}")
            own = ",".join(str(number * server["split"] + i) for i in range(server["split"]))
            wide = " --host 0.0.0.0" * several + f" --tensor-parallel-size {server['split']}" * (server["split"] > 1)
            wide += utilization(server)
            model, lora = served_as(cfg, " --enable-lora")
            lines.append(
                f"CUDA_VISIBLE_DEVICES={own} python vllm_server.py --model {model} "
                f"--port {8000 + number} --max-model-len {window(trains)}{wide}{lora} &"
            )
    script = f"{script_of(cfg)} {shlex.join(flags(replace(trains, server_urls=urls, server_timeout=1800.0)))}"
    if several:
        ranks, last = plan["ranks"] // cfg.node_gpus, cfg.gpus // cfg.node_gpus - 1
        launch = f"torchrun --nnodes={ranks} --nproc_per_node={cfg.node_gpus} --rdzv_backend=c10d"
        lines += [f"# node-{nodes}" + f" to node-{last}, each" * (last > nodes)]
        lines += [f"{launch} --rdzv_endpoint=node-{nodes}:29500 {script}"]
        secret = "export VLLM_SERVER_TOKEN_FILE=$HOME/.grpo_token  # on every node the same, mode 600"
    else:
        others = ",".join(str(gpu) for gpu in range(plan["server_gpus"], cfg.gpus))
        lines += [f"CUDA_VISIBLE_DEVICES={others} torchrun --nproc_per_node={plan['ranks']} {script}"]
        secret = "export VLLM_SERVER_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(16))')"
    return [secret, *unpacking(cfg), *lines]


def unpacking(cfg: PlanConfig) -> list[str]:
    """The line that makes what the server has beside a base in 4 bits."""
    return [f"python scripts/unpacked.py {shlex.quote(cfg.model_id)} unpacked"] if cfg.load_in else []


def slurm(plan: dict, cfg: PlanConfig) -> str:
    """The same under Slurm: a server on each of the first nodes, with copies of the model where it is split less."""
    server, words = plan["server"], flags(plan["cfg"])
    split, copies = server["split"], cfg.node_gpus // server["split"]
    model, lora = served_as(cfg, " --enable-lora")
    wide = f"--tensor-parallel-size {split} --data-parallel-size {copies}{utilization(server)}{lora}"
    words = [cfg.model_id, str(window(plan["cfg"])), script_of(cfg), *words[words.index("--model_id") + 2 :]]
    return (
        f'SERVER_NODES={plan["server_gpus"] // cfg.node_gpus} SERVER_FLAGS="{wide}" sbatch --nodes='
        f"{cfg.gpus // cfg.node_gpus} --gpus-per-node={cfg.node_gpus} scripts/slurm.sh NAME {shlex.join(words)}"
    )


def utilization(server: dict) -> str:
    """What leaves room for a push, where vLLM's own share does not."""
    return f" --gpu-memory-utilization {server['share']:g}" * (server["share"] < VLLM_SHARE)


def window(cfg: TrainConfig) -> int:
    return cfg.max_prompt_length + cfg.max_completion_length


def script_of(cfg: PlanConfig) -> str:
    return "train_async.py" if cfg.overlap else "train_ppo.py" if cfg.critic else "train_grpo.py"


PLANNED = "prompts_per_step num_generations beta kl_in_reward".split()  # where train_ppo.py has defaults of its own


def flags(cfg: TrainConfig) -> list[str]:
    """Command-line words of every field that differs from the script's default, the model always. With domains the
    file that lists them has to be given, and what it may set is left to it."""
    usual, words = train_ppo.TrainConfig() if cfg.critic else TrainConfig(), ["--model_id", cfg.model_id]
    for field in fields(TrainConfig):
        value = getattr(cfg, field.name)
        untouched = cfg.critic and field.name not in PLANNED and value == field.default
        untouched |= bool(cfg.domains) and field.name in {"domains", *BY_DOMAIN}
        if value == getattr(usual, field.name) or untouched or field.name == "model_id" or not field.repr:
            continue
        if isinstance(value, bool):
            words.append(f"--{field.name}" if value else f"--no-{field.name}")
        else:
            words += [f"--{field.name}", *map(str, value if isinstance(value, list) else [value])]
    return ["--config", "MIX.yaml", *words] if cfg.domains else words


KEPT = "weights,optimizer,kept gradients,critic,reference,generator,push".split(",")  # of a push
KINDS = "weights,gradients,kept gradients,optimizer,critic,reference,generator,gathered,activations,logits,push"


def table(plan: dict, cfg: PlanConfig) -> str:
    """Of one split: bytes, verdict, seconds, commands."""
    need, choice, server = plan["need"], plan["cfg"], plan["server"]
    used = choice.strategy + f" --shard_size {choice.shard_size}" * bool(choice.shard_size)
    used += " --offload" * choice.offload + " --use_peft" * choice.use_peft + " --load_in 4bit" * bool(choice.load_in)
    lines = [f"Trainer: {plan['ranks']} GPUs, {used}, micro-batches of {choice.tokens_per_microbatch} tokens"]
    lines += [f"  {kind:<15}{need[kind] / GIB:8.1f} GiB" for kind in KINDS.split(",") if need[kind]]
    verdict = "fits" if memory.peak(need) <= usable(cfg) else "does NOT fit"
    lines.append(f"  {'peak':<14}{memory.peak(need) / GIB:8.1f} GiB of {usable(cfg) / GIB:.0f}: {verdict}")
    if need["in CPU memory"]:
        whole = in_cpu_memory(cfg, need, plan["ranks"]) / GIB
        verdict = "fits" if whole <= cfg.cpu_memory else "does NOT fit"
        lines.append(f"  in CPU memory  {whole:8.1f} GiB of {cfg.cpu_memory:g} (--cpu_memory): {verdict}")
    if server:
        lines.append(
            f"Server: {server['servers']} x {server['split']} GPUs, {server['at_once']} completions at once each"
        )
        lines.append(f"  {'weights':<14}{server['weights'] / GIB:8.1f} GiB a GPU")
        lines.append(f"  {'push':<14}{server['push'] / GIB:8.1f} GiB beside vLLM's {server['share']:.0%} of it")
        lines.append(f"  {'KV cache':<14}{server['kv_used'] / GIB:8.1f} GiB used of {server['kv'] / GIB:.1f}")
    else:
        lines.append(f"Server: the model and one completion do not fit on {plan['server_gpus']} GPUs")
    lines.append(f"Step of {choice.prompts_per_step} prompts x {choice.num_generations} completions, by arithmetic:")
    lines += [f"  {phase:<14}{value:8.1f} s" for phase, value in plan["phases"].items() if value]
    lines.append(f"  {'step':<14}{plan['step']:8.1f} s" + (" (sampling beside the rest)" if cfg.overlap else ""))
    return "\n".join(lines)


def on_one_gpu(cfg: PlanConfig, config, make_policy, sizes: list[int], adapters: int) -> list[dict]:
    """Whether a server and the trainer fit on one GPU, at the same time or by turns, and the trainer with --generator
    hf, which samples before the update takes its memory."""
    cfg = replace(cfg, strategy="ddp" if cfg.strategy == "auto" else cfg.strategy)
    kv, window_of = kv_bytes(config, 1), cfg.max_prompt_length + cfg.max_completion_length
    served = replace(cfg, generator="vllm", colocate=False)
    kinds = {  # and what the trainer holds of the GPU while completions are sampled
        "server and trainer at the same time": (served, memory.peak),
        "server and trainer by turns": (replace(served, colocate=True, push_lora="auto"), lambda need: 0),
        "--generator hf, no server": (replace(served, generator="hf", push_lora="auto"), memory.kept),
    }
    if cfg.load_in or cfg.strategy != "ddp" and not cfg.offload:  # refused
        del kinds["server and trainer by turns"]
    ways = []
    for name, (own, meanwhile) in kinds.items():
        beside = min(cfg.sequences_per_step, HF_SEQUENCES) * kv * window_of
        if own.generator == "vllm":  # at the least
            beside = cfg.server_bytes * sum(sizes) + VLLM_SPARE + received(own, sizes, 1)
            beside += cfg.num_generations * kv * window_of + slots(adapters, 1) * (own.push_lora == "adapters")
        room = usable(cfg) - beside * (meanwhile is memory.peak)
        choice, need = memory.fitted(make_policy, own, 1, room / (1 - memory.SPARE))
        sampling, both = meanwhile(need) + beside, max(meanwhile(need) + beside, memory.peak(need))
        ways.append(dict(cfg=choice, need=need, beside=beside, both=both, name=name, fits=both <= usable(cfg)))
        ways[-1]["most"] = "at once" if meanwhile is memory.peak else "sampling" if sampling == both else "update"
    return ways


def say_one_gpu(ways: list[dict], cfg: PlanConfig) -> int:
    """Print these, and what to type; 1 if neither fits."""
    for way in ways:
        choice, need = way["cfg"], way["need"]
        print(
            f"On one GPU, {way['name']}: {'yes' if way['fits'] else 'NO'}, {way['both'] / GIB:.1f} GiB of "
            f"{usable(cfg) / GIB:.1f} used"
        )
        print(
            f"  {'sampling' if choice.generator == 'hf' else 'server':<15}{way['beside'] / GIB:8.1f} GiB at the least"
        )
        print(f"  {'trainer':<15}{memory.peak(need) / GIB:8.1f} GiB, micro-batches of {choice.tokens_per_microbatch}")
        print("".join(f"    {kind:<15}{need[kind] / GIB:6.1f} GiB\n" for kind in KINDS.split(",") if need[kind]))
        if not way["fits"]:
            continue
        if choice.generator == "vllm":
            trainer_has = 0 if choice.colocate else memory.peak(need)
            share = int(100 * (usable(cfg) - trainer_has) / (cfg.gpu_memory * GIB)) / 100
            model, lora = served_as(cfg, " --enable-lora")
            print("".join(f"{line}\n" for line in unpacking(cfg)), end="")
            print(
                f"python vllm_server.py --model {model} --max-model-len {window(choice)} "
                f"--gpu-memory-utilization {min(share, VLLM_SHARE):g}{lora}{' --enable-sleep-mode' * choice.colocate} &"
            )
        print(f"python {script_of(cfg)} {shlex.join(flags(replace(choice, server_timeout=1800.0)))}\n")
    return int(not any(way["fits"] for way in ways))


def weighed(cfg: PlanConfig) -> SimpleNamespace:
    """Every split of the GPUs (`plans`, `best`), or the ways to use the only one (`ways`)."""
    for name in ("gpus", "node_gpus", "gpu_memory", *RATES):
        if not getattr(cfg, name) > 0:
            raise ConfigError(f"--{name}={getattr(cfg, name)}: must be above 0.")
    if cfg.gpus < 1 or (cfg.server_gpus is not None and not 1 <= cfg.server_gpus < cfg.gpus):
        raise ConfigError(f"--server_gpus={cfg.server_gpus} of --gpus={cfg.gpus}: server and trainer need one each.")
    several = cfg.gpus > cfg.node_gpus
    if several and (cfg.gpus % cfg.node_gpus or (cfg.server_gpus or 0) % cfg.node_gpus):
        given = f"--gpus={cfg.gpus} --server_gpus={cfg.server_gpus}"
        raise ConfigError(f"{given}: more than --node_gpus={cfg.node_gpus} are whole machines; give multiples of it.")
    if cfg.gpus == 1 and cfg.shard_size:
        raise ConfigError(f"--shard_size={cfg.shard_size} of --gpus=1: there is nothing to divide; leave it out.")
    if cfg.critic and cfg.overlap:
        raise ConfigError("--critic --overlap: train_async.py has no critic; plan them one at a time.")
    config = model_config(cfg.model_id)

    def make_policy(own: PlanConfig):  # a teacher has a config of its own
        return empty_policy(own, config if own.model_id == cfg.model_id else model_config(own.model_id))

    with torch.device("meta"):
        whole = list(make_policy(replace(cfg, use_peft=False, load_in=None)).parameters())
        sizes = [p.numel() for p in whole]
        experts, chosen = experts_of(config)  # of whose weights, [experts, ...], a token meets a few
        idle = sum(p.numel() * (experts - chosen) // experts for p in whole if p.ndim == 3 and len(p) == experts)
        if cfg.use_peft and cfg.generator == "vllm" and cfg.push_lora == "auto":
            cfg = replace(cfg, push_lora="adapters")  # what the lines to type let the server have
        alone = cfg.push_lora == "adapters"
        adapters = sum(p.numel() for p in make_policy(cfg).parameters() if p.requires_grad) if alone else 0
    found = SimpleNamespace(cfg=cfg, config=config, make_policy=make_policy, sizes=sizes, several=several)
    if cfg.gpus == 1:
        found.ways = on_one_gpu(cfg, config, make_policy, sizes, adapters)
        return found
    unit = cfg.node_gpus if several else 1
    shares = [cfg.server_gpus] if cfg.server_gpus else range(unit, cfg.gpus, unit)
    shares = [share for share in shares if (cfg.gpus - share) % (cfg.shard_size or 1) == 0]
    if not shares:
        given = f"--shard_size={cfg.shard_size} of --gpus={cfg.gpus} --server_gpus={cfg.server_gpus}"
        raise ConfigError(f"{given}: it must divide the trainer's GPUs; give a smaller one, or other GPUs.")
    found.plans = plans = [
        split(cfg, config, make_policy, sizes, adapters, sum(sizes) - idle, share) for share in shares
    ]
    found.best = min(plans, key=lambda plan: (not plan["fits"], plan["per_completion"]))
    return found


def main(cfg: PlanConfig) -> int:
    """Print the plan; 1 if nothing fits."""
    return say(weighed(cfg))


def say(found: SimpleNamespace) -> int:
    """Print what was weighed; 1 if nothing fits."""
    cfg, sizes = found.cfg, found.sizes
    if cfg.gpus == 1:
        print(f"{cfg.model_id}: {sum(sizes) / 1e9:.2f} B parameters, one GPU of {cfg.gpu_memory:g} GiB\n")
        return say_one_gpu(found.ways, cfg)
    best, plans = found.best, found.plans
    print(f"{cfg.model_id}: {sum(sizes) / 1e9:.2f} B parameters, {cfg.gpus} GPUs of {cfg.gpu_memory:g} GiB\n")
    print(table(best, cfg))
    if len(plans) > 1:
        print("\nserver GPUs   trainer GPUs   strategy          peak GiB   s a step   completions/s")
        for plan in plans:
            used = plan["cfg"].strategy + " --offload" * plan["cfg"].offload
            used += f" in {plan['cfg'].shard_size}s" * bool(plan["cfg"].shard_size)
            says = "" if plan["fits"] else "   does not fit"
            print(
                f"{plan['server_gpus']:<14}{plan['ranks']:<15}{used:<18}{memory.peak(plan['need']) / GIB:<11.1f}"
                f"{plan['step']:<11.1f}{1 / plan['per_completion']:.2f}{says}"
            )
    if best["fits"]:
        print("\nTo type:\n\n" + "\n".join(commands(best, cfg)))
    if best["fits"] and found.several and not cfg.load_in:  # there both ends are given one model
        print("\nOr under Slurm, from a folder that all nodes have mounted:\n\n" + slurm(best, cfg))
    return 0 if best["fits"] else 1


def told(cfg: PlanConfig) -> dict:
    """The plan for a page: {"fits", "text": as it is printed, "bars": [{"title", "limit", "used", "parts"}]} in GiB."""
    found = weighed(cfg)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        fits = say(found) == 0

    def parts_of(need: Counter) -> dict[str, float]:
        """Of the phase that takes most; see memory.peak."""
        between = KEPT if memory.peak(need) > memory.update_peak(need) else KINDS.split(",")
        return {kind: need[kind] / GIB for kind in between if need[kind] and (between is KEPT or kind != "push")}

    bars, limit = [], usable(cfg) / GIB
    for way in getattr(found, "ways", ()):
        hf, need = way["cfg"].generator == "hf", way["need"]
        parts = {"sampling" if hf else "server": way["beside"] / GIB} if way["most"] != "update" else {}
        if way["most"] == "sampling":
            parts |= {kind: need[kind] / GIB for kind in KEPT if hf and kind != "push" and need[kind]}
        else:
            parts |= parts_of(need)
        bars.append({"title": way["name"], "limit": limit, "used": way["both"] / GIB, "parts": parts})
    if cfg.gpus > 1:
        need, server = found.best["need"], found.best["server"]
        title = f"each of {found.best['ranks']} trainer GPUs"
        bars.append({"title": title, "limit": limit, "used": memory.peak(need) / GIB, "parts": parts_of(need)})
        if server:
            parts = {"weights": server["weights"], "KV cache": server["kv_used"], "push": server["push"]}
            parts = {name: value / GIB for name, value in (parts | {"vLLM itself": VLLM_SPARE}).items()}
            title = f"each of {found.best['server_gpus']} server GPUs"
            bars.append({"title": title, "limit": cfg.gpu_memory, "used": sum(parts.values()), "parts": parts})
    return {"fits": fits, "text": text.getvalue(), "bars": bars}


if __name__ == "__main__":
    try:
        sys.exit(main(CONFIG))
    except ConfigError as error:
        sys.exit(f"plan.py: error: {error}")
