"""Weights really arrive: six kinds of policy on two ranks, a large edit, a push, and what the server then says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from server_fixture import make_tiny, start_server

WORKER = str(Path(__file__).parent / "push_worker.py")


def push_all(server, compute_dtype: str, out: Path) -> list[dict]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", WORKER]
    command += [str(server.model_dir), server.url, compute_dtype, str(out)]
    env = os.environ | {"VLLM_SERVER_TOKEN": server.token, "OMP_NUM_THREADS": "1"}
    env["MALLOC_MMAP_THRESHOLD_"] = "65536"  # bytes; what is freed goes back at once, so that a peak is one
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(out.read_text())


def check(results: list[dict], limit: float) -> None:
    assert len(results) == 6
    for result in results:
        assert result["before"] > 0.1 > result["after"], result  # the edit was large, and it arrived
        assert result["after"] < limit, result
        assert result["version"] and result["untouched"], result
        # Of a model of 164 MiB: a layer gathered, the bucket filled from it, that packed for the wire; 13 MiB each.
        assert result["extra_mb"] < 3 * 13 + 16, result


def test_pushed_weights_are_the_trainers_in_fp32(server, tmp_path):
    check(push_all(server, "float32", tmp_path / "out.json"), 1e-4)


@pytest.fixture(scope="module")
def bfloat16_server():
    live = start_server(make_tiny(), "--dtype", "bfloat16", "--max-model-len", "512")
    try:
        yield live.wait()
    finally:
        live.stop()


def test_pushed_weights_are_the_trainers_in_bf16(bfloat16_server, tmp_path):
    check(push_all(bfloat16_server, "bfloat16", tmp_path / "out.json"), 0.05)
