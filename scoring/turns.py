"""Rewards for trajectories with several turns: the environment's rewards, and the use of tools."""

import math
import statistics

from inputs.trajectory import calls_in


def environment(trajectories, **columns) -> list[dict]:
    """The rewards of --env: each turn's at the end of that turn; None if its score() was None. The numbers in its info
    are logged as means over the turns that have them, and so are those of its metrics()."""
    scores = []
    for trajectory in trajectories:
        turns = trajectory.info["turns"]
        infos = [numbers_in(turn["info"]) for turn in turns]
        names = dict.fromkeys(name for info in infos for name in info)
        means = {name: statistics.fmean(info[name] for info in infos if name in info) for name in names}
        metrics = (means | numbers_in(trajectory.info["metrics"])).items()
        logged = {k: v for k, v in metrics if k not in ("reward", "turns")}  # these two are the reward itself
        unscored = trajectory.info.get("unscored")  # the environment gave neither rewards of turns nor a score
        scores.append(logged | ({"reward": None} if unscored else {"turns": [turn["reward"] for turn in turns]}))
    return scores


def numbers_in(info: dict) -> dict[str, float]:
    """The finite numbers among an info's values; texts, arrays and dicts are left out."""
    is_number = {name: isinstance(value, (bool, int, float)) and math.isfinite(value) for name, value in info.items()}
    return {str(name): float(info[name]) for name, finite in is_number.items() if finite}


def tool_use(trajectories, **columns) -> list[float | None]:
    """Share of the tool calls that were useful: did not fail, and were not made before in the trajectory. None without
    calls: that adds nothing to the reward, so with a weight on this, no call is worth less than a good one."""
    scores = []
    for trajectory in trajectories:
        calls = [call for turn in trajectory.info.get("turns", []) for call in calls_in(turn["info"])]
        useful = {call["call"] for call in calls if not call["failed"]}
        scores.append(len(useful) / len(calls) if calls else None)
    return scores


def few_turns(trajectories, cfg, **columns) -> list[float]:
    """-(turns beyond the first) / (max_turns - 1), from 0 to -1; a small weight favours as few turns as are needed."""
    return [-(trajectory.turns - 1) / max(cfg.max_turns - 1, 1) for trajectory in trajectories]


environment.per_trajectory = tool_use.per_trajectory = few_turns.per_trajectory = True
