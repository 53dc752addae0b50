"""What an hour of use waits for: --help, the first step, --resume, an evaluation, a checkpoint, a server.  No GPU.

    python benchmarks/first_hour.py                                           # 5 minutes; the tiny random model
    python benchmarks/first_hour.py --model models/SmolLM2-135M-Instruct      # the demo's

Beside each stands what cannot be had without: the imports of torch, transformers and the parts of them that a run uses,
and for the server vLLM's own. Wall seconds, and seconds of a core (all processes that were started), which
other work on the machine does not change. The best of three, of runs and servers of one.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from server_fixture import free_port  # noqa: E402

from runlog.reading import read_metrics  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

COMMANDS = ["train_minimal.py", "train_grpo.py", "train_ppo.py", "train_async.py", "plan.py", "look.py", "rollouts.py"]
COMMANDS += ["vllm_server.py", *(f"scripts/{name}.py" for name in "check gpu_check warm_start from_trl".split())]
USED = "import torch, torch.distributed.fsdp, torch.distributed.checkpoint; from transformers import AutoTokenizer, "
USED += "AutoModelForCausalLM; from transformers.models.llama import modeling_llama; import peft"
ENV = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_SERVER_TOKEN": "x", "VLLM_CPU_KVCACHE_SPACE": "1"}


def timed(*command: str) -> tuple[float, float]:
    """(wall seconds, of a core), the best of three by the latter."""
    found = []
    for _ in range(3):
        start = time.monotonic()
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{command} ended with {status}")
        found.append((used.ru_utime + used.ru_stime, time.monotonic() - start))
    return min(found)[::-1]


def trained(folder: Path, model: str, *flags: str) -> dict[str, float]:
    """Wall seconds from the start to what the log says first of each."""
    command = [sys.executable, "train_grpo.py", "--config", "examples/sums.yaml", "--generator", "hf", "--model_id"]
    command += [
        model,
        "--output_dir",
        str(folder),
        "--run_name",
        "run",
        "--save_steps",
        "2",
        "--eval_steps",
        "2",
        *flags,
    ]
    signs = {"resumed": r"^Resuming", "evaluation": r"^evaluation", "first step": r"^step \d+/", "report": r"^report:"}
    seen, start = {}, time.monotonic()
    how = dict(cwd=ROOT, env=ENV | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, encoding="utf-8")
    process = subprocess.Popen(command, preexec_fn=ends_with_us(), **how)
    for line in process.stdout:
        for name, sign in signs.items():
            if name not in seen and re.match(sign, line):
                seen[name] = time.monotonic() - start
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} ended with {status}")
    return seen | {"ended": time.monotonic() - start, "core": used.ru_utime + used.ru_stime}


def served(*command: str) -> tuple[float, float]:
    """Until /health answers; seconds of a core of it and its children at that moment."""
    import psutil

    port = free_port()
    start = time.monotonic()
    how = dict(cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=ends_with_us())
    process = subprocess.Popen([*command, "--port", str(port)], **how)
    try:
        while time.monotonic() - start < 600:
            time.sleep(0.2)
            if process.poll() is not None:
                raise SystemExit(f"{command} ended with {process.returncode}")
            try:
                headers = {"Authorization": "Bearer x"}
                if requests.get(f"http://127.0.0.1:{port}/health", headers=headers, timeout=5).status_code == 200:
                    break
            except requests.RequestException:
                continue
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        return time.monotonic() - start, sum(sum(one.cpu_times()[:2]) for one in family)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def scripts_and_runs(model: str, say) -> None:
    for command in COMMANDS:
        say(f"`{command} --help`", timed(command, "--help"))
    say("*import torch*", timed("-c", "import torch"))
    say("*import torch, transformers, peft, as far as a run does*", timed("-c", USED))
    say("import train_grpo", timed("-c", "import train_grpo"))
    with tempfile.TemporaryDirectory() as folder:
        first = trained(Path(folder), model, "--max_steps", "2")
        say("a run of two steps, its end and three evaluations", (first["ended"], first["core"]))
        print(f"| ... to its first evaluation, before a step | {first['evaluation']:.1f} | |")
        print(f"| ... to its first step | {first['first step']:.1f} | |")
        lines = [line for line in read_metrics(Path(folder) / "run") if "time/unix" in line]
        print(f"| ... a step (the last) | {lines[-2]['time/step']:.2f} | |")
        evaluated = lines[-1]["time/unix"] - lines[-2]["time/unix"]
        print(f"| ... an evaluation of 60 rows x 4 (the last) | {evaluated:.2f} | |")
        saved = max(p.stat().st_mtime for p in (Path(folder) / "run/checkpoints/step_2").rglob("*"))
        print(f"| ... from there until a checkpoint is whole | {saved - lines[-1]['time/unix']:.2f} | |")
        again = trained(Path(folder), model, "--max_steps", "4", "--resume")
        say("the same with --resume, two steps more", (again["ended"], again["core"]))
        print(f"| ... until it has compared what it resumes | {again['resumed']:.1f} | |")
        print(f"| ... to its first step | {again['first step']:.1f} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/tiny")
    parser.add_argument("--servers", action="store_true", help="the servers alone")
    given = parser.parse_args()
    print("| what | s | s of a core |\n|---|---:|---:|")

    def say(what: str, seconds: tuple[float, float]) -> None:
        print(f"| {what} | {seconds[0]:.1f} | {seconds[1]:.1f} |", flush=True)

    if not given.servers:
        scripts_and_runs(given.model, say)
    flags = ["--dtype", "float32", "--max-model-len", "512"]
    bare = ["-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    say("*vLLM's own server*", served(sys.executable, *bare, "--model", given.model, *flags))
    say("`vllm_server.py`", served(sys.executable, "vllm_server.py", "--model", given.model, *flags))


if __name__ == "__main__":
    main()
