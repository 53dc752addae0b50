"""What a step's trajectories are like, over all ranks: the numbers that are logged, and how many of them failed."""

import logging
import math
import statistics
import time
import traceback
from collections import Counter

import torch

import utils
from config import TrainConfig, shorten
from inputs.trajectory import RowPictureError, Trajectory, is_scored, stands_in
from rollouts import any_number
from safety.calls import warn_once
from safety.http import origin
from safety.storable import calls_in

logger = logging.getLogger(__name__)


def rollout_metrics(trajectories: list[Trajectory]) -> dict:
    """What a step's completions look like, over all ranks, which all call it. Keys are TRL's."""
    trajectories = [t for t in trajectories if not stands_in(t)]
    lengths = [sum(t.loss_mask) for t in trajectories]
    out = logged_by_rewards(trajectories) | means_over_ranks(by_completion(trajectories))
    out |= reward_means(trajectories) | reward_seconds(trajectories)
    for name in ("reward_timeouts", "unrewarded", "reward_without_token"):  # completions of the step
        out[name] = int(utils.all_sum(torch.tensor(sum(t.info[name] for t in trajectories))))
    longest = utils.all_max(max(lengths, default=0))
    shortest = -utils.all_max(-min(lengths, default=longest))
    out |= {"completions/max_length": longest, "completions/min_length": shortest} if "reward" in out else {}
    tokens = sum(len(t.prompt_ids) + len(t.token_ids) for t in trajectories)
    counts = {"num_tokens": tokens, "completions/count": len(trajectories)}
    counts = {name: int(utils.all_sum(torch.tensor(count))) for name, count in counts.items()}
    return out | turn_metrics(trajectories) | counts


def by_completion(trajectories: list[Trajectory]) -> dict[str, list[float]]:
    """Metrics that are means over completions: the number of each."""
    groups: dict[int, list[float]] = {}
    for t in trajectories:
        groups.setdefault(t.group, []).append(sum(t.token_rewards))
    std = {number: statistics.stdev(scores) if len(scores) > 1 else 0.0 for number, scores in groups.items()}
    return {
        "reward": [sum(t.token_rewards) for t in trajectories],
        "reward_std": [std[t.group] for t in trajectories],
        "frac_reward_zero_std": [float(std[t.group] < 1e-6) for t in trajectories],
        "frac_singleton_groups": [float(len(groups[t.group]) == 1) for t in trajectories],
        "completions/mean_length": [sum(t.loss_mask) for t in trajectories],
        "completions/clipped_ratio": [float(t.finish_reason == "length") for t in trajectories],
    }


def means_over_ranks(values: dict[str, list[float]]) -> dict[str, float]:
    """By the rule of `utils.over_ranks`, so of names in _sum and _max the sum and the largest. Collective."""
    add = {name: max if name.endswith("_max") else math.fsum for name in values}
    return utils.over_ranks({name: (add[name](numbers), len(numbers)) for name, numbers in values.items() if numbers})


def solved(score: float, cfg: TrainConfig) -> bool:
    """Whether a score reaches --eval_solved, but for rounding: weights such as .7, .2 and .1 add up to less than 1."""
    return score >= cfg.eval_solved - 1e-6 * max(abs(cfg.eval_solved), 1)


def domain_metrics(trajectories: list[Trajectory], cfg: TrainConfig) -> dict:
    """NAME/reward and so on of each domain, over all ranks, which all call it; nothing of one that had no prompt."""
    out = {}
    for own in cfg.by_domain() if cfg.domains else ():
        mine = [t for t in trajectories if t.info.get("domain") == own.domain]
        share = [float(solved(sum(t.token_rewards), own)) for t in mine]
        metrics = means_over_ranks(by_completion(mine) | {"solved": share}) | reward_means(mine) | turn_metrics(mine)
        metrics |= logged_by_rewards(mine)
        prompts = int(utils.all_sum(torch.tensor(len({t.group for t in mine}))))
        out |= {own.prefix + name: value for name, value in (metrics | {"prompts": prompts}).items() if prompts}
    return out


def eval_metrics(groups: list[list[Trajectory]], cfg: TrainConfig) -> dict:
    """What completions of held-out rows are worth, over all ranks, which all call it; see `evaluate` in the script.

    The k of mean@k and pass@k is --eval_generations. Of a rollout that decides itself how many it returns it is the
    number that every row had, or else "all"; completions_per_row is their mean.
    """
    sizes = {(len(group), any_number(cfg.of(group[0].row))) for group in groups}
    sizes = set().union(*utils.gather_objects(sizes))
    own, counted = any(free for _, free in sizes), {size for size, _ in sizes}
    k = (counted.pop() if len(counted) == 1 else "all") if own else cfg.eval_generations
    mine = sum(groups, [])
    scores = [[sum(t.token_rewards) for t in group] for group in groups]
    good = [[solved(score, cfg.of(group[0].row)) for score in row] for row, group in zip(scores, groups, strict=True)]
    length = sum(float(sum(t.loss_mask)) for t in mine)
    sums = [sum(map(sum, scores)), sum(map(sum, good)), sum(map(any, good))]
    unknown = sum(not is_scored(t) for t in mine)
    sums = torch.tensor([*map(float, sums), length, len(mine), len(groups), unknown], dtype=torch.float64)
    reward, right, any_right, length, count, number, unknown = utils.all_sum(sums).tolist()
    count, rows = max(count, 1), int(number)
    metrics = {"reward": reward / count, f"mean@{k}": right / count, f"pass@{k}": any_right / max(number, 1)}
    means = reward_means(mine)  # of one function alone it is the reward
    metrics |= means if len(means) > 1 else {}
    metrics |= {"completions_per_row": count / max(rows, 1)} if own else {}
    metrics |= {"unrewarded": int(unknown)} if unknown else {}
    return metrics | {"mean_length": length / count, "rows": rows}


def turn_metrics(trajectories: list[Trajectory]) -> dict:
    """Turns and calls of tools, over all ranks, which all call it; {} where nothing was played in turns. Names of tools
    may differ by rank."""
    played = [t for t in trajectories if "turns" in t.info]  # of several domains some may have one turn alone
    infos = [turn["info"] for t in played for turn in t.info["turns"]]
    calls = [call for info in infos for call in calls_in(info)]
    sums = {"turns": sum(t.turns for t in played), "trajectories": len(played)}
    sums |= {"calls": len(calls), "failed": sum(call["failed"] for call in calls)}
    sums |= {"tools": sum(isinstance(info.get("calls"), list) for info in infos)}
    for call in calls:
        if not all(isinstance(call.get(key), (int, float)) for key in ("seconds", "cached")) or "name" not in call:
            continue  # of an environment's own making
        for key, value in (("calls", 1), ("seconds", call["seconds"]), ("cached", call["cached"])):
            sums[f"{call['name']}/{key}"] = sums.get(f"{call['name']}/{key}", 0) + value
    names = sorted(on_any_rank(set(sums)))
    summed = utils.all_sum(torch.tensor([float(sums.get(name, 0)) for name in names], dtype=torch.float64)).tolist()
    total = dict(zip(names, summed, strict=True))
    if not total["trajectories"]:
        return {}
    out = {"turns/mean": total["turns"] / total["trajectories"]}
    if total["tools"]:
        out["tools/call_frequency"] = total["calls"] / total["trajectories"]
    if total["calls"]:
        out["tools/failure_frequency"] = total["failed"] / total["calls"]
        out["tools/unreadable_frequency"] = total.get("unreadable/calls", 0.0) / total["calls"]
    for name in (name.removesuffix("/calls") for name in names if name.endswith("/calls")):
        for key in ("seconds", "cached"):  # a call, on average
            out[f"tools/{name or 'unreadable'}/{key}"] = total[f"{name}/{key}"] / total[f"{name}/calls"]
    return out


def counts_by_origin(trajectories: list[Trajectory]) -> dict:
    """rollout/ORIGIN: trajectories of the step that were not sampled in it, by their info["origin"], on all ranks."""
    mine = Counter(t.info["origin"] for t in trajectories if "origin" in t.info)
    return {f"rollout/{origin}": n for origin, n in sum(utils.gather_objects(mine), Counter()).items()}


def reward_means(trajectories: list[Trajectory]) -> dict:
    """Mean of every reward function and component where it applied, over all ranks, which all call it."""
    keys = on_any_rank({key for t in trajectories for key in t.info["rewards"]})  # components may differ by row
    components = {key for key in keys if "/" in key}
    keys = keys - components | bounded("names of rewards' components", components)
    return means_where_given(trajectories, "rewards", {key: f"rewards/{key}/mean" for key in keys})


def reward_seconds(trajectories: list[Trajectory]) -> dict:
    """Seconds that a call of each reward function took, on average, over all ranks, which all call it."""
    names = {name: f"time/reward/{name}/mean" for t in trajectories for name in t.info.get("reward_seconds", ())}
    means = means_where_given(trajectories, "reward_seconds", names)
    return {name.removesuffix("/mean"): mean for name, mean in means.items()}


def on_any_rank(names: set[str]) -> set[str]:
    return set().union(*utils.gather_objects(names))


def means_where_given(trajectories: list[Trajectory], entry: str, names: dict[str, str]) -> dict[str, float]:
    """Means over all ranks of the numbers in info[entry], which are there and not nan, by {key: the metric's name}."""
    given = {name: [t.info.get(entry, {}).get(key, math.nan) for t in trajectories] for key, name in names.items()}
    return means_over_ranks({name: [x for x in values if not math.isnan(x)] for name, values in given.items()})


def logged_by_rewards(trajectories: list[Trajectory]) -> dict:
    """Means of what reward functions gave to `log_metric`, over all ranks, which all call it."""
    values: dict[str, list[float]] = {}
    for name, value in (pair for t in trajectories for pair in t.info.get("logged", ())):
        values.setdefault(name, []).append(value)
    names = bounded("names given to log_metric", on_any_rank({*values}))
    return means_over_ranks({name: values[name] for name in names & values.keys()})


MOST_NAMES = 100


_NAMED: dict[str, set[str]] = {}


def bounded(what: str, names: set[str]) -> set[str]:
    """Those of the names that become metrics, the same on every rank: the first MOST_NAMES of a run. Names made of what
    a model says would have no end, and a tracker keeps each of them for ever."""
    known = _NAMED.setdefault(what, set())
    known.update(sorted(names - known)[: MOST_NAMES - len(known)])
    if left_out := sorted(names - known):
        text = f"over {MOST_NAMES} {what}; {shorten(left_out[0], 80)} and other new ones are no metrics. Said once."
        warn_once(text, kind=what)
    return names & known


def check_scored(trajectories: list[Trajectory], cfg: TrainConfig) -> None:
    """RuntimeError if no reward function answered in time for any completion of a step: then all have the same score,
    and nothing is learned. All ranks call it."""
    scored = [t for t in trajectories if "failure" not in t.info]
    late = sum(t.info.get("reward_timeouts", 0) >= max(len(t.info.get("rewards", ())), 1) for t in scored)
    late, count = (int(n) for n in utils.all_sum(torch.tensor([late, len(scored)])))
    if count and late == count:
        names = sorted({name for own in cfg.by_domain() for name in own.reward_funcs})
        raise RuntimeError(
            f"No reward function ({', '.join(names)}) answered within --reward_timeout={cfg.reward_timeout:g} s, "
            f"for any of the {count} completions of this step. Call it on one completion by hand; if it is merely "
            "slow, raise --reward_timeout."
        )


SILENT_STEPS, SILENT_SECONDS = 10, 600.0  # both: steps may be quick, and a large model takes minutes to start
_SILENT: dict[tuple, tuple[int, float]] = {}  # judges: steps in a row without any answer, and when the first was


def check_judges(trajectories: list[Trajectory], cfg: TrainConfig) -> None:
    """RuntimeError if a judge, from whose scores something is learned, has answered for no completion for SILENT_STEPS
    steps (and evaluations) and SILENT_SECONDS: other rewards would go on teaching without it. All ranks call it."""
    if not any(map(learns_from_judge, cfg.by_domain())):
        return
    mine: dict[tuple, tuple[bool, str]] = {}
    for t in trajectories:
        own, unanswered = cfg.of(t.row), t.info.get("rewards", {}).get("judge/unanswered")
        if learns_from_judge(own) and unanswered is not None:
            judge, fault = (own.judge_url, own.judge_model), t.info.get("extra", {}).get("judge", "")
            mine[judge] = mine.get(judge, (False, ""))[0] or not unanswered, fault
    everyone = utils.gather_objects((mine, time.time()))
    now = everyone[0][1]
    for judge in sorted({judge for found, _ in everyone for judge in found}):
        answers = [found[judge] for found, _ in everyone if judge in found]
        if any(answered for answered, _ in answers):
            _SILENT.pop(judge, None)
            continue
        steps, since = _SILENT.get(judge, (0, now))
        _SILENT[judge] = steps + 1, since
        if steps + 1 >= SILENT_STEPS and now - since >= SILENT_SECONDS:
            fault = answers[0][1].removeprefix("(not counted: ").removesuffix(")")
            raise RuntimeError(
                f"The judge {judge[1]} at {origin(judge[0])} answered for no completion of the last {steps + 1} steps, "
                f"for {(now - since) / 60:.0f} minutes: {fault}. What is learned without it is something else. See "
                "that it answers, and resume the run (--resume)."
            )


def learns_from_judge(cfg: TrainConfig) -> bool:
    weights = cfg.reward_weights or [1.0] * len(cfg.reward_funcs)
    return any(weight for name, weight in zip(cfg.reward_funcs, weights, strict=False) if name == "judge")


_SHOWN: set[str] = set()  # causes whose traceback was printed, at most MOST_SHOWN


MOST_SHOWN = 10


def check_failed(groups: list[list[Trajectory]], cfg: TrainConfig) -> int:
    """How many of a step's trajectories failed, over all ranks, which all call it. Prints the traceback of each new
    cause; above --max_failed raises the commonest one, on every rank. Rows with a damaged image are named, and do not
    end a run that has others."""
    for check in (check_scored, check_judges):
        check([t for group in groups for t in group], cfg)
    failures = [t.info["failure"] for group in groups for t in group if "failure" in t.info]
    damaged = [t for group in groups for t in group if isinstance(t.info.get("failure"), RowPictureError)]
    for t in damaged:
        warn_once(f"row {t.info.get('row_number', '?')} of those in use is left out: {t.info['failure']}")
    mine: dict[str, tuple[int, type, str]] = {}
    for error in failures:
        named = error.cause in mine or error.cause in _SHOWN or isinstance(error, RowPictureError)
        if not named and len(_SHOWN) < MOST_SHOWN:
            _SHOWN.add(error.cause)
            frames = traceback.format_exception(error.__cause__ or error)[:-1]  # the last is the message, said already
            logger.warning("a trajectory failed and is left out: %s\n%s", error, "".join(frames)[-5000:])
        mine[error.cause] = (mine[error.cause][0] + 1 if error.cause in mine else 1, type(error), str(error))
    everyone = utils.gather_objects((mine, len(failures), sum(map(len, groups)), len(damaged), len(groups)))
    failed, total, excused, prompts = (sum(part[k] for part in everyone) for k in (1, 2, 3, 4))
    excused *= failed < total or prompts == 1  # were no row's image readable, the run would be of none
    if failed - excused > cfg.max_failed * total:
        times: Counter = Counter()
        for causes, *_ in everyone:
            times.update({cause: count for cause, (count, _, _) in causes.items()})
        cause, most = times.most_common(1)[0]
        kind, text = next(causes[cause][1:] for causes, *_ in everyone if cause in causes)
        ours = next((error for error in failures if error.cause == cause), None)
        raise kind(
            f"{text}\n  {failed} of {total} trajectories of this step failed, {most} of them with this message. "
            f"--max_failed={cfg.max_failed:g} is the share that may fail before the run stops."
        ) from (ours and ours.__cause__)
    return failed
