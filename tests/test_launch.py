"""scripts/serve_and_train.sh where there are GPUs that this machine need not have.

Commands of the same names stand before the real ones in PATH, and write down what they were given."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from server_fixture import ROOT

# What a command was given, as a line of JSON. The server loads for a moment; a trainer must not begin before its end.
STAND_IN = """#!{python}
import json, os, sys, time
here = "{here}"
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
if name == "nvidia-smi":
    print(*[f"GPU {{i}}: a GPU (UUID: GPU-{{i}})" for i in range({gpus})], sep="\\n")
    sys.exit(0 if {gpus} else 9)
script = next((word for word in words if word.endswith(".py")), None)
if script is None:  # the launcher's own one-liners
    os.execv("{python}", ["{python}", *words] if words != ["-", "runs/{run}"] else ["{python}", "-c", ""])
seen = dict(name=name, words=words, gpus=os.environ.get("CUDA_VISIBLE_DEVICES"), pid=os.getpid())
seen["ready"] = os.path.exists(here + "/ready")
with open(f"{{here}}/{{'server' if script == 'vllm_server.py' else 'trainer'}}.json", "w") as file:
    json.dump(seen, file)
if script == "vllm_server.py":
    time.sleep(0.5)
    if {dies}:
        sys.exit("CUDA out of memory")
    open(here + "/ready", "w").close()
    print("vllm_server: ready, a model", flush=True)
    time.sleep(60)
"""


def launch(folder: Path, gpus: int, *flags: str, visible=None, dies=False):
    """(exit status, what was printed, what the server was given, what the trainer was given)"""
    run = "launch-" + secrets.token_hex(4)
    for name in ("nvidia-smi", "python", "torchrun"):
        text = STAND_IN.format(python=sys.executable, here=folder, gpus=gpus, run=run, dies=dies)
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "SERVER_FLAGS")}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    command = ["bash", "scripts/serve_and_train.sh", run, "a-model", "512", "train_grpo.py", *flags]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, encoding="utf-8"
        )
    finally:
        (ROOT / "runs" / f"{run}-server.log").unlink(missing_ok=True)
    files = [folder / f"{name}.json" for name in ("server", "trainer")]
    return done.returncode, done.stderr, *(json.loads(f.read_text("utf-8")) if f.exists() else None for f in files)


@pytest.mark.parametrize(
    "gpus, visible, flags, of_server, of_trainer, more",
    [
        (8, None, "", "0", "1,2,3,4", []),  # no usual number of prompts divides by 7
        (8, "GPU-a,4,5", "--server_gpus 2", "GPU-a,4", "5", ["--tensor-parallel-size", "2"]),
        (1, None, "", "0", "0", ["--gpu-memory-utilization", "0.3"]),
        (4, None, "--colocate", "0", "0", ["--gpu-memory-utilization", "0.85", "--enable-sleep-mode"]),
        (0, None, "", None, None, []),
    ],
    ids=["eight", "of those that are visible", "one shared", "one by turns", "none"],
)
def test_gpus_are_divided_between_server_and_trainer(tmp_path, gpus, visible, flags, of_server, of_trainer, more):
    status, text, server, trainer = launch(tmp_path, gpus, *flags.split(), "--max_steps", "3", visible=visible)
    assert status == 0, text
    assert (server["gpus"], trainer["gpus"]) == (of_server, of_trainer) and not psutil.pid_exists(server["pid"])
    assert server["words"][len(server["words"]) - len(more) :] == more
    assert more or not any(word in server["words"] for word in ("--gpu-memory-utilization", "--tensor-parallel-size"))
    ranks = len((of_trainer or "").split(","))
    assert trainer["name"] == ("torchrun" if ranks > 1 else "python")
    assert ranks == 1 or {f"--nproc_per_node={ranks}", "train_grpo.py"} <= set(trainer["words"])
    assert trainer["words"][-2:] == ["--max_steps", "3"] and ("--colocate" in trainer["words"]) == ("--col" in flags)
    # What the trainer took while vLLM measures its memory would be counted as vLLM's; on CPUs both begin at once.
    assert trainer["ready"] == bool(gpus)


def test_what_cannot_be_started_is_said(tmp_path):
    """A division that leaves nothing, and a server that ends while it loads: its last lines are shown."""
    status, text, server, trainer = launch(tmp_path, 4, "--server_gpus", "4")
    assert status == 2 and "--server_gpus=4" in text and server is None and trainer is None
    status, text, server, trainer = launch(tmp_path, 2, dies=True)
    assert status == 1 and "CUDA out of memory" in text and server and trainer is None
