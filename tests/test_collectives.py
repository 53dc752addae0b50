"""How often the ranks talk to each other in an update and in a push, counted; and that nothing else changes by it."""

from collections import Counter

import pytest
import torch
from live import running, trainer


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
