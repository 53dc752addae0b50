"""Shards, copies of shards, compiled layers and activations in CPU memory: the gradient stays that of one process."""

import pytest
import sharding_worker
from ragged import relative_difference
from ranks import on_ranks

import utils
from config import ConfigError, TrainConfig, check, load_config

SLOW = pytest.mark.slow


def found(*flags: str) -> dict:
    return sharding_worker.found(list(flags), *utils.init_distributed(60))


@pytest.fixture(scope="module")
def one():
    """One process, plainly: of all weights, and of adapters."""
    return {peft: on_ranks(1, found, *["--use_peft"] * peft)[0] for peft in (False, True)}


@pytest.mark.parametrize(
    "ranks, flags",
    [
        (2, "--strategy fsdp2 --offload_activations --head_dtype float32"),
        (4, "--strategy fsdp2 --shard_size 2"),
        pytest.param(4, "--strategy fsdp --shard_size 2", marks=SLOW),
        pytest.param(2, "--strategy fsdp --offload_activations --head_dtype float32", marks=SLOW),
        pytest.param(1, "--strategy ddp --compile", marks=SLOW),
        pytest.param(2, "--strategy fsdp2 --compile --use_peft", marks=SLOW),
    ],
)
def test_the_gradient_is_that_of_one_process(one, ranks, flags):
    ours, expected = on_ranks(ranks, found, *flags.split())[0], one["--use_peft" in flags]
    assert relative_difference(ours["gradient"], expected["gradient"]) < 1e-5
    assert ours["norm"] == pytest.approx(expected["norm"], rel=1e-5)
    assert ours["sent"] == expected["sent"], "a push would send other weights"
    assert bool(ours["graphs"]) == ("--compile" in flags)


@pytest.mark.parametrize(
    "flags, ranks",
    [
        ("--shard_size 2", 4),
        ("--compile --strategy fsdp", 2),
    ],
)
def test_what_does_not_go_together_is_refused(flags, ranks):
    with pytest.raises(ConfigError, match="--"):
        check(load_config(TrainConfig, flags.split()), ranks)
