"""Metrics of a step's trajectories over all ranks, and errors if too many trajectories failed.

Each trajectory has a flat dict {metric: number, or several}. Ranks add up theirs, exchange the sums once, and divide,
which gives the means of a step, of each domain and of an evaluation.
"""

import math
import statistics
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import utils
from config import TrainConfig
from inputs.trajectory import RowError, Trajectory, calls_in, is_scored, stands_in
from network.http import origin
from safety.results import warn_once

Numbers = dict[str, float | list[float]]  # of one trajectory, or of a prompt's
COUNTS = ("reward_timeouts", "unrewarded", "reward_without_token")  # in the info of a trajectory
WHOLE = ("num_tokens", "completions/count", *COUNTS)  # sums of a step


def numbers_of(t: Trajectory, scores: list[float]) -> Numbers:
    """The metrics of one trajectory, to be averaged; names in _sum are added up, of those in _max the largest counts.
    scores: of all completions of its prompt; their spread counts once for each completion."""
    std = statistics.stdev(scores) if len(scores) > 1 else 0.0
    length = sum(t.loss_mask)
    logged = defaultdict(list)  # values that reward functions logged
    for name, value in t.info.get("logged", ()):
        logged[name].append(value)
    return logged | {  # the run's own metrics win over logged ones of the same name
        "reward": sum(t.token_rewards),
        "reward_std": std,
        "frac_reward_zero_std": float(std < 1e-6),
        "frac_singleton_groups": float(len(scores) == 1),
        "completions/mean_length": length,
        "completions/clipped_ratio": float(t.finish_reason == "length"),
        "completions/max_length_max": length,
        "completions/min_length_max": -length,
        "completions/count_sum": 1,
        "num_tokens_sum": len(t.prompt_ids) + len(t.token_ids),
        **{f"{name}_sum": t.info.get(name, 0) for name in COUNTS},
        **rewards_of(t),
        # A function's name may end in _sum, hence /mean, which `public_names` removes.
        **{f"time/reward/{name}/mean": seconds for name, seconds in t.info.get("reward_seconds", {}).items()},
        **turns_of(t),
    }


def rewards_of(t: Trajectory) -> Numbers:
    """Rewards by function and component, where they apply."""
    return {f"rewards/{name}/mean": value for name, value in t.info["rewards"].items() if not math.isnan(value)}


def turns_of(t: Trajectory) -> Numbers:
    """Turns and tool calls; {} if nothing was played in turns."""
    if "turns" not in t.info:
        return {}
    infos = [turn["info"] for turn in t.info["turns"]]
    calls = [call for info in infos for call in calls_in(info)]
    values = defaultdict(list, {"turns/mean": [t.turns]})
    if any(isinstance(info.get("calls"), list) for info in infos):
        values["tools/call_frequency"] = [len(calls)]
    for call in calls:
        values["tools/failure_frequency"].append(call["failed"])
        values["tools/unreadable_frequency"].append(call.get("name") == "")
        if {"name", "seconds"} <= call.keys():  # other calls are an environment's own
            values[f"tools/{call['name'] or 'unreadable'}/seconds"].append(call["seconds"])
    return values


def sums_of(numbers_list: Iterable[Numbers], prefix: str = "") -> dict[str, tuple[float, float]]:
    """{metric: (sum, count)} of several trajectories, for `utils.over_ranks`."""
    values: dict[str, list] = defaultdict(list)
    for numbers in numbers_list:
        for name, value in numbers.items():
            values[prefix + name] += value if isinstance(value, list) else [value]
    return {n: (max(v), 1) if n.endswith("_max") else (math.fsum(v), len(v)) for n, v in values.items()}


def public_names(means: dict[str, float]) -> dict[str, float]:
    """Metrics under TRL's names; our own in _max and _sum lose that ending, and become whole numbers."""
    metrics = {}
    for name, value in means.items():
        plain = name.removesuffix("_sum").removesuffix("_max")
        if plain.endswith((*WHOLE, "/prompts", "/max_length", "/min_length")) and plain != name:
            metrics[plain] = abs(int(value))
        else:
            metrics[name.removesuffix("/mean") if "time/reward/" in name else name] = value
    return metrics


def rollout_metrics(trajectories: list[Trajectory], cfg: TrainConfig | None = None) -> dict[str, float]:
    """Metrics of a step's completions over all ranks, with TRL's keys. With domains in cfg also NAME/reward and so on
    of each domain that had a prompt. Collective."""
    trajectories = [t for t in trajectories if not stands_in(t)]
    scores = defaultdict(list)
    for t in trajectories:
        scores[t.group].append(sum(t.token_rewards))
    numbers = [numbers_of(t, scores[t.group]) for t in trajectories]
    sums = sums_of(numbers)
    for domain_cfg in cfg.by_domain() if cfg is not None and cfg.domains else ():
        places = [n for n, t in enumerate(trajectories) if t.info.get("domain") == domain_cfg.domain]
        share = [{"solved": float(solved(sum(trajectories[n].token_rewards), domain_cfg))} for n in places]
        prompts = [{"prompts_sum": 1} for _ in {trajectories[n].group for n in places}]
        sums |= sums_of([*(numbers[n] for n in places), *share, *prompts], domain_cfg.prefix)
    return dict.fromkeys(WHOLE, 0) | public_names(utils.over_ranks(sums))


def solved(score: float, cfg: TrainConfig) -> bool:
    """Whether a score reaches --eval_solved, up to rounding: weights such as .7, .2 and .1 add up to less than 1."""
    return score >= cfg.eval_solved - 1e-6 * max(abs(cfg.eval_solved), 1)


def eval_metrics(
    groups: list[list[Trajectory]], cfg: TrainConfig, any_number: Callable[[TrainConfig], bool] = lambda domain: False
) -> dict[str, float]:
    """Metrics of completions of held-out rows, of all rows and of each domain's, over all ranks. Collective.

    The k of mean@k and pass@k is --eval_generations, or "all" if a domain's rollout itself decides how many it returns
    (any_number); completions_per_row is then their mean number.
    """
    domains = cfg.by_domain()
    k = "all" if any(map(any_number, domains)) else cfg.eval_generations
    sums, prefixes = {}, dict.fromkeys(["", *(domain.prefix for domain in domains)])
    for prefix in prefixes:
        numbers: list[Numbers] = []
        for group in groups:
            domain = cfg.of(group[0].row)
            if prefix not in ("", domain.prefix):
                continue
            good = [solved(sum(t.token_rewards), domain) for t in group]
            numbers.append({f"mean@{k}": good, f"pass@{k}": float(any(good)), "rows_sum": 1})
            numbers += [{"completions_per_row": len(group)}] if k == "all" else []
            for t in group:
                numbers.append({"reward": sum(t.token_rewards), "mean_length": float(sum(t.loss_mask))})
                numbers.append(rewards_of(t) | {"unrewarded_sum": not is_scored(t)})
        sums |= sums_of(numbers, prefix)
    metrics = utils.over_ranks(sums)
    for prefix in prefixes:
        functions = [name for name in metrics if name.startswith(f"{prefix}rewards/")]
        for name in functions if len(functions) == 1 else ():  # a single one is the reward
            del metrics[name]
    counts = {name.removesuffix("_sum"): int(value) for name, value in metrics.items() if name.endswith("_sum")}
    means = {name: value for name, value in metrics.items() if not name.endswith("_sum")}
    return means | {name: value for name, value in counts.items() if value or not name.endswith("unrewarded")}


def counts_by_origin(trajectories: list[Trajectory]) -> dict[str, int]:
    """rollout/ORIGIN: how many trajectories have this info["origin"], since they were not sampled in this step, over
    all ranks."""
    counts = Counter(t.info["origin"] for t in trajectories if "origin" in t.info)
    return {f"rollout/{origin}": n for origin, n in sum(utils.gather_objects(counts), Counter()).items()}


# ---- failures that end a run ----------------------------------------------------------------------------------------

SILENT_STEPS = 10  # steps and evaluations in a row without any answer of the judge
_SILENT = [0]


def check_failed(groups: list[list[Trajectory]], cfg: TrainConfig, counts: dict[str, float] | None = None) -> dict:
    """{"rollout/failed": how many of a step's trajectories failed} and sums of `counts`, over all ranks. Collective.

    Prints a traceback for each place in the code that fails. Above --max_failed the commonest failure is raised, on
    every rank. Rows that cannot be shown to the model are reported, and do not end a run that has other rows."""
    trajectories = [t for group in groups for t in group]
    failures = [t.info["failure"] for t in trajectories if "failure" in t.info]
    damaged = [t for t in trajectories if isinstance(t.info.get("failure"), RowError)]
    for t in damaged:
        fault = t.info["failure"]
        warn_once(f"row {t.info.get('row_number', '?')} of those in use is left out: {fault}", fault.cause)
    times, kinds = Counter(error.cause for error in failures), {e.cause: (type(e), str(e)) for e in failures}
    scored = [t for t in trajectories if "failure" not in t.info]
    late = sum(t.info.get("reward_timeouts", 0) >= max(len(t.info.get("rewards", ())), 1) for t in scored)
    flags = [t.info["rewards"]["judge/unanswered"] for t in scored if "judge/unanswered" in t.info.get("rewards", ())]
    sums = dict(failed=len(failures), all=len(trajectories), damaged=len(damaged), prompts=len(groups), late=late)
    sums |= dict(scored=len(scored), asked=len(flags), unanswered=sum(flags)) | (counts or {})
    by_rank = utils.gather_objects((sums, times, kinds))
    total = {name: sum(of_rank[name] for of_rank, *_ in by_rank) for name in sums}
    check_scored(total, cfg)
    check_judge(total, cfg)
    failed = total["failed"]
    excused = total["damaged"] * (failed < total["all"] or total["prompts"] == 1)  # unless every row failed
    if failed - excused > cfg.max_failed * total["all"]:
        cause, num = sum((of_rank for _, of_rank, _ in by_rank), Counter()).most_common(1)[0]
        kind, text = next(of_rank[cause] for *_, of_rank in by_rank if cause in of_rank)
        own_error = next((error for error in failures if error.cause == cause), None)
        raise kind(
            f"{text}\n  {failed} of {total['all']} trajectories failed, {num} of them with this message. "
            f"--max_failed={cfg.max_failed:g} is the share that may fail before the run stops."
        ) from (own_error and own_error.__cause__)
    for error in failures:  # only if the run continues; else the error above shows one
        if not isinstance(error, RowError):
            frames = traceback.format_tb((error.__cause__ or error).__traceback__) or [error.cause]
            warn_once(f"a trajectory failed and is left out: {error}\n{''.join(frames)[-5000:]}", kind=frames[-1])
    return {"rollout/failed": failed} | {name: total[name] for name in counts or {}}


def check_scored(total: dict, cfg: TrainConfig) -> None:
    """RuntimeError if no reward function answered in time for any completion of a step: all would have the same score,
    and nothing would be learned."""
    if total["scored"] and total["late"] == total["scored"]:
        names = sorted({name for domain in cfg.by_domain() for name in domain.reward_funcs})
        raise RuntimeError(
            f"No reward function ({', '.join(names)}) answered within --reward_timeout={cfg.reward_timeout:g} s, for "
            f"any of the {total['scored']} completions. Call it on one completion by hand; if it is merely slow, raise "
            "--reward_timeout."
        )


def check_judge(total: dict, cfg: TrainConfig) -> None:
    """RuntimeError if the judge has not answered for SILENT_STEPS steps: training would continue on the other rewards
    alone."""
    if total["asked"]:
        _SILENT[0] = _SILENT[0] + 1 if total["unanswered"] == total["asked"] else 0
    if _SILENT[0] >= SILENT_STEPS:
        urls = ", ".join(sorted({origin(domain.judge_url) for domain in cfg.by_domain() if domain.judge_url}))
        fault = f"answered for no completion of the last {_SILENT[0]} steps; their column `judge` says why"
        raise RuntimeError(f"The judge at {urls} {fault}. See that it answers, and resume the run (--resume).")
