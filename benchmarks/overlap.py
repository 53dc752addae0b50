"""What sampling while the trainer updates saves where scores take their time: train_grpo.py against train_async.py. No
GPU.

    python benchmarks/overlap.py        # a quarter of an hour on two idle cores, by estimate

A live vLLM server and the trainer are each pinned to a core of their own, which is what two GPUs are to them. SmolLM2
(135 M, LoRA), 4 prompts x 4 completions, an update and a push a step, alike in both scripts; train_async.py has three
times the groups of a step under way. The first two steps of each run are left out: the server compiles, and nothing was
sampled ahead.

A judge answers in lognormal times (sigma 1), as tools, tests in a sandbox and judges do; their means are --waits.
What trainer and server compute is the same.

Written to benchmarks/results/overlap.md.
"""

import argparse
import asyncio
import itertools
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]
from orphans import ends_with_us  # noqa: E402
from server_fixture import free_port  # noqa: E402

from runfiles.reading import read_metrics  # noqa: E402

MODEL, FOLDER, PROMPTS = "models/SmolLM2-135M-Instruct", ROOT / "runs" / "overlap", 4
COMMON = (
    f"--model_id {MODEL} --dataset_id examples/sums.py:rows --max_prompt_length 128 --max_completion_length 12 "
    "--min_completion_length 12 --learning_rate 3e-4 --use_peft --lora_r 32 --lora_alpha 64 "
    "--print_samples_every 0 --logprob_diff_limit 1 --reward_funcs benchmarks/overlap.py:judge "
    f"--prompts_per_step {PROMPTS} --num_generations 4"
)
SCRIPTS = {"train_grpo.py": "", "train_async.py": f"--in_flight {3 * PROMPTS} --max_staleness 2"}


async def judge(completions, **columns) -> list[float]:
    """Chance, after a while: no group is silent, so that every step computes the same."""

    async def one() -> float:
        await asyncio.sleep(random.lognormvariate(math.log(float(os.environ["SLOW"])) - 0.5, 1))  # the mean is SLOW
        return random.random()

    return await asyncio.gather(*(one() for _ in completions))


def pinned(core: int, command: list[str], log: Path, **variables: str) -> subprocess.Popen:
    """A process on one core, with all its threads."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")}
    threads["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
    environment = os.environ | threads | {"OMP_WAIT_POLICY": "PASSIVE"} | variables
    with open(log, "w", encoding="utf-8") as file:
        command = ["taskset", "-c", str(core), sys.executable, *command]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, preexec_fn=ends_with_us())


def measure(script: str, wait: float, steps: int) -> dict[str, float]:
    """Means over the steps of one run, on a server of its own."""
    token, port, folder = os.urandom(8).hex(), free_port(), FOLDER
    run = f"{script.removesuffix('.py')}_{int(time.time())}"
    serve = ["vllm_server.py", "--model", MODEL, "--port", str(port), "--max-model-len", "512"]
    serve += ["--exit-with-parent"]
    server = pinned(0, serve, folder / f"{run}-server.log", VLLM_SERVER_TOKEN=token)
    flags = [*COMMON.split(), *SCRIPTS[script].split(), "--max_steps", str(steps)]
    where = ["--server_urls", f"http://127.0.0.1:{port}", "--server_timeout", "300", "--output_dir", str(folder)]
    trainer = pinned(
        1, [script, *flags, *where, "--run_name", run], folder / f"{run}.log", VLLM_SERVER_TOKEN=token, SLOW=str(wait)
    )
    try:
        if trainer.wait(3600):
            raise SystemExit((folder / f"{run}.log").read_text(encoding="utf-8")[-3000:])
    finally:
        trainer.kill()
        server.terminate()
        server.wait(30)
    lines = [line for line in read_metrics(folder / run) if "reward" in line]
    ends = [line["time/unix"] for line in lines]
    kept = lines[2:]
    seconds = (ends[-1] - ends[1]) / len(kept)
    mean = {key: statistics.mean(line.get(key) or 0.0 for line in kept) for key in kept[-1] if key != "step"}
    tokens = (lines[-1]["num_tokens"] - lines[1]["num_tokens"]) / len(kept)
    waited = mean.get("async/trainer_waited", mean["time/generate"] + mean["time/score"])
    server_waited = mean.get("async/generator_waited", seconds - mean["time/generate"])
    return {
        "seconds": seconds, "tokens/s": tokens / seconds, "trainer waited": waited / seconds,
        "server waited": server_waited / seconds, "staleness": mean.get("staleness/mean", 0.0),
        "dropped": mean.get("async/dropped", 0.0) / PROMPTS,
        "ess": mean.get("sampling/ess", 1.0), "update": mean["time/update"] + mean["time/push"] + mean["time/logprobs"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--waits", type=float, nargs="+", default=[0.5, 1, 2], help="mean seconds of an answer")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    found: dict[tuple, dict] = {}
    for wait, script in itertools.product(args.waits, SCRIPTS):
        row = found[wait, script] = measure(script, wait, args.steps)
        print(wait, script, {key: round(value, 3) for key, value in row.items()}, flush=True)
    columns = ["seconds", "tokens/s", "update", "trainer waited", "server waited", "staleness", "dropped", "ess"]
    command = " ".join(["python benchmarks/overlap.py", *sys.argv[1:]])
    how = "one run each; waiting as a share of the step; groups dropped as a share of those trained on"
    lines = [
        f"Measured on two cores, server and trainer pinned to one each: `{command}`; {how}.\n",
        f"| | s a step | x | {' | '.join(columns[1:])} |",
        "|---|" + "---:|" * (len(columns) + 1),
    ]
    for (wait, script), row in found.items():
        times = found[wait, "train_grpo.py"]["seconds"] / row["seconds"]
        cells = [f"{row['seconds']:.2f}", f"{times:.2f}", *(f"{row[c]:.2f}" for c in columns[1:])]
        lines.append(f"| {wait:g} s: {script} | {' | '.join(cells)} |")
    (ROOT / "benchmarks" / "results" / "overlap.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
