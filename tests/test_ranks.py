"""What ranks tell each other: collectives of utils.py, counts of an update, and on_ranks itself."""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, on_ranks

import train_grpo as script
from config import TrainConfig
from modeling.packing import balanced_groups
from rollouts import Trajectory


def told(number: float) -> tuple[int, float]:
    value = torch.tensor(number + dist.get_rank())
    dist.all_reduce(value)
    return dist.get_rank(), float(value)


def one_fails(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "late":
            time.sleep(60)
        raise LookupError("of rank 1")
    dist.barrier()  # waits for the one that failed


def test_a_function_runs_on_ranks():
    assert on_ranks(2, told, 1.5) == [(0, 4.0), (1, 4.0)]
    assert on_ranks(3, told, 1.0) == [(0, 6.0), (1, 6.0), (2, 6.0)]
    with pytest.raises(LookupError, match="of rank 1") as error:
        on_ranks(2, one_fails, "early")
    assert "in one_fails" in str(error.value.__cause__)
    with pytest.raises(RankError, match=r"(?s)no answer after 5 s from rank \[0, 1\].*in one_fails"):
        on_ranks(2, one_fails, "late", limit=5)


def weighed(loss_agg: str) -> tuple:
    """Of one completion with 3 tokens on rank 0; of two with 2, and 4 of 6, and one that is left out, on rank 1."""
    masks = [[[1, 1, 1]], [[1, 1], [1, 1, 0, 0, 1, 1], [0, 0]]][dist.get_rank()]
    rows = [Trajectory({}, n, [5], [7] * len(m), m, [0.0] * len(m), [0.0] * len(m)) for n, m in enumerate(masks)]
    batch = script.collate(rows, 0, torch.device("cpu"), dist.get_rank())
    weights, tokens = script.weights_of_update(batch, TrainConfig(loss_agg=loss_agg, max_completion_length=10))
    return float(weights.max()), tokens


def test_an_update_counts_the_tokens_and_completions_of_all_ranks():
    for loss_agg, weight in (("token_mean", 1 / 9), ("constant", 1 / 40), ("seq_sum", 1 / 3)):
        assert on_ranks(2, weighed, loss_agg) == [(pytest.approx(weight), 9)] * 2


def exchanged(sizes: list[list[int]]) -> tuple[list[int], int, dict]:
    """Of groups with so many tokens on each rank: which this rank has afterwards, their tokens, and what is logged."""
    first = sum(map(len, sizes[: dist.get_rank()]))
    groups = [
        [Trajectory({}, first + place, [1], [2] * n, [1] * n, [0.0] * n, [0.0] * n)]
        for place, n in enumerate(sizes[dist.get_rank()])
    ]
    kept, metrics = balanced_groups(groups)
    return [group[0].group for group in kept], sum(1 + len(group[0].token_ids) for group in kept), metrics


@pytest.mark.parametrize(
    "sizes, most",
    [([[400, 10, 10, 300], [5], []], 401), ([[3, 3], [3, 3], [3, 3]], 8), ([[9], [400, 7], [1, 1, 1]], 401)],
)
def test_groups_move_until_ranks_are_even(sizes, most):
    """Each group is on one rank, whole."""
    found = on_ranks(3, exchanged, sizes)
    assert sorted(sum((numbers for numbers, *_ in found), [])) == list(range(sum(map(len, sizes))))
    before = [sum(n + 1 for n in own) for own in sizes]
    assert max(tokens for _, tokens, _ in found) == most
    for *_, metrics in found:
        assert metrics["ranks/tokens_before"] == pytest.approx(3 * max(before) / sum(before))
        assert metrics["ranks/tokens_after"] == pytest.approx(3 * most / sum(before))
