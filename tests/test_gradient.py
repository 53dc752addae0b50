"""The gradient does not depend on how an update is cut: micro-batches, ranks, sharding, shared or repeated prompts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ENV = os.environ | {"OMP_NUM_THREADS": "1"}
WORKER = str(Path(__file__).parent / "gradient_worker.py")


def run(strategy, out, ranks, *flags) -> dict:
    command = [sys.executable, WORKER] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run"]
    if ranks > 1:
        command += ["--standalone", f"--nproc_per_node={ranks}", WORKER]
    done = subprocess.run([*command, strategy, str(out), *flags], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return torch.load(out)


def relative_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    distance = sum((a[name] - b[name]).double().pow(2).sum() for name in a)
    return float((distance / sum(b[name].double().pow(2).sum() for name in b)).sqrt())


@pytest.fixture(scope="module", params=[(), ("--use_peft",)], ids=["full", "lora"])
def reference(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("gradient") / "one.pt"
    return request.param, run("ddp", out, 1, *request.param)


def test_one_process_any_cut(reference):
    """Micro-batches, output-layer chunks and shared prompts change memory and speed, never the gradient."""
    _, result = reference
    for (loss, mode, cut), gradient in result.items():
        assert relative_difference(gradient, result[loss, mode, "one"]) < 1e-5, (loss, mode, cut)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_two_ranks_equal_one(reference, strategy, tmp_path):
    """Ragged ranks: 3 groups on one, 2 on the other, so that one of them runs empty passes."""
    flags, one = reference
    two = run(strategy, tmp_path / "two.pt", 2, *flags)
    for (loss, mode, cut), gradient in two.items():
        assert relative_difference(gradient, one[loss, mode, "one"]) < 1e-5, (loss, mode, cut)
