"""Completions of several rows: where a context begins anew, the policy sees nothing of what was before, and yet the
completion is compared, weighed and counted once. Against loops of our own, on one rank and on two."""

from dataclasses import replace

import pytest
import torch
from ragged import full_gradients, gradients, relative_difference, small_llama
from ranks import on_ranks

import train_grpo as script
import utils
from config import TrainConfig
from rollouts import Trajectory, trajectory_fault

# Of each completion its rows: what the model saw, and what it then read (0) and sampled (1). Group 0 has three
# completions of three, one and two rows, group 1 two of one and two.
ROWS = [
    (0, 1.0, [([5, 6, 7], "1101"), ([5, 6, 9, 9], "11"), ([20, 21], "1")]),
    (0, 0.0, [([5, 6, 7], "11111")]),
    (0, 0.5, [([5, 6, 7], "1"), ([5, 6, 7, 30, 31, 32], "1011")]),
    (1, 2.0, [([40, 41], "111")]),
    (1, 0.0, [([40, 41], "11"), ([40, 42, 43], "1")]),
]


def rows_of(number: int) -> list[tuple[list[int], list[int], list[int]]]:
    """(context, what came after it, its mask) of each row of a completion."""
    made = []
    for place, (context, mask) in enumerate(ROWS[number][2]):
        ids = [(100 + 61 * number + 17 * place + 7 * t) % 1000 for t in range(len(mask))]
        made.append((context, ids, [int(m) for m in mask]))
    return made


def completion(number: int) -> Trajectory:
    group, score, _ = ROWS[number]
    (prompt, ids, mask), *others = rows_of(number)
    restarts = []
    for context, more, sampled in others:
        restarts.append(len(ids))
        ids, mask = ids + context + more, mask + [0] * len(context) + sampled
    rewards = [0.0] * len(ids)
    rewards[-1] = score
    return Trajectory({}, group, prompt, ids, mask, [-1.0 * m for m in mask], rewards, info={"restarts": restarts})


def by_hand(cfg: TrainConfig) -> dict[str, torch.Tensor]:
    """The gradient of -A log pi, one row after another by the plain model."""
    policy = script.load_policy(replace(cfg, shared_prefix=False), torch.device("cpu"))
    inner = script.unwrapped(policy)
    tokens = [sum(sum(mask) for _, _, mask in rows_of(n)) for n in range(len(ROWS))]
    loss = 0.0
    for n, (group, score, _) in enumerate(ROWS):
        others = [s for g, s, _ in ROWS if g == group]
        mean = sum(others) / len(others)
        std = (sum((s - mean) ** 2 for s in others) / (len(others) - 1)) ** 0.5
        of_prompt = sum(t for t, (g, _, _) in zip(tokens, ROWS, strict=True) if g == group)
        weight = {
            "token_mean": 1 / sum(tokens),
            "seq_mean": 1 / tokens[n] / len(ROWS),
            "seq_sum": 1 / len(ROWS),
            "constant": 1 / len(ROWS) / cfg.max_completion_length,
            "prompt_mean": 1 / of_prompt / 2,
        }[cfg.loss_agg]
        for context, ids, mask in rows_of(n):
            logits = inner.hf_model(torch.tensor([context + ids])).logits[0, len(context) - 1 : -1]
            logprobs = logits.log_softmax(-1)[range(len(ids)), ids]
            loss = loss - weight * (score - mean) / (std + 1e-6) * (logprobs * torch.tensor(mask)).sum()
    policy.zero_grad()
    loss.backward()
    return full_gradients(policy)


def found(cuts: list[dict]) -> list[dict]:
    script.load_hf_model = small_llama
    rank, world, device = utils.init_distributed(60)
    mine = [completion(n) for n in range(len(ROWS)) if world == 1 or ROWS[n][0] == rank]
    result = []
    for cut in cuts:
        cfg = TrainConfig(
            compute_dtype="float32", policy_loss="reinforce", correction="none", max_completion_length=64, **cut
        )
        policy = script.load_policy(cfg, device)
        batch = script.collate([replace(t, group=0) if world > 1 else t for t in mine], 0, device, rank)
        script.add_advantages(batch, cfg)
        result.append(gradients(policy, batch, cfg))
    return result


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean", "seq_sum", "constant", "prompt_mean"])
def test_each_completion_counts_once_however_many_rows_it_has(mode):
    cuts = [dict(), dict(shared_prefix=False), dict(tokens_per_microbatch=12)]
    cuts = [cut | {"loss_agg": mode} for cut in cuts]
    (alone,), (expected,) = on_ranks(1, found, cuts), on_ranks(1, by_hand_of, mode)
    for cut, gradient in zip(cuts, alone, strict=True):
        assert relative_difference(gradient, expected) < 1e-5, cut
    for of_rank in on_ranks(2, found, cuts):
        for cut, gradient in zip(cuts, of_rank, strict=True):
            assert relative_difference(gradient, expected) < 1e-5, (2, cut)


def by_hand_of(mode: str) -> dict:
    script.load_hf_model = small_llama
    return by_hand(TrainConfig(compute_dtype="float32", max_completion_length=64, loss_agg=mode))


def test_log_probs_and_records_stand_where_their_tokens_do():
    (of_rows, recorded, mask), *_ = on_ranks(1, both)
    assert torch.allclose(of_rows, recorded.nan_to_num() * mask, atol=1e-6) and (of_rows != 0).sum() == mask.sum() == 21


def both() -> tuple:
    script.load_hf_model = small_llama
    cfg = TrainConfig(compute_dtype="float32", policy_loss="reinforce", correction="none", max_completion_length=64)
    policy = script.load_policy(cfg, torch.device("cpu"))
    batch = script.collate([completion(n) for n in range(len(ROWS))], 0, torch.device("cpu"))
    script.add_advantages(batch, cfg)
    of_rows = script.all_logprobs(policy, batch, cfg)["logprobs"]
    script.start_record(batch)
    gradients(policy, batch, cfg)
    return of_rows, batch.record.logprob, batch.loss_mask


def test_what_is_wrong_with_a_trajectory_of_several_rows_is_said():
    cfg = TrainConfig(max_prompt_length=4, max_completion_length=5)
    assert trajectory_fault(completion(0), None, cfg) is None
    for restarts in ([0], [9, 4], [99]):
        fault = trajectory_fault(replace(completion(0), info={"restarts": restarts}), None, cfg)
        assert "restarts" in fault
    fault = trajectory_fault(completion(0), None, replace(cfg, max_prompt_length=1))
    assert "7 tokens" in fault
