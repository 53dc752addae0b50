"""The gradient does not depend on how an update is cut: micro-batches, ranks, sharding, shared or repeated prompts."""

from dataclasses import replace

import gradient_worker
import pytest
import torch
from live import running, trainer

import train_grpo as script
from config import TrainConfig

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


@pytest.mark.parametrize("loss", sorted(script.POLICY_LOSSES))
def test_silent_groups_are_not_passed_back(loss):
    """But under losses that pull on every token, and with a KL or an entropy term."""
    batch = gradient_worker.local_batch(0, 1)
    batch.sampling_logprobs = -torch.rand(batch.loss_mask.shape)
    batch.advantages[batch.groups == 1] = 0
    cfg = TrainConfig(policy_loss=loss, beta=0.0)
    batch.chosen = batch.loss_mask > 0
    everywhere = batch.loss_mask.any(1).tolist()
    speaking = (batch.advantages != 0).any(1).tolist()
    assert speaking != everywhere
    found = script.learning_rows(batch, script.POLICY_LOSSES[loss], cfg)
    assert found == (everywhere if loss in ("kimi", "dro", "kl_cov") else speaking)
    assert script.learning_rows(batch, script.POLICY_LOSSES[loss], replace(cfg, entropy_coef=0.1)) == everywhere
    batch.ref_logprobs = batch.sampling_logprobs
    assert script.learning_rows(batch, script.POLICY_LOSSES[loss], replace(cfg, beta=0.1)) == everywhere
