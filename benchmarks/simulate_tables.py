"""benchmarks/results/simulate.md: what simulate.py says of models and machines up to 256 GPUs, beside plan.py and
beside published step times.

    python benchmarks/simulate_tables.py [PART OF A CASE'S WORDS ...]        half an hour on one core, by estimate

Three and six layers are simulated, and from these a line is drawn to all of them; pushes, which no line describes, and
the first case, which shows what the line costs, are simulated whole. A tower for pictures is whole, too.
"""

import sys
from dataclasses import fields, replace
from pathlib import Path

import simulate
import torch
from simulate import GPU, PASSES, Result, SimulateConfig

import plan
from config import load_config
from plan import GIB
from train_grpo import empty_policy

LENGTHS = "--prompt 500 --completion 4000 --max_prompt_length 500 --max_completion_length 4000"
CASES = [
    "qwen2.5-7b --gpus 8", "qwen2.5-1.5b --gpus 8", "qwen2.5-7b --gpus 8 --use_peft",
    "qwen2.5-7b --gpus 8 --offload --colocate", "qwen3-30b-a3b --gpus 16", "qwen2.5-7b --gpus 16",
    "qwen2.5-7b --gpus 64 --hsdp", "qwen2.5-7b --gpus 256", "qwen2.5-7b --gpus 256 --rank -1",
    "qwen2.5-7b --gpus 256 --hsdp", "qwen2.5-32b --gpus 16", "qwen2.5-72b --gpus 64", "qwen2.5-72b --gpus 256 --hsdp",
    "qwen2.5-1.5b --gpus 1", "qwen2.5-vl-3b --gpus 8",
    "qwen2.5-7b --gpus 1 --strategy ddp --dtype bfloat16 --use_peft",
    "qwen2.5-7b --gpus 1 --strategy ddp --dtype bfloat16 --use_peft --load_in 4bit",
    "qwen2.5-72b --gpus 8 --dtype bfloat16 --use_peft --load_in 4bit",
]  # fmt: skip
FEW = (3, 6)  # layers that are simulated

NEMO = "NeMo-RL 0.4, GRPO on DGX H100, Megatron (docs/about/performance-summary.md)"
TITAN = "torchtitan, FSDP2 on H100 of 500 W, selective recomputation (docs/performance.md)"
TITAN_A100 = "torchtitan, FSDP2 on A100, full recomputation (docs/performance.md)"
A100 = "--matrix_tflops 200 --memory_bandwidth 1300 --node_bandwidth 20"  # as H100: some 60 % of 312, of 2039
PLAIN = "--prompt 16 --completion 8176 --max_prompt_length 16 --max_completion_length 8176"
GRPO = "--max_prompt_length 200 --max_completion_length 3896 --prompt 200 --num_generations 32"
# source, words, tokens of a step on all GPUs, of which completions, updates, what is published: tokens/s/GPU or seconds
PUBLISHED = [
    (TITAN, f"llama-3.1-8b --gpus 8 {PLAIN} --tokens_per_microbatch 14895", 0, 0, 0, 5762),
    (TITAN_A100, f"llama-3.3-70b --gpus 64 {PLAIN} --tokens_per_microbatch 7448 {A100}", 0, 0, 0, 331),
    (NEMO, f"llama-3.1-8b --gpus 16 {GRPO} --completion 860", 2048 * 1060, 2048, 4, 97.7),
    (NEMO, f"qwen3-32b --gpus 32 {GRPO} --completion 3006", 2048 * 3206, 2048, 4, 393),
    (NEMO, f"qwen3-30b-a3b --gpus 32 {GRPO} --completion 2954", 2048 * 3154, 2048, 4, 225),
]


def config(words: str) -> SimulateConfig:
    return load_config(SimulateConfig, f"--model {words}".split())


def line(less, more, layers: int):
    """On the line through what FEW layers have, the value of `layers`; of all numbers within."""
    if isinstance(less, int | float):
        return less + (more - less) * (layers - FEW[0]) / (FEW[1] - FEW[0])
    if isinstance(less, dict):
        return type(less)({key: line(less.get(key, 0), more.get(key, 0), layers) for key in less.keys() | more.keys()})
    if isinstance(less, list | tuple):
        return tuple(line(a, b, layers) for a, b in zip(less, more, strict=True))
    return type(less)(**{f.name: line(getattr(less, f.name), getattr(more, f.name), layers) for f in fields(less)})


def whole(cfg: SimulateConfig) -> Result:
    """A step of all layers."""
    few = [simulate.simulate(replace(cfg, layers=layers)) for layers in FEW]
    layers = simulate.config_of(cfg).get_text_config().num_hidden_layers
    drawn = {key: line(a, few[1].phases[key], layers) for key, a in few[0].phases.items()}
    found = replace(few[0], phases=drawn, **{
        name: line(getattr(few[0], name), getattr(few[1], name), layers) for name in ("kept", "parameters")
    })  # fmt: skip
    # Which tensors fill a bucket together depends on the number of layers, and is on no line.
    drawn["push"] = simulate.simulate(cfg, passes=False).phases["push"]
    return found


def bytes_row(words: str, sizes: dict, push: int) -> str:
    cells = [words]
    for simulated, said in sizes.values():
        apart = f"{said / simulated - 1:+.1%}" if simulated > GIB / 10 else "-"
        cells += [f"{simulated / GIB:.2f}", f"{said / GIB:.2f}", apart]
    cells.append(f"{push / GIB:.2f}")
    return f"| {' | '.join(cells)} |"


def pass_row(words: str, found: Result) -> str:
    middle, step = found.phases[PASSES[1]], found.phases["optimizer"]
    calls = {"allgather": 0.0, "reduce_scatter": 0.0, "allreduce": 0.0}
    moved = {"within one": 0.0, "between machines": 0.0}
    for (kind, where), number in middle.collectives.items():
        if where in moved:
            calls[kind] += number
            moved[where] += middle.moved[kind, where]
    last = sum(n for (kind, where), n in found.phases[PASSES[2]].collectives.items() if kind == "allreduce")
    cells = [words, f"{calls['allgather']:.0f} + {calls['reduce_scatter']:.0f}", f"{last:.0f}"]
    cells += [f"{size / GIB:.1f}" for size in moved.values()] + [f"{middle.launches:.0f}", waits(middle)]
    exposed = max(middle.seconds - middle.busy, 0)
    cells += [f"{middle.seconds:.2f}", f"{middle.talking:.2f}", f"{exposed:.2f}"]
    cells += [f"{found.tokens / middle.seconds:,.0f}", f"{step.seconds:.2f}", f"{found.phases['push'].seconds:.1f}"]
    return f"| {' | '.join(cells)} |"


def waits(phase) -> str:
    return f"{phase.waits.total():.0f}"


def published_row(source: str, words: str, tokens: int, completions: int, updates: int, published: float) -> str:
    cfg, name = config(words), " ".join(words.split()[:3])
    found = whole(cfg)
    middle = found.phases[PASSES[1]].seconds
    if not updates:
        ours = found.tokens / middle
        return f"| {name} | {source} | {published:,.0f} tokens/s/GPU | {ours:,.0f} | {ours / published - 1:+.0%} |"
    passes = tokens / cfg.gpus / found.tokens
    parts = {"update": passes * middle + updates * found.phases["optimizer"].seconds}
    parts["log-probs"] = 2 * passes * found.phases["old log-probs"].seconds  # of the policy and of the reference
    shape = simulate.config_of(cfg)
    with torch.device("meta"):
        sizes = plan.sizes_of(empty_policy(cfg, shape))
    parts["sampling"] = plan.serve(cfg, shape, sizes, cfg.gpus, completions)["seconds"]
    parts["push"] = 2 * sizes.trained / (cfg.push_bandwidth * 1e9)
    ours, said = sum(parts.values()), ", ".join(f"{name} {value:.0f}" for name, value in parts.items())
    return f"| {name} | {source} | {published:g} s | {ours:.0f} s ({said}) | {ours / published - 1:+.0%} |"


HEAD = """# A step, simulated

Written by `python benchmarks/simulate_tables.py`; what is simulated, and what is not: `benchmarks/simulate.py`. Nothing
here was measured on a GPU. Prompts of 500 tokens, completions of 4,000, passes of 18,022 tokens
(`--tokens_per_microbatch 16384` and a tenth), gradient checkpointing, float32 weights computed in bfloat16. *Simulated*
are the script's own functions at 3 and 6 layers; the columns are on the line through the two, at the model's number of
layers. Pushes are simulated at all layers: which tensors fill a bucket together depends on their number. Checked
against all 28 layers of the 7B: {checked}. The vision-language model has a picture of 448 x 448 pixels in each prompt
and all 32 layers of its tower, in which transformers asks for lengths layer by layer: most of the waits are these.

Rates (assumptions, H100): products {c.matrix_tflops:g} TFLOP/s, memory {c.memory_bandwidth:g} GB/s, within a machine
{c.link_bandwidth:g} GB/s, between machines {c.node_bandwidth:g} GB/s for each GPU's network card, CPU memory
{c.cpu_bandwidth:g} GB/s, a push {c.push_bandwidth:g} GB/s, {c.launch:g} microseconds of the host an operation.

## Bytes on a GPU, GiB: simulated, by plan.py, how far plan.py is off

Rank 0 has the largest shards and sends a push, the last one (`--rank -1`) gathers with it; a push is never the peak of
a step here. `--dtype bfloat16` keeps weights so, too; of a base in 4 bits adapters alone are pushed.

| | kept | plan.py | | update | plan.py | | push |
|---|---|---|---|---|---|---|---|
"""
PASS = """
## A micro-batch between the first and the last, simulated

Gathers and reductions; all-reduces between copies, in the last micro-batch alone; GiB that a rank gathers or reduces
within a machine and between machines; operations; waits of the host; seconds, of them of collectives, and seconds in
which the GPU's own work waits for them or for the host; tokens a second and GPU; seconds of the optimizer's step and of
a push to one server.

| | gathers + reduces | all-reduces | within | between | launches | waits | s | talk | idle | tokens/s | step | push |
|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""
PUBLISHED_HEAD = """
## Published times

Updates and log-probs simulated (of the policy and of a reference, which those runs compute); sampling and push by
plan.py's arithmetic, all GPUs by turns. Prompts in NeMo-RL's runs are taken for 200 tokens, and shared, which their
trainer does not do; its trainer splits models by tensors and layers, ours into FSDP2's shards. Their steps also make
batches, score, and wait for the longest completions and the fullest rank, of which nothing is here: simulated times are
no more than a lower bound. torchtitan's GPUs had 500 of 700 W, and it recomputed less than we do.

| | source | published | simulated | off by |
|---|---|---|---|---|
"""


def main(only: list[str]) -> None:
    out = Path(__file__).parent / "results" / "simulate.md"
    cases = [words for words in CASES if not only or any(part in words for part in only)]
    some = config(f"qwen2.5-7b --gpus 8 {LENGTHS}")
    drawn = whole(some)
    real = simulate.simulate(some)
    pairs = {
        "update": [max(r.phases[p].peak[GPU.type] for p in PASSES) for r in (drawn, real)],
        "seconds of a micro-batch": [r.phases[PASSES[1]].seconds for r in (drawn, real)],
        "launches": [r.phases[PASSES[1]].launches for r in (drawn, real)],
    }
    checked = ", ".join(f"{name} {a / b - 1:+.1%}" for name, (a, b) in pairs.items())
    rows, passes = [], []
    for words in cases:
        found = whole(cfg := config(f"{words} {LENGTHS}"))
        push = found.phases["push"].peak[GPU.type]
        rows.append(bytes_row(words, simulate.errors(found, simulate.predicted(cfg)), push))
        passes.append(pass_row(words, found))
        print(rows[-1], passes[-1], sep="\n", flush=True)
    published = []
    for row in PUBLISHED if not only else ():
        published.append(published_row(*row))
        print(published[-1], flush=True)
    text = HEAD.format(checked=checked, c=some) + "\n".join(rows) + "\n" + PASS + "\n".join(passes) + "\n"
    text += PUBLISHED_HEAD + "\n".join(published) + "\n"
    print(text) if only else out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
