"""The gradient does not depend on how an update is cut: micro-batches, ranks, sharding, shared or repeated prompts."""

import pytest
import torch
from live import running, trainer

WORKER = "tests/gradient_worker.py"


def run(strategy, out, ranks) -> dict:
    with running(trainer(out.with_suffix(".log"), strategy, str(out), ranks=ranks, script=WORKER)) as worker:
        assert worker.end() == 0, worker.text
    return torch.load(out)


def relative_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    distance = sum((a[name] - b[name]).double().pow(2).sum() for name in a)
    return float((distance / sum(b[name].double().pow(2).sum() for name in b)).sqrt())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process: every loss x aggregation, of all weights and of adapters, in one pass and cut otherwise."""
    return run("ddp", tmp_path_factory.mktemp("gradient") / "one.pt", 1)


def test_one_process_any_cut(one):
    """Micro-batches, output-layer chunks and shared prompts change memory and speed, never the gradient."""
    for (*case, cut), gradient in one.items():
        assert relative_difference(gradient, one[*case, "one"]) < 1e-5, (case, cut)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_two_ranks_equal_one(one, strategy, tmp_path):
    """Ragged ranks: 3 groups on one, 2 on the other, so that one of them runs empty passes."""
    for (*case, cut), gradient in run(strategy, tmp_path / "two.pt", 2).items():
        assert relative_difference(gradient, one[*case, "one"]) < 1e-5, (case, cut)
