"""What sampling while the trainer updates saves where scores take their time: train_grpo.py against train_async.py. No
GPU.

    python benchmarks/overlap.py                                    # two hours on two idle cores, by estimate

A live vLLM server and the trainer are each pinned to a core of their own, which is what two GPUs are to them. SmolLM2
(135 M, LoRA), the demo's batch of 8 prompts x 8 completions, an update and a push a step, all alike in the scripts that
are compared; they run in turn, `repetitions` times. The first two steps of each run are left out: the server compiles,
and nothing was sampled ahead.

A judge answers in lognormal times (slow_judge.py), as tools, tests in a sandbox and judges do; their means are --waits.
What trainer and server compute is the same.

Written to benchmarks/results/overlap.md.
"""

import argparse
import json
import os
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

MODEL, FOLDER = "models/SmolLM2-135M-Instruct", ROOT / "runs" / "overlap"
COMMON = (
    f"--model_id {MODEL} --dataset_id examples/sums.py:rows --max_prompt_length 128 --max_completion_length 12 "
    "--min_completion_length 12 --learning_rate 3e-4 --use_peft --lora_r 32 --lora_alpha 64 "
    "--print_samples_every 0 --logprob_diff_limit 1 --reward_funcs benchmarks/slow_judge.py:judge"
)
AHEAD = {f"in_flight_{n}x": n for n in (2, 3, 4)}  # groups begun and not trained on, as a multiple of a step's
SYSTEMS = ["train_grpo.py", *AHEAD]


def pinned(core: int, command: list[str], log: Path, **variables: str) -> subprocess.Popen:
    """A process on one core, with all its threads."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")}
    threads["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
    environment = os.environ | threads | {"OMP_WAIT_POLICY": "PASSIVE"} | variables
    with open(log, "w", encoding="utf-8") as file:
        command = ["taskset", "-c", str(core), sys.executable, *command]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, preexec_fn=ends_with_us())


def measure(name: str, wait: float, args: argparse.Namespace) -> dict[str, float]:
    """Means over the steps of one run, on a server of its own."""
    token, port, folder = os.urandom(8).hex(), free_port(), FOLDER
    run = f"{name.replace(' ', '_').replace('.', '_')}_{int(time.time())}"
    serve = ["vllm_server.py", "--model", MODEL, "--port", str(port), "--max-model-len", "512"]
    serve += ["--exit-with-parent"]
    server = pinned(0, serve, folder / f"{run}-server.log", VLLM_SERVER_TOKEN=token)
    script = "train_async.py" if name in AHEAD else "train_grpo.py"
    flags = [*COMMON.split(), "--max_steps", str(args.steps)]
    ahead = ["--in_flight", str(AHEAD.get(name, 0) * args.prompts), "--max_staleness", str(args.max_staleness)]
    flags += ahead if name in AHEAD else []
    flags += ["--prompts_per_step", str(args.prompts), "--num_generations", str(args.generations)]
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
        "dropped": mean.get("async/dropped", 0.0) / args.prompts,
        "ess": mean.get("sampling/ess", 1.0), "update": mean["time/update"] + mean["time/push"] + mean["time/logprobs"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--max_staleness", type=int, default=4)
    parser.add_argument("--waits", type=float, nargs="+", default=[0.5, 1, 2], help="mean seconds of an answer")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    cases = [(wait, name) for wait in args.waits for name in args.systems]
    found: dict[tuple, list[dict]] = {case: [] for case in cases}
    for repetition in range(args.repetitions):
        for wait, name in cases:
            found[wait, name].append(measure(name, wait, args))
            last = {key: round(value, 3) for key, value in found[wait, name][-1].items()}
            print(repetition, wait, name, json.dumps(last), flush=True)
    medians = {n: {k: statistics.median(run[k] for run in runs) for k in runs[0]} for n, runs in found.items()}
    columns = ["seconds", "tokens/s", "update", "trainer waited", "server waited", "staleness", "dropped", "ess"]
    command = " ".join(["python benchmarks/overlap.py", *sys.argv[1:]])
    how = f"{args.repetitions} repetitions of {args.steps} steps in turn, medians; `update`: seconds of log-probs, "
    how += "update and push; waiting as a share of the step; groups dropped as a share of those trained on"
    lines = [
        f"Measured on two cores, server and trainer pinned to one each: `{command}`; {how}.\n",
        f"| | s a step | x | {' | '.join(columns[1:])} |",
        "|---|" + "---:|" * (len(columns) + 1),
    ]
    for (wait, name), row in medians.items():
        times = medians[wait, args.systems[0]]["seconds"] / row["seconds"]
        cells = [f"{row['seconds']:.2f}", f"{times:.2f}", *(f"{row[c]:.2f}" for c in columns[1:])]
        lines.append(f"| {wait:g} s: {name} | {' | '.join(cells)} |")
    (ROOT / "benchmarks" / "results" / "overlap.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
