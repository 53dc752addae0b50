"""Ranks that have different things: what is computed is that of one rank with all of it."""

import os
from dataclasses import replace

import pytest
import torch
from ranks import on_ranks

import train_grpo as script
import utils
from algorithms.checks import after_rollout
from config import TrainConfig
from inputs.trajectory import Trajectory, empty_trajectory
from modeling.packing import minibatches
from runlog.rollout_metrics import rollout_metrics

DOMAINS = [{"name": "short", "dataset_id": "seeds:9"}, {"name": "long", "dataset_id": "seeds:9"}]


def group(number: int, scores: list[float], length: int, **row) -> list[Trajectory]:
    counts = dict.fromkeys(("unrewarded", "reward_timeouts", "reward_without_token"), 0)
    made = []
    for place, score in enumerate(scores):
        n = length - place % 2  # uneven
        info = {"rewards": {}, "reward_components": [score], "baselines": 0.5, "row_number": number} | counts
        rewards, known = [0.0] * (n - 1) + [score], {"prompt": "x", "domain": ""} | row
        made.append(Trajectory(known, number, [1], [2] * n, [1] * n, [-1.0] * n, rewards, info=info))
    return made


def batch_of(trajectories: list[Trajectory]):
    return script.collate(trajectories, 0, torch.device("cpu"), int(os.environ.get("RANK", "0")))


def advantages(trajectories: list[Trajectory], **settings) -> list[list[float]]:
    """Of each completion at its sampled tokens, on this rank."""
    cfg = TrainConfig(generator="hf", **settings)
    batch = batch_of(trajectories)
    if cfg.has_teacher:
        batch.teacher_logprobs = -0.01 * torch.arange(batch.loss_mask.shape[1]) * (1 + batch.rewards.sum(1)[:, None])
    script.add_advantages(batch, cfg)
    return [row[mask > 0].tolist() for row, mask in zip(batch.advantages, batch.loss_mask, strict=True)]


def demonstration() -> list[Trajectory]:
    """No function scored it, and no prompt was answered greedily."""
    shown = group(3, [1.0], 4)
    for name in ("reward_components", "baselines"):
        del shown[0].info[name]
    return shown


def of_this_rank() -> dict:
    """What the algorithms make of it."""
    rank, world, _ = utils.init_distributed(60)
    out: dict = {}

    def share(groups: list[list[Trajectory]]) -> list[Trajectory]:  # in turn
        return sum(groups[rank::world], [])

    two = [group(0, [1.0, 0.0], 3, domain="short"), group(1, [1.0, 0.0, 0.5], 7, domain="long")]
    taught = dict(advantage="distill", distill_baseline="place", teacher_id="t", domains=DOMAINS)
    out["place"] = advantages(share(two), **taught)

    plain, played = group(0, [1.0, 0.0], 3, domain="short"), group(1, [1.0, 0.0], 3, domain="long")
    for trajectory in played:
        trajectory.info["states"] = ["s"] * len(trajectory.token_ids)
    out["gigpo"] = advantages(share([plain, played]), advantage="gigpo", domains=DOMAINS)

    scored = [group(0, [10.0, 11.0], 2), group(1, [10.0, 11.0], 2)]
    everywhere = sum(scored, [])
    none = [empty_trajectory({"prompt": "x"}, TrainConfig())]
    lost = everywhere if rank == 0 else none  # all of a rank's have failed
    out["lost"] = {
        name: advantages(lost, advantage=name) for name in ("lite_ppo", "gpg", "gdpo", "reinforce_plus_plus")
    }
    metrics = rollout_metrics(lost)
    out["metrics"] = {key: metrics[key] for key in ("reward", "completions/count", "completions/min_length")}
    out["moments"] = {}
    script.shape_rewards(batch_of(lost), TrainConfig(reward_std="running", reward_mean="running"), out["moments"])

    out["remax"] = advantages(group(0, [1.0, 0.0], 2) if rank == 0 else demonstration(), advantage="remax")

    cfg = TrainConfig(num_minibatches=2, loss_agg="constant", generator="hf")
    few = batch_of(sum(scored, []) if rank == 0 else scored[0])  # one group in two minibatches
    script.add_advantages(few, replace(cfg, advantage="dr_grpo"))
    out["counts"], real = [], script.token_weights
    with pytest.MonkeyPatch.context() as patch:
        told = lambda *given, **counts: out["counts"].append(counts["num_sequences"]) or real(*given, **counts)  # noqa: E731
        patch.setattr(script, "token_weights", told)
        for part in minibatches(few, cfg):
            script.weights_of_update(part, cfg)
    return out


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict]]:
    """By number of ranks what each of them has."""
    return {ranks: on_ranks(ranks, of_this_rank) for ranks in (1, 2)}


def flat(values: list) -> list[float]:
    return [number for row in values for number in row]


@pytest.mark.parametrize("name", ["place", "gigpo"])
def test_a_domain_that_a_rank_lacks(name, found):
    """A longer completion stands in for it; and whether others on the rank have states does not matter."""
    (alone,), two = found[1], found[2]
    assert flat(two[0][name] + two[1][name]) == pytest.approx(flat(alone[name]), abs=1e-6)


def test_a_rank_all_of_whose_trajectories_failed_counts_for_nothing(found):
    (alone,), (first, second) = found[1], found[2]
    for name, advantages in alone["lost"].items():
        assert flat(first["lost"][name]) == pytest.approx(flat(advantages), abs=1e-6), name
        assert second["lost"][name] == [[]]
    for key in ("metrics", "moments"):
        assert first[key] == second[key] == alone[key]
    assert alone["metrics"] == {"reward": 10.5, "completions/count": 4, "completions/min_length": 1}
    assert alone["moments"] == {"": [4, 42, 442]}


def test_a_rank_of_demonstrations_alone(found):
    """It has the fields that another rank has: no rank makes other collective calls."""
    first, second = found[2]
    assert flat(second["remax"]) == [1.0] * 4 and first["remax"][0] == pytest.approx([0.5, 0.5])
    with pytest.raises(ValueError, match="reward_components"):
        advantages(group(0, [1.0, 0.0], 2) + demonstration(), advantage="gdpo")


def test_a_demonstration_takes_the_place_of_the_placeholder():
    placeholder, demonstration = empty_trajectory({}, TrainConfig()), Trajectory({}, 0, [1], [2], [1], [0.0], [1.0])
    assert after_rollout([placeholder, demonstration]) == ([demonstration], {})
    assert after_rollout(([placeholder], {"seen": 1})) == ([placeholder], {})  # of no completion


def test_a_minibatch_without_rows_is_no_completion(found):
    """--loss_agg constant counts completions: 2 + 0 in the first minibatch, 2 + 2 in the second."""
    assert found[2][0]["counts"] == found[2][1]["counts"] == [2, 4]
