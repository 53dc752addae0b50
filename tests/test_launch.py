"""scripts/serve_and_train.sh and scripts/slurm.sh where there are GPUs and nodes that this machine need not have.

Commands of the same names stand before the real ones in PATH, and write down what they were given."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

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
if name == "scontrol":
    print("node-a", "node-b", "node-c", sep="\\n")
    sys.exit()
script = next((word for word in words if word.endswith(".py")), None)
if script is None:  # the launcher's own one-liners
    os.execv("{python}", ["{python}", *words] if words != ["-", "runs/{run}"] else ["{python}", "-c", ""])
seen = dict(name=name, words=words, gpus=os.environ.get("CUDA_VISIBLE_DEVICES"))
token = os.environ.get("VLLM_SERVER_TOKEN_FILE")
seen["token"] = token and (oct(os.stat(token).st_mode & 0o777), len(open(token).read()))
seen["ready"] = os.path.exists(here + "/ready")
with open(f"{{here}}/{{'server' if script == 'vllm_server.py' else 'trainer'}}.json", "w") as file:
    json.dump(seen, file)
if script == "vllm_server.py":
    time.sleep(0.5)
    if {dies}:
        sys.exit("CUDA out of memory")
    open(here + "/ready", "w").close()
    nodes = next((int(word.removeprefix("--nodes=")) for word in words if word.startswith("--nodes=")), 1)
    print("vllm_server: ready, a model\\n" * nodes, flush=True)
    time.sleep(60)
"""


def launch(folder: Path, gpus: int, *flags: str, visible=None, dies=False, script="serve_and_train.sh", **env: str):
    """(exit status, what was printed, what the server was given, what the trainer was given)"""
    run = "launch-" + secrets.token_hex(4)
    for name in ("nvidia-smi", "python", "torchrun", "srun", "scontrol"):
        text = STAND_IN.format(python=sys.executable, here=folder, gpus=gpus, run=run, dies=dies)
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "SERVER_FLAGS")}
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}"} | env
    environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    command = ["bash", f"scripts/{script}", run, "a-model", "512", "train_grpo.py", *flags]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, encoding="utf-8"
        )
    finally:
        (ROOT / "runs" / f"{run}-server.log").unlink(missing_ok=True)
    files = [folder / f"{name}.json" for name in ("server", "trainer")]
    return (
        done.returncode,
        done.stderr,
        *(json.loads(f.read_text(encoding="utf-8")) if f.exists() else None for f in files),
    )


def test_eight_gpus_are_divided(tmp_path):
    status, text, server, trainer = launch(tmp_path, 8, "--max_steps", "3")
    assert status == 0, text
    assert server["gpus"] == "0" and not any("parallel" in word for word in server["words"])
    assert trainer["gpus"] == "1,2,3,4" and trainer["ready"]  # no usual number of prompts divides by 7
    assert "4 GPUs train, 3 stay idle" in text
    assert trainer["name"] == "torchrun" and trainer["words"][:2] == ["--standalone", "--nproc_per_node=4"]
    assert trainer["words"][2] == "train_grpo.py"
    assert trainer["words"][-2:] == ["--max_steps", "3"]
    assert "--gpu-memory-utilization" not in server["words"]  # it has its GPU for itself


def test_more_gpus_for_the_server(tmp_path):
    """Of those that are visible, whatever their names."""
    status, text, server, trainer = launch(tmp_path, 8, "--server_gpus", "2", "--max_steps", "3", visible="GPU-a,4,5")
    assert status == 0, text
    assert server["gpus"] == "GPU-a,4" and server["words"][-2:] == ["--tensor-parallel-size", "2"]
    assert trainer["gpus"] == "5" and trainer["name"] == "python" and trainer["words"][-2:] == ["--max_steps", "3"]


def test_replicas_in_place_of_tensor_parallelism(tmp_path):
    _, _, server, _ = launch(tmp_path, 4, "--server_gpus=2", SERVER_FLAGS="--data-parallel-size 2")
    assert server["gpus"] == "0,1" and "--tensor-parallel-size" not in server["words"]


def test_one_gpu_is_shared_and_the_server_comes_first(tmp_path):
    """What the trainer took while vLLM measures its memory would be counted as vLLM's."""
    status, text, server, trainer = launch(tmp_path, 1)
    assert status == 0, text
    assert server["gpus"] == trainer["gpus"] == "0" and trainer["ready"] and trainer["name"] == "python"
    assert server["words"][-2:] == ["--gpu-memory-utilization", "0.3"]


@pytest.mark.parametrize("gpus", [1, 4])
def test_turns_on_one_gpu_give_the_server_most_of_it(tmp_path, gpus):
    status, text, server, trainer = launch(tmp_path, gpus, "--colocate")
    assert status == 0, text
    assert server["gpus"] == trainer["gpus"] == "0" and trainer["name"] == "python" and "--colocate" in trainer["words"]
    assert server["words"][-3:] == ["--gpu-memory-utilization", "0.85", "--enable-sleep-mode"]


@pytest.mark.parametrize(("gpus", "visible"), [(0, None), (2, "")])
def test_without_a_gpu_both_begin_at_once(tmp_path, gpus, visible):
    status, text, server, trainer = launch(tmp_path, gpus, visible=visible)
    assert status == 0, text
    assert trainer["name"] == "python" and not trainer["ready"]
    assert "--gpu-memory-utilization" not in server["words"] and server["gpus"] == visible


@pytest.mark.parametrize("number", ["0", "4", "two"])
def test_a_division_that_leaves_nothing_is_refused(tmp_path, number):
    status, text, server, trainer = launch(tmp_path, 4, "--server_gpus", number)
    assert status == 2 and f"--server_gpus={number}" in text and "1 to 3" in text
    assert server is None and trainer is None


def test_a_server_that_ends_while_loading(tmp_path):
    """The trainer is not started, and the server's last lines are shown."""
    status, text, server, trainer = launch(tmp_path, 2, dies=True)
    assert status == 1 and "CUDA out of memory" in text and server and trainer is None


def test_a_server_that_is_never_ready(tmp_path):
    (tmp_path / "bin").mkdir()
    status, text, _, trainer = launch(tmp_path, 2, SERVER_START_SECONDS="0")
    assert status == 1 and trainer is None and "SERVER_START_SECONDS=0" in text


def test_slurm_has_the_first_node_serve_and_the_others_train(tmp_path):
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node-[a-c]", "SLURM_JOB_ID": "1234567"}
    status, text, server, trainer = launch(tmp_path, 8, "-x", script="slurm.sh", SLURM_GPUS_ON_NODE="8", **slurm)
    assert status == 0, text
    words, given = " ".join(server["words"]), " ".join(trainer["words"])
    assert "--nodelist=node-a python vllm_server.py" in words and "--host 0.0.0.0 --port 14567" in words
    assert "--tensor-parallel-size 8" in words and server["token"] == trainer["token"] == ["0o600", 33]
    assert "--nodes=2 --ntasks-per-node=1 --nodelist=node-b,node-c torchrun --nnodes=2 --nproc_per_node=8" in given
    assert "--rdzv_endpoint=node-b:24567 train_grpo.py" in given and given.endswith("-x") and trainer["ready"]
    assert "--server_urls http://node-a:14567" in given
    assert not list((ROOT / "runs").glob("launch-*-token"))


def test_slurm_has_several_nodes_serve(tmp_path):
    """Each a whole server; the trainers know them all."""
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NODELIST": "node-[a-c]", "SLURM_JOB_ID": "1234567"}
    slurm |= {"SLURM_GPUS_ON_NODE": "8", "SERVER_FLAGS": "--data-parallel-size 8"}
    status, text, server, trainer = launch(tmp_path, 8, "-x", script="slurm.sh", SERVER_NODES="2", **slurm)
    assert status == 0, text
    words, given = " ".join(server["words"]), " ".join(trainer["words"])
    assert "--nodes=2 --ntasks-per-node=1 --nodelist=node-a,node-b python" in words and "--tensor" not in words
    assert "--nodes=1 --ntasks-per-node=1 --nodelist=node-c torchrun --nnodes=1 --nproc_per_node=8" in given
    assert "--rdzv_endpoint=node-c:24567" in given and trainer["ready"]
    assert "--server_urls http://node-a:14567 http://node-b:14567 --server_timeout" in given
    status, text, server, trainer = launch(tmp_path, 8, script="slurm.sh", SERVER_NODES="3", **slurm)
    assert status == 2 and "SERVER_NODES=3 of 3" in text
