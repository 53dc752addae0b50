"""Five learning rates of the demo on one server: one run after another, then all at once.

    python benchmarks/shared_runs.py [--model models/SmolLM2-135M-Instruct] [--steps 5]       # 15 minutes on two cores

Five whole runs of train_grpo.py with adapters alone (scripts/demo.sh's settings, seed 42), rates 1e-5 to 1e-3, beside
one live server in bfloat16. Printed: seconds of all five from the first start to the last end, sampled tokens for a
second of wall time and of the server's CPU time, and the seconds that the server took to start, which runs with servers
of their own would each pay. Results: benchmarks/results/shared_runs.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests")]

from adapters import cpu_seconds  # noqa: E402
from server_fixture import start_server  # noqa: E402

from runlog.reading import read_metrics  # noqa: E402

RATES = ("1e-5", "3e-5", "1e-4", "3e-4", "1e-3")


def trainer(server, folder: Path, name: str, rate: str, steps: int) -> subprocess.Popen:
    command = [sys.executable, "train_grpo.py", "--config", "examples/sums.yaml", "--server_urls", server.url]
    command += ["--model_id", str(server.model_dir)]
    command += ["--push_lora", "adapters", "--server_timeout", "600", "--learning_rate", rate, "--run_name", name]
    command += ["--max_steps", str(steps), "--eval_steps", "1000", "--seed", "42", "--output_dir", str(folder)]
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        env = os.environ | {"VLLM_SERVER_TOKEN": server.token}
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=env)


def measured(server, folder: Path, how: str, steps: int) -> dict:
    """Of five runs."""
    began, cpu, runs = time.monotonic(), cpu_seconds(server), []
    for number, rate in enumerate(RATES):
        runs.append(trainer(server, folder, f"{how}-{number}", rate, steps))
        if how == "after":
            runs[-1].wait(3600)
    if bad := [number for number, run in enumerate(runs) if run.wait(3600)]:
        raise SystemExit(f"runs {bad} of {folder} failed; their logs are there")
    seconds, cpu = time.monotonic() - began, cpu_seconds(server) - cpu
    # Not from /server_info, which forgets runs that have ended.
    lines = sum((read_metrics(folder / f"{how}-{number}") for number in range(len(RATES))), [])
    tokens = sum(line.get("server/tokens", 0) for line in lines)
    found = {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds}
    return found | {"server_cpu_seconds": cpu, "tokens_per_cpu_second": tokens / cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    began = time.monotonic()
    words = ["--dtype", "bfloat16", "--max-model-len", "512", "--enable-lora", "--max-loras", "6"]
    server = start_server(args.model, *words)
    folder = Path(tempfile.mkdtemp(prefix="shared_runs_"))
    try:
        server.wait(900)
        result = {"model": Path(args.model).name, "steps": args.steps, "server_start_seconds": time.monotonic() - began}
        for how in ("after", "at_once"):
            result[how] = measured(server, folder, how, args.steps)
            print(how, result[how], flush=True)
    finally:
        server.stop()
    result = json.dumps(result, indent=1)
    print(result)
    (ROOT / "benchmarks" / "results" / "shared_runs.json").write_text(result + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
