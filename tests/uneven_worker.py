"""What the algorithms make of ranks that have different things, as numbers. Run by test_uneven.py.

usage: uneven_worker.py OUT   (-> OUT/RANK.json)
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from batch import collate  # noqa: E402
from config import TrainConfig  # noqa: E402
from inputs.packing import minibatches  # noqa: E402
from inputs.trajectory import Trajectory, empty_trajectory  # noqa: E402
from runlog.rollout_metrics import rollout_metrics  # noqa: E402

rank, world, _ = utils.init_distributed(60)
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
    return collate(trajectories, 0, torch.device("cpu"), rank, 0)


def advantages(trajectories: list[Trajectory], **settings) -> list[list[float]]:
    """Of each completion at its sampled tokens, on this rank."""
    cfg = TrainConfig(generator="hf", **settings)
    batch = batch_of(trajectories)
    if cfg.has_teacher:
        batch.teacher_logprobs = -0.01 * torch.arange(batch.loss_mask.shape[1]) * (1 + batch.rewards.sum(1)[:, None])
    script.add_advantages(batch, cfg)
    return [row[mask > 0].tolist() for row, mask in zip(batch.advantages, batch.loss_mask, strict=True)]


def share(groups: list[list[Trajectory]]) -> list[Trajectory]:
    """This rank's, in turn."""
    return sum(groups[rank::world], [])


out: dict = {}
two = [group(0, [1.0, 0.0], 3, domain="short"), group(1, [1.0, 0.0, 0.5], 7, domain="long")]
taught = dict(advantage="distill", distill_baseline="place", teacher_id="t", domains=DOMAINS)
out["place"] = advantages(share(two), **taught)

plain, played = group(0, [1.0, 0.0], 3, domain="short"), group(1, [1.0, 0.0], 3, domain="long")
for trajectory in played:
    trajectory.info["states"] = ["s"] * len(trajectory.token_ids)
out["gigpo"] = advantages(share([plain, played]), advantage="gigpo", domains=DOMAINS)

scored = [group(0, [10.0, 11.0], 2), group(1, [10.0, 11.0], 2)]
everywhere = sum(scored, [])
lost = everywhere if rank == 0 else [empty_trajectory({"prompt": "x"}, TrainConfig())]  # all of a rank's have failed
out["lost"] = {name: advantages(lost, advantage=name) for name in ("lite_ppo", "gpg", "gdpo", "reinforce_plus_plus")}
metrics = rollout_metrics(lost)
out["metrics"] = {key: metrics[key] for key in ("reward", "completions/count", "completions/min_length")}
out["moments"] = {}
script.shape_rewards(batch_of(lost), TrainConfig(reward_std="running", reward_mean="running"), out["moments"])

shown = group(3, [1.0], 4)  # a demonstration: no function scored it, and no prompt was answered greedily
for name in ("reward_components", "baselines"):
    del shown[0].info[name]
out["remax"] = advantages(group(0, [1.0, 0.0], 2) if rank == 0 else shown, advantage="remax")

cfg = TrainConfig(num_minibatches=2, loss_agg="constant", generator="hf")
few = batch_of(sum(scored, []) if rank == 0 else scored[0])  # one group in two minibatches
script.add_advantages(few, replace(cfg, advantage="dr_grpo"))
out["counts"] = [script.global_counts(part, cfg)["num_sequences"] for part in minibatches(few, cfg)]

try:
    advantages(group(0, [1.0, 0.0], 2) if rank == 0 else shown, advantage="gdpo")
except (ValueError, RuntimeError) as error:  # the second on rank 0, when the other one has ended
    out["gdpo"] = str(error)
Path(sys.argv[1], f"{rank}.json").write_text(json.dumps(out), encoding="utf-8")
