"""Copies of shards, compiled layers and activations in CPU memory: the gradient stays that of one process."""

import pytest
import torch
from live import running, trainer
from test_gradient import relative_difference

from config import ConfigError, TrainConfig, check, load_config


def run(folder, ranks: int, flags: str) -> dict:
    out = folder / f"{ranks}.pt"
    with running(
        trainer(folder / "log", str(out), *flags.split(), ranks=ranks, script="tests/sharding_worker.py")
    ) as w:
        assert w.end() == 0, w.text
    return torch.load(out)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process, plainly: of all weights, and of adapters."""
    return {more: run(tmp_path_factory.mktemp("one"), 1, more) for more in ("", "--use_peft")}


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_two_copies_of_two_shards_give_the_gradient_of_one_rank(one, strategy, tmp_path):
    found = run(tmp_path, 4, f"--strategy {strategy} --shard_size 2")
    assert relative_difference(found["gradient"], one[""]["gradient"]) < 1e-5
    assert found["norm"] == pytest.approx(one[""]["norm"], rel=1e-5)
    assert found["sent"] == one[""]["sent"]


@pytest.mark.in_turn
@pytest.mark.parametrize("ranks, strategy, more", [(1, "ddp", ""), (2, "fsdp2", "--use_peft")])  # a minute each
def test_compiled_layers_give_the_same_gradient(one, ranks, strategy, more, tmp_path):
    found = run(tmp_path, ranks, f"--strategy {strategy} --compile {more}")
    assert found["graphs"] and relative_difference(found["gradient"], one[more]["gradient"]) < 1e-5
    assert found["sent"] == one[more]["sent"]


@pytest.mark.parametrize("ranks, strategy", [(1, "ddp"), (2, "fsdp"), (2, "fsdp2")])
def test_activations_in_cpu_memory_give_the_same_gradient(one, ranks, strategy, tmp_path):
    found = run(tmp_path, ranks, f"--strategy {strategy} --offload_activations")
    assert relative_difference(found["gradient"], one[""]["gradient"]) < 1e-5


@pytest.mark.parametrize(
    "flags, ranks",
    [
        ("--shard_size 2", 4),
        ("--shard_size 3 --strategy fsdp2", 4),
        ("--compile --strategy fsdp", 2),
        ("--offload_activations --no-gradient_checkpointing", 2),
    ],
)
def test_what_does_not_go_together_is_refused(flags, ranks):
    with pytest.raises(ConfigError, match="--"):
        check(load_config(TrainConfig, flags.split()), ranks)
