"""What a step's trajectories are like, over all ranks: the numbers that are logged, and how many of them failed.

Each trajectory has a flat dict {metric: (value, how many it is the sum of)}. Ranks add up theirs, exchange the sums
once, and divide: the means of a step, of each domain and of an evaluation.
"""

import logging
import math
import statistics
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

import utils
from config import TrainConfig, shorten
from inputs.trajectory import RowPictureError, Trajectory, is_scored, stands_in
from safety.calls import warn_once
from safety.http import origin
from safety.storable import calls_in

logger = logging.getLogger(__name__)

Numbers = dict[str, tuple[float, float]]  # {metric: (sum, count)}, of names in _sum the sum, in _max (the largest, 1)
WHOLE = ("num_tokens", "completions/count", "reward_timeouts", "unrewarded", "reward_without_token")  # sums of a step


def numbers_of(t: Trajectory, scores: list[float]) -> Numbers:
    """Of one trajectory. scores: of all completions of its prompt; their spread counts once for each of them."""
    std = statistics.stdev(scores) if len(scores) > 1 else 0.0
    length = sum(t.loss_mask)
    values = {
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
        **{f"{name}_sum": t.info.get(name, 0) for name in ("reward_timeouts", "unrewarded", "reward_without_token")},
    }
    found = {name: (value, 1) for name, value in values.items()}
    for name, value in t.info["rewards"].items():  # functions and their components, where they apply
        if not math.isnan(value) and ("/" not in name or known_name("names of rewards' components", name)):
            found[f"rewards/{name}/mean"] = value, 1
    for name, seconds in t.info.get("reward_seconds", {}).items():
        found[f"time/reward/{name}/mean"] = seconds, 1  # a function's name may end in _sum; `named` takes /mean off
    logged = [{name: (value, 1)} for name, value in t.info.get("logged", ())]
    logged = [one for one in logged if known_name("names given to log_metric", *one)]
    return added(logged) | found | turns_of(t)  # names of the run's own metrics are not taken


def turns_of(t: Trajectory) -> Numbers:
    """Turns and calls of tools; {} where nothing was played in turns."""
    if "turns" not in t.info:
        return {}
    infos = [turn["info"] for turn in t.info["turns"]]
    calls = [call for info in infos for call in calls_in(info)]
    found: Numbers = {"turns/mean": (t.turns, 1)}
    if any(isinstance(info.get("calls"), list) for info in infos):
        found["tools/call_frequency"] = len(calls), 1
    for call in calls:
        more = {"tools/failure_frequency": (call["failed"], 1), "tools/unreadable_frequency": (0, 1)}
        if isinstance(call.get("seconds"), (int, float)) and "name" in call:
            name = call["name"] or "unreadable"  # others are of an environment's own making
            more["tools/unreadable_frequency"] = (name == "unreadable", 1)
            more[f"tools/{name}/seconds"] = call["seconds"], 1
        found = added([found, more])
    return found


def added(many: Iterable[Numbers], prefix: str = "") -> Numbers:
    """Sums and counts of several, by the rule of `utils.over_ranks`."""
    sums: dict[str, list] = defaultdict(list)
    for numbers in many:
        for name, pair in numbers.items():
            sums[prefix + name].append(pair)
    found = {}
    for name, pairs in sums.items():
        values, counts = zip(*pairs, strict=True)
        found[name] = (max(values), 1) if name.endswith("_max") else (math.fsum(values), sum(counts))
    return found


def named(found: dict[str, float]) -> dict[str, float]:
    """Under TRL's names: those in _max and _sum that are ours are whole numbers, and have names of their own."""
    out = {}
    for name, value in found.items():
        plain = name.removesuffix("_sum").removesuffix("_max")
        if plain.endswith(("completions/max_length", "completions/min_length")):
            out[plain] = abs(int(value))
        elif plain.endswith((*WHOLE, "prompts")) and name.endswith("_sum"):
            out[plain] = int(value)
        elif "time/reward/" in name:
            out[name.removesuffix("/mean")] = value
        else:
            out[name] = value
    return out


def with_scores(trajectories: list[Trajectory]) -> list[Numbers]:
    """`numbers_of` each, beside the others of its prompt."""
    scores = defaultdict(list)
    for t in trajectories:
        scores[t.group].append(sum(t.token_rewards))
    return [numbers_of(t, scores[t.group]) for t in trajectories]


def rollout_metrics(trajectories: list[Trajectory], cfg: TrainConfig | None = None) -> dict[str, float]:
    """What a step's completions look like, over all ranks, which all call it; keys are TRL's. With domains in cfg also
    NAME/reward and so on of each, nothing of one that had no prompt."""
    trajectories = [t for t in trajectories if not stands_in(t)]
    numbers = with_scores(trajectories)
    mine = added(numbers)
    for own in cfg.by_domain() if cfg is not None and cfg.domains else ():
        places = [n for n, t in enumerate(trajectories) if t.info.get("domain") == own.domain]
        share = [{"solved": (float(solved(sum(trajectories[n].token_rewards), own)), 1)} for n in places]
        prompts = {"prompts_sum": (len({trajectories[n].group for n in places}), 1)} if places else {}
        mine |= added([*(numbers[n] for n in places), *share, prompts], own.prefix)
    found = named(utils.over_ranks(mine))
    return dict.fromkeys(WHOLE, 0) | found


def solved(score: float, cfg: TrainConfig) -> bool:
    """Whether a score reaches --eval_solved, but for rounding: weights such as .7, .2 and .1 add up to less than 1."""
    return score >= cfg.eval_solved - 1e-6 * max(abs(cfg.eval_solved), 1)


def eval_metrics(
    groups: list[list[Trajectory]], cfg: TrainConfig, any_number: Callable[[TrainConfig], bool] = lambda own: False
) -> dict[str, float]:
    """What completions of held-out rows are worth, of all rows and of each domain's, over all ranks, which all call it.

    The k of mean@k and pass@k is --eval_generations. Of a rollout that decides itself how many it returns it is the
    number that every row had, or else "all"; completions_per_row is their mean. any_number: whether a domain's rollout
    does so.
    """
    mine: Numbers = {}
    of_domain = [(group, cfg.of(group[0].row)) for group in groups]
    prefixes = ["", *(own.prefix for own in cfg.by_domain())] if cfg.domains else [""]
    for prefix in prefixes:
        kept = [(group, own) for group, own in of_domain if prefix in ("", own.prefix)]
        mine |= added((of_held_out(group, own, any_number(own)) for group, own in kept), prefix)
    found: dict[str, dict] = defaultdict(dict)  # by prefix
    for name, value in utils.over_ranks(mine).items():
        prefix = next((prefix for prefix in prefixes[1:] if name.startswith(prefix)), "")
        found[prefix][name.removeprefix(prefix)] = value
    out = {}
    for prefix, numbers in found.items():
        sizes = [name.rpartition(" ")[2] for name in numbers if " of size " in name]
        k = (sizes[0] if len(sizes) == 1 else "all") if sizes else cfg.eval_generations
        functions = [name for name in numbers if name.startswith("rewards/")]
        left_out = functions if len(functions) == 1 else []  # of one function alone it is the reward
        left_out += [] if numbers["unrewarded_sum"] else ["unrewarded_sum"]
        for name, value in numbers.items():
            if name.endswith("@"):
                out[f"{prefix}{name}{k}"] = value
            elif name not in left_out and " of size " not in name:
                out[prefix + name.removesuffix("_sum")] = int(value) if name.endswith("_sum") else value
    return out


def of_held_out(group: list[Trajectory], own: TrainConfig, any_number: bool) -> Numbers:
    """Of the completions of one held-out row."""
    scores = [sum(t.token_rewards) for t in group]
    good = [solved(score, own) for score in scores]
    found = {"reward": (sum(scores), len(group)), "mean@": (sum(good), len(group)), "pass@": (float(any(good)), 1)}
    for t in group:
        rewards = {f"rewards/{n}/mean": (v, 1) for n, v in t.info["rewards"].items() if not math.isnan(v)}
        found = added([found, rewards])
    if any_number:
        found |= {"completions_per_row": (len(group), 1), f"groups of size {len(group)}": (1, 1)}
    found |= {"unrewarded_sum": (sum(not is_scored(t) for t in group), 1), "rows_sum": (1, 1)}
    return found | {"mean_length": (sum(float(sum(t.loss_mask)) for t in group), len(group))}


def counts_by_origin(trajectories: list[Trajectory]) -> dict[str, int]:
    """rollout/ORIGIN: trajectories of the step that were not sampled in it, by their info["origin"], on all ranks."""
    mine = Counter(t.info["origin"] for t in trajectories if "origin" in t.info)
    return {f"rollout/{origin}": n for origin, n in sum(utils.gather_objects(mine), Counter()).items()}


MOST_NAMES = 100
_NAMED: dict[str, set[str]] = {}


def known_name(what: str, name: str) -> bool:
    """Whether it becomes a metric: the first MOST_NAMES of a run do. Names made of what a model says would have no end,
    and a tracker keeps each of them for ever."""
    known = _NAMED.setdefault(what, set())
    if name not in known and len(known) < MOST_NAMES:
        known.add(name)
    if name not in known:
        text = f"over {MOST_NAMES} {what}; {shorten(name, 80)} and other new ones are no metrics. Said once."
        warn_once(text, kind=what)
    return name in known


# ---- what ends a run ------------------------------------------------------------------------------------------------

SILENT_STEPS, SILENT_SECONDS = 10, 600.0  # both: steps may be quick, and a large model takes minutes to start
_SILENT: dict[tuple, tuple[int, float]] = {}  # judges: steps in a row without any answer, and when the first was
MOST_SHOWN = 10
_SHOWN: set[str] = set()  # causes whose traceback was printed, at most MOST_SHOWN


def check_failed(groups: list[list[Trajectory]], cfg: TrainConfig, counts: dict[str, float] | None = None) -> dict:
    """{"rollout/failed": how many of a step's trajectories failed} and the sums of `counts`, over all ranks, which all
    call it. Prints the traceback of each new cause; above --max_failed raises the commonest one, on every rank. Rows
    with a damaged image are named, and do not end a run that has others."""
    mine = [t for group in groups for t in group]
    failures = [t.info["failure"] for t in mine if "failure" in t.info]
    damaged = [t for t in mine if isinstance(t.info.get("failure"), RowPictureError)]
    for t in damaged:
        warn_once(f"row {t.info.get('row_number', '?')} of those in use is left out: {t.info['failure']}")
    causes: dict[str, tuple[int, type, str]] = {}
    for error in failures:
        show(error)
        causes[error.cause] = (causes.get(error.cause, (0,))[0] + 1, type(error), str(error))
    scored = [t for t in mine if "failure" not in t.info]
    late = sum(t.info.get("reward_timeouts", 0) >= max(len(t.info.get("rewards", ())), 1) for t in scored)
    sums = dict(failed=len(failures), all=len(mine), damaged=len(damaged), prompts=len(groups))
    sums |= dict(late=late, scored=len(scored)) | (counts or {})
    everyone = utils.gather_objects((sums, causes, judges_of(mine, cfg), time.time()))
    total = {name: sum(of_rank[name] for of_rank, *_ in everyone) for name in sums}
    check_scored(total, cfg)
    check_judges([judges for _, _, judges, _ in everyone], everyone[0][3])
    failed = total["failed"]
    excused = total["damaged"] * (failed < total["all"] or total["prompts"] == 1)  # not if no row's image is readable
    if failed - excused > cfg.max_failed * total["all"]:
        times: Counter = Counter()
        for _, of_rank, *_ in everyone:
            times.update({cause: count for cause, (count, _, _) in of_rank.items()})
        cause, most = times.most_common(1)[0]
        kind, text = next(of_rank[cause][1:] for _, of_rank, *_ in everyone if cause in of_rank)
        ours = next((error for error in failures if error.cause == cause), None)
        raise kind(
            f"{text}\n  {failed} of {total['all']} trajectories of this step failed, {most} of them with this message. "
            f"--max_failed={cfg.max_failed:g} is the share that may fail before the run stops."
        ) from (ours and ours.__cause__)
    return {"rollout/failed": failed} | {name: total[name] for name in counts or {}}


def show(error) -> None:
    """The traceback of a failure whose cause is new."""
    if error.cause in _SHOWN or len(_SHOWN) >= MOST_SHOWN or isinstance(error, RowPictureError):
        return
    _SHOWN.add(error.cause)
    frames = traceback.format_exception(error.__cause__ or error)[:-1]  # the last is the message, said already
    logger.warning("a trajectory failed and is left out: %s\n%s", error, "".join(frames)[-5000:])


def check_scored(total: dict, cfg: TrainConfig) -> None:
    """RuntimeError if no reward function answered in time for any completion of a step: then all have the same score,
    and nothing is learned."""
    if total["scored"] and total["late"] == total["scored"]:
        names = sorted({name for own in cfg.by_domain() for name in own.reward_funcs})
        raise RuntimeError(
            f"No reward function ({', '.join(names)}) answered within --reward_timeout={cfg.reward_timeout:g} s, "
            f"for any of the {total['scored']} completions of this step. Call it on one completion by hand; if it is "
            "merely slow, raise --reward_timeout."
        )


def judges_of(trajectories: list[Trajectory], cfg: TrainConfig) -> dict[tuple, tuple[bool, str]]:
    """Judges from whose scores something is learned: whether each answered for any completion, and its last fault."""
    found: dict[tuple, tuple[bool, str]] = {}
    for t in trajectories:
        unanswered = t.info.get("rewards", {}).get("judge/unanswered")
        if unanswered is not None and learns_from_judge(own := cfg.of(t.row)):
            judge, fault = (own.judge_url, own.judge_model), t.info.get("extra", {}).get("judge", "")
            found[judge] = found.get(judge, (False, ""))[0] or not unanswered, fault
    return found


def learns_from_judge(cfg: TrainConfig) -> bool:
    weights = cfg.reward_weights or [1.0] * len(cfg.reward_funcs)
    return any(weight for name, weight in zip(cfg.reward_funcs, weights, strict=False) if name == "judge")


def check_judges(everyone: list[dict], now: float) -> None:
    """RuntimeError if a judge has answered for no completion for SILENT_STEPS steps (and evaluations) and
    SILENT_SECONDS: other rewards would go on teaching without it. everyone: `judges_of` each rank."""
    for judge in sorted({judge for found in everyone for judge in found}):
        answers = [found[judge] for found in everyone if judge in found]
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
