"""The same GRPO steps by TRL's GRPOTrainer and by train_grpo.py, in one go on this machine.

    pip install -r benchmarks/requirements-bench.txt
    python benchmarks/vs_trl.py                         # 3 repetitions, all cases: 80 minutes on two cores
    python benchmarks/vs_trl.py --systems trl hf --cases short --reps 1

Equal on both sides: model, prompts, reward function, completions per prompt, tokens per completion (the end token is
blocked until the last), bf16 weights, AdamW, learning rate, beta 0, no gradient checkpointing, no truncated sampling,
tokens of a micro-batch, threads.

Each run is a fresh process; the systems take turns. A second is one of wall clock between the ends of two steps, so
logging counts and loading, the first step and the checkpoint at the end do not. Memory is the peak resident set
(VmHWM) of the trainer's process up to the end of the last timed step, on a GPU that of its allocator; the server's is
not in it.
A server is started for each repetition's runs and stopped after them: it does not sit beside the others.
TRL samples in its own process: its vLLM path needs GPUs.

The table goes to the terminal; benchmarks/results/vs_trl.md has the last one.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
from orphans import ends_with_us  # noqa: E402
from server_fixture import start_server  # noqa: E402

from runfiles.reading import read_metrics  # noqa: E402

RUN_LIMIT = 1800  # seconds a run may take; the limit a hung one is ended by


@dataclass(frozen=True)
class Case:
    prompts: int
    generations: int
    tokens: int  # per completion, exactly
    prompt_tokens: int | None  # exactly; None: as they come, about 45
    trl_microbatch: int  # sequences


CASES = {
    "short": Case(prompts=8, generations=4, tokens=32, prompt_tokens=None, trl_microbatch=8),
    "long": Case(prompts=2, generations=8, tokens=64, prompt_tokens=400, trl_microbatch=8),
    "reasoning": Case(prompts=2, generations=8, tokens=512, prompt_tokens=50, trl_microbatch=8),
    "gpu": Case(prompts=8, generations=16, tokens=128, prompt_tokens=None, trl_microbatch=16),
}

SYSTEMS = {
    "trl": "TRL 1.16 GRPOTrainer",
    "hf": "train_grpo.py, in-process",
    "vllm": "train_grpo.py, vLLM server",
}


# ---- the work -------------------------------------------------------------------------------------------------------


def reward(completions, **columns):
    """Cheap, and different within a group: every group has a gradient."""
    return [float(len(completion[0]["content"]) % 7) for completion in completions]


def write_prompts(path: Path, model: str, prompt_tokens: int | None) -> None:
    """512 chat prompts as jsonl, all of `prompt_tokens` tokens if given."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def chat(text: str) -> tuple[list[dict], int]:
        messages = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return messages, len(ids)

    with path.open("w", encoding="utf-8") as file:
        for i in range(512):
            question = f"What is {i % 9 + 1} + {i * 7 % 9 + 1}? Answer with just the number."
            messages, length = chat(question)
            if prompt_tokens:
                messages, length = chat("so" + " so" * (prompt_tokens - length - 2) + f". {question}")
                if length != prompt_tokens:
                    raise RuntimeError(f"prompt {i} has {length} tokens, not {prompt_tokens}; mend write_prompts")
            file.write(json.dumps({"prompt": messages}) + "\n")


# ---- TRL's side, in a process of its own ----------------------------------------------------------------------------


def run_trl(model: str, prompts: str, case: Case, steps: int, metrics_path: Path) -> None:
    """GRPOTrainer for `steps` steps; writes a line of json per step, with the keys of train_grpo.py."""
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):  # comes last in a step
            if "completions/mean_length" not in logs:
                return
            line = {"step": state.global_step, "time/unix": time.time()}
            line["completions/mean_length"] = logs["completions/mean_length"]
            line["memory/peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
            with metrics_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    sequences = case.prompts * case.generations
    cfg = GRPOConfig(
        output_dir=str(metrics_path.parent),
        per_device_train_batch_size=case.trl_microbatch,
        gradient_accumulation_steps=sequences // case.trl_microbatch,
        num_generations=case.generations,
        max_completion_length=case.tokens,
        generation_kwargs={"min_new_tokens": case.tokens},
        max_steps=steps,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        bf16=False,  # autocast; the weights are bf16 as they are
        model_init_kwargs={"dtype": "bfloat16"},
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    )
    rows = load_dataset("json", data_files=prompts, split="train")
    GRPOTrainer(model=model, reward_funcs=reward, args=cfg, train_dataset=rows, callbacks=[Clock()]).train()


# ---- our side -------------------------------------------------------------------------------------------------------


def our_command(model: str, prompts: str, case: Case, steps: int, folder: Path, options: dict) -> list[str]:
    """train_grpo.py as a user would start it."""
    tokens = case.trl_microbatch * ((case.prompt_tokens or 45) + case.tokens)  # of a pass, as many as TRL's
    settings = {
        "model_id": model,
        "dataset_id": prompts,
        "reward_funcs": f"{Path(__file__).resolve()}:reward",
        "prompts_per_step": case.prompts,
        "num_generations": case.generations,
        "max_completion_length": case.tokens,
        "min_completion_length": case.tokens,
        "max_prompt_length": 512,
        "tokens_per_microbatch": tokens,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "compute_dtype": "bfloat16",
        "output_dir": folder,
        "run_name": "run",
        "print_samples_every": 0,
        **options,
    }
    flags = [*(f"--{name}={value}" for name, value in settings.items()), "--no-gradient_checkpointing"]
    return [sys.executable, str(ROOT / "train_grpo.py"), *flags]


# ---- measuring ------------------------------------------------------------------------------------------------------


def peak_rss(pid: int) -> int:
    """Largest resident set of a process so far, in bytes; 0 if it is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def measure(command: list[str], env: dict, metrics: Path, steps: int, log: Path) -> dict:
    """Run a trainer; what its steps after the first took."""
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(
            command, env=env, cwd=metrics.parent, stdout=out, stderr=out, preexec_fn=ends_with_us()
        )
    peak, deadline = 0, time.monotonic() + RUN_LIMIT
    try:
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
            if not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
                peak = max(peak, peak_rss(process.pid))  # the checkpoint that follows the last step does not count
        code = process.poll()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    lines = read_metrics(metrics.parent)
    if code or len(lines) < steps:
        tail = "\n".join(log.read_text(errors="replace", encoding="utf-8").splitlines()[-20:])
        raise RuntimeError(f"exit code {code}, {len(lines)} of {steps} steps: {' '.join(command)}\n{tail}")
    wall = [after["time/unix"] - before["time/unix"] for before, after in zip(lines, lines[1:], strict=False)]
    on_gpu = max(line.get("memory/peak_gb") or 0 for line in lines)
    tokens = [line["completions/mean_length"] for line in lines]
    return {"seconds": wall, "peak": on_gpu * 1e9 or peak, "tokens": tokens}


def run_one(system: str, name: str, args, folder: Path, server) -> dict:
    """One run of one system on one case, in a folder of its own."""
    case, steps = CASES[name], args.steps + 1
    prompts, env, metrics = str(folder / "prompts.jsonl"), dict(os.environ), folder / "run" / "metrics.jsonl"
    write_prompts(Path(prompts), args.model, case.prompt_tokens)
    metrics.parent.mkdir()
    if system == "trl":
        command = [sys.executable, str(Path(__file__).resolve()), "--model", args.model, "--steps", str(args.steps)]
        command += ["--cases", name, "--trl_child", prompts, str(metrics)]
    else:
        options = {
            "generator": system,
            "dtype": "bfloat16",
            "logprob_diff_limit": 10.0,
        }  # blocked end tokens count in it
        if system == "vllm":
            options["server_urls"], env["VLLM_SERVER_TOKEN"] = server.url, server.token
        command = our_command(args.model, prompts, case, steps, folder, options)
    out = measure(command, env, metrics, steps, folder / "output.txt")
    if set(out["tokens"]) != {float(case.tokens)}:
        raise RuntimeError(f"{system} sampled {out['tokens']} tokens a completion, not {case.tokens}: unequal work")
    return out


# ---- report ---------------------------------------------------------------------------------------------------------


def table(runs: list[dict]) -> str:
    """A system on a case a line, over all repetitions; ratios to TRL's median time and memory."""
    lines = ["| work | | s a step: median (min - max) | x TRL | trainer GiB | x TRL |", "|---|---|---|---|---|---|"]
    for name, case in CASES.items():
        work, base = f"{case.prompts} prompts x {case.generations} completions of {case.tokens} tokens", None
        for system, title in SYSTEMS.items():
            mine = [run for run in runs if (run["case"], run["system"]) == (name, system)]
            if not mine:
                continue
            seconds = sum((run["seconds"] for run in mine), [])
            own = statistics.median(seconds), statistics.median(run["peak"] for run in mine) / 2**30
            base = own if system == "trl" else base
            ratios = [f"{a / b:.2f}" for a, b in zip(own, base, strict=True)] if base else ["", ""]
            spread = f"{own[0]:.2f} ({min(seconds):.2f} - {max(seconds):.2f})"
            lines.append(f"| {work} | {title} | {spread} | {ratios[0]} | {own[1]:.2f} | {ratios[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"))
    parser.add_argument("--reps", type=int, default=3, help="fresh processes of each system, in turn")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each run; one more goes before as warm-up")
    parser.add_argument("--cases", nargs="+", default=["short", "long", "reasoning"], choices=CASES)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--trl_child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model
    if args.trl_child:
        prompts, metrics = args.trl_child
        return run_trl(args.model, prompts, CASES[args.cases[0]], args.steps + 1, Path(metrics))
    runs = []
    for rep in range(args.reps):
        for system in sorted(args.systems, key=lambda system: system == "vllm"):  # the server's last
            more = ("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "1024")
            server = start_server(args.model, *more).wait(300) if system == "vllm" else None
            try:
                for case in args.cases:
                    with tempfile.TemporaryDirectory() as folder:  # of 1 to 2 GB: each run leaves a checkpoint
                        result = run_one(system, case, args, Path(folder), server)
                    runs.append({"system": system, "case": case} | result)
                    print(f"{rep + 1}/{args.reps} {case} {system}: {result}", flush=True)
            finally:
                if server:
                    server.stop()
    print(table(runs))


if __name__ == "__main__":
    main()
