"""How often the ranks talk to each other in an update and in a push, counted; and that nothing else changes by it."""

from collections import Counter

import pytest
import torch
from live import running, trainer
from test_gradient import relative_difference


def run(folder, ranks: int, flags: str) -> dict:
    out, log = folder / "out.pt", folder / "log"
    with running(trainer(log, str(out), *flags.split(), ranks=ranks, script="tests/collectives_worker.py")) as worker:
        assert worker.end() == 0, worker.text
    return torch.load(out)


@pytest.mark.parametrize("ranks, more", [(2, ""), (3, ""), (4, "--shard_size 2"), (2, "--offload tied")])
def test_a_bucket_of_a_push_is_gathered_at_once(ranks, more, tmp_path):
    """81 parameters, matrices and vectors, the same bytes as one by one; rows that the ranks cannot share evenly."""
    found = run(tmp_path, ranks, f"--strategy fsdp2 {more}")
    pushed, buckets = found["pushed"], found["pushed"].pop("buckets")
    assert pushed.keys() == found["whole"].keys() and len(pushed) >= 80 and 1 < buckets < 4
    for name, tensor in found["whole"].items():
        assert pushed[name].dtype == tensor.dtype and torch.equal(pushed[name], tensor), name
    assert Counter(operation for operation, *_ in found["push"]) == {"allgather_into_tensor_coalesced_": buckets}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The gradient of one process without sharding."""
    return {tied: run(tmp_path_factory.mktemp("one"), 1, f"--strategy ddp {tied}")["gradient"] for tied in ("", "tied")}


@pytest.mark.parametrize("ranks, more", [(2, ""), (4, "--shard_size 2"), (2, "tied"), (2, "--offload")])
def test_an_update_says_no_more_than_it_must(ranks, more, alone, tmp_path):
    """Each micro-batch gathers embeddings and output layer once, whatever the number of chunks, and layers twice; all
    gradients are reduced once, and added up between copies in the last micro-batch alone."""
    found = run(tmp_path, ranks, f"--strategy fsdp2 {more}")
    assert relative_difference(found["gradient"], alone["tied" if "tied" in more else ""]) < 1e-5
    seen = [(operation, size) for operation, size, _ in found["update"] if "_base_" in operation]
    micro, embedding, layer = found["micro"], 501 * 64 * 4, 71040  # bytes of a rank's half
    gathers = [size for operation, size in seen if operation.startswith("_allgather")]
    reduces = [size for operation, size in seen if operation.startswith("_reduce")]
    ends = [size for size in gathers if size not in (layer, 128)]
    if "tied" in more:  # in one unit with the last norm
        assert ends == [embedding + 128] * micro and len(gathers) == 13 * micro and len(reduces) == 7 * micro
    else:
        assert ends == [embedding] * 2 * micro and len(gathers) == 15 * micro and len(reduces) == 9 * micro
        assert gathers[:2] == [128, embedding] and reduces[0] == reduces[8] == 2 * embedding  # the first, and the last
    between = [size for operation, size, _ in found["update"] if operation == "allreduce_" and size > 16]
    assert len(between) == 9 * ("shard_size" in more)
