"""Advice on a run in words: what stands out, since when, what it may mean, where to read on.

RULES is a table of rules of thumb with their thresholds, for the page and the report. They know nothing of the task:
they tell where to look, not what is wrong.
"""

from collections.abc import Callable

import numpy as np

from runfiles.reading import SOLVED, Curves, domains

RECENT = 10  # steps whose mean is "now"; in a short run its last third
ENOUGH = 8  # steps that a trend needs

Test = Callable[[Curves, dict], dict | None]  # (metrics, settings) -> values for the rule's text; None if it fails


def late(values: np.ndarray) -> np.ndarray:
    return values[-min(RECENT, max(len(values) // 3, 3)) :]


def now(values: np.ndarray) -> float:
    return float(late(values).mean())


def at_first(values: np.ndarray) -> float:
    """The mean of the first steps: a tenth of them, 1 to 20."""
    return float(values[: min(max(len(values) // 10, 1), 20)].mean())


def since(steps: np.ndarray, holds: np.ndarray) -> int | None:
    """The first step from which `holds` is true at four points in five; None if it is not true now."""
    if not len(holds) or late(holds).mean() < 0.8:
        return None
    share = holds[::-1].cumsum() / np.arange(1, len(holds) + 1)  # of the points from each to the last
    start = len(holds) - 1 - int(np.flatnonzero(share >= 0.8)[-1]) if (share >= 0.8).any() else 0
    return int(steps[start + int(holds[start:].argmax())])


def holds_now(name: str, holds: Callable[[np.ndarray], np.ndarray], enough: int = 3) -> Test:
    """A rule that applies while `holds` is true of a metric."""

    def test(curves: Curves, config: dict) -> dict | None:
        steps, values = curves.all(name)
        if len(values) < enough or (start := since(steps, holds(values))) is None:
            return None
        return {"now": now(values), "first": at_first(values), "since": start}

    return test


def above(name: str, limit: float, enough: int = 3) -> Test:
    return holds_now(name, lambda values: values > limit, enough)


# ---- rules that look at more than one metric ------------------------------------------------------------------------


def learns_from_teacher(curves: Curves, config: dict) -> bool:
    """Whether most tokens learn from a teacher, so that equal rewards do no harm."""
    shares = curves.all("distill/asked")[1]
    return bool(len(shares)) and now(shares) > 0.5 and bool(config.get("distill_coef", 1))


def same_reward(curves: Curves, config: dict) -> dict | None:
    reward, silent = curves.all("reward")[1], curves.all("frac_reward_zero_std")[1]
    is_constant = len(silent) >= ENOUGH and np.ptp(reward) < 1e-9 and np.all(silent > 0.99)
    return {"reward": reward[0]} if is_constant and not learns_from_teacher(curves, config) else None


def silent_groups(curves: Curves, config: dict) -> dict | None:
    finding = above("frac_reward_zero_std", 0.6, ENOUGH)(curves, config)
    reward, alone = curves.all("reward")[1], curves.all("frac_singleton_groups")[1]
    reason = same_reward(curves, config) or learns_from_teacher(curves, config) or (len(alone) and now(alone) > 0.99)
    if not finding or reason or not len(reward):
        return None
    why = "completions of a prompt score alike. Read a group: do they say the same"
    if now(reward) > 0.7 and now(reward) >= 0.8 * reward.max() and not pulled_apart(curves, config):
        why = "too easy. Harder rows, or --dynamic_sampling"
    elif now(reward) < 0.15:
        why = "too hard. Easier rows, a warm start, partial credit"
    return finding | {"reward": now(reward), "why": why}


def nothing_learned(curves: Curves, config: dict) -> dict | None:
    silent = curves.all("frac_reward_zero_std")[1]
    scores_differ = len(silent) >= 3 and now(silent) < 0.95
    return holds_now("grad_norm", lambda norm: norm == 0)(curves, config) if scores_differ else None


def entropy_collapse(curves: Curves, config: dict) -> dict | None:
    """Entropy fell, and learning stopped with it. Low entropy alone is normal for short answers."""
    finding = holds_now("entropy", lambda entropy: entropy < 0.15 * at_first(entropy), ENOUGH)(curves, config)
    reward = curves.all("reward")[1]
    if not finding or len(reward) < ENOUGH:
        return None
    middle = now(reward[: len(reward) // 2])
    return finding | {"before": middle, "reward": now(reward)} if now(reward) <= min(middle + 0.05, 0.7) else None


def entropy_rises(curves: Curves, config: dict) -> dict | None:
    values, reward = curves.all("entropy")[1], curves.all("reward")[1]
    if len(values) < ENOUGH or not len(reward) or now(reward) >= 0.7:
        return None
    first, last = at_first(values), now(values)
    return {"first": first, "now": last} if last > max(3 * first, 0.5) else None


def pulled_apart(curves: Curves, config: dict) -> dict | None:
    """One reward function rises while another falls or stays near 0."""
    functions = [name for name in curves.names_like(["rewards/*"]) if name.count("/") == 2]  # without components
    changes = [(name.split("/")[1], *curves.all(name)) for name in functions]
    changes = [(name, at_first(values), now(values)) for name, _, values in changes if len(values) >= ENOUGH]
    for winner, before, after in changes:
        for loser, first, last in changes:
            falls = (first > 0.05 and last < 0.5 * first) or (0 <= first < 0.05 and 0 <= last < 0.05)
            if loser != winner and falls and after - before > max(0.2 * max(abs(before), abs(after)), 0.1):
                return dict(one=winner, before=before, after=after, other=loser, first=first, last=last)
    return None


def longer(curves: Curves, config: dict) -> dict | None:
    """Length and reward have grown, and the held-out score has not."""
    lengths, reward = curves.all("completions/mean_length")[1], curves.all("reward")[1]
    held_out = curves.all(next(iter(curves.names_like([*SOLVED, "eval/reward"])), ""))[1]
    if len(lengths) < ENOUGH or not len(reward) or len(held_out) < 6 or now(lengths) <= 1.8 * at_first(lengths):
        return None
    gained, followed = now(reward) - at_first(reward), held_out[-3:].mean() - held_out[:3].mean()
    only_reward = gained > 0.05 and followed < 0.25 * gained
    return {"first": at_first(lengths), "now": now(lengths)} if only_reward else None


def left_behind(curves: Curves, config: dict) -> dict | None:
    """A domain earns nothing, or falls, while the others do not."""
    rewards = {name: curves.all(f"{name}/reward")[1] for name in domains(config)}
    rewards = {name: values for name, values in rewards.items() if len(values) >= ENOUGH}
    for name, values in rewards.items():
        others = [now(v) for other, v in rewards.items() if other != name]
        flat = np.ptp(values[-4 * RECENT :]) < 1e-6 or now(values) < 0.1
        if others and np.median(others) > now(values) + 0.1 and (flat or now(values) < 0.5 * values.max()):
            return {"name": name, "now": now(values), "most": values.max(), "others": np.median(others)}
    return None


LOST = {
    "rollout/failed": "failed trajectories",
    "unrewarded": "completions to which no reward function applied",
    "reward_timeouts": "rewards that ran out of time (--reward_timeout; the terminal names the function)",
}


def lost(curves: Curves, config: dict) -> dict | None:
    """What did not count in the last steps."""
    counts = {what: curves.all(name)[1][-RECENT:].sum() for name, what in LOST.items()}
    said = ", ".join(f"{count:.0f} {what}" for what, count in counts.items() if count)
    return {"said": said} if said else None


def no_calls(curves: Curves, config: dict) -> dict | None:
    return holds_now("tools/call_frequency", lambda calls: calls == 0)(curves, config) if config.get("tools") else None


# ---- the table ------------------------------------------------------------------------------------------------------

RULES: list[tuple[str, str, str, Test, str]] = [  # level, title, heading in docs/looking.md, test, text
    (
        "bad", "Trainer against generator", "stale-server", above("sampling/logprob_diff_mean", 0.08, ENOUGH),
        "They differ by {now:.2g} in the log-probs of the same tokens since step {since}, at first by {first:.2g}; .01 "
        "to .05 is usual. If it began well, the weights that sample are old: does every push arrive, with everything "
        "in it? If not: another model, template or temperature, or tokens that no sampler wrote.",
    ),
    (
        "watch", "Importance weights", "stale-server", holds_now("sampling/ess", lambda size: size < 0.5, ENOUGH),
        "The effective sample size is {now:.0%} of the tokens since step {since}: few of them carry the update.",
    ),
    (
        "bad", "Nothing is learned", "failures", nothing_learned,
        "The gradient is 0 since step {since}, although scores differ within groups: no token with an advantage is "
        "left. What takes them out? --mask_truncated where all are cut off, --group_mean_bounds, sampling/left_out, a "
        "leave_out or advantage of yours.",
    ),
    (
        "bad", "The same reward for all", "silent-groups", same_reward,
        "The reward was {reward:.3g} for every completion. Call your function on an answer that is right: does it say "
        "so? If it does, rows are too hard (a warm start, partial credit) or too easy.",
    ),
    (
        "watch", "Groups without signal", "silent-groups", silent_groups,
        "{now:.0%} of the groups are silent since step {since}, at a reward of {reward:.2f}: {why}?",
    ),
    (
        "bad", "Rewards pull apart", "rewards-apart", pulled_apart,
        "{one} rose from {before:.2f} to {after:.2f} while {other} went from {first:.2f} to {last:.2f}: is the first a "
        "short cut? Read the completions that it likes best; a smaller weight (--reward_weights), or only where the "
        "other gave something.",
    ),
    (
        "bad", "Reward by length", "reward-by-length", longer,
        "Completions grew from {first:.0f} to {now:.0f} tokens and the reward with them; held-out rows did not follow. "
        "Is length itself rewarded? Sort a step's completions by length and read the longest.",
    ),
    (
        "watch", "Cut off", "cut-off", above("completions/clipped_ratio", 0.2, ENOUGH),
        "{now:.0%} of the completions hit the length limit since step {since}: a higher --max_completion_length, or a "
        "reward for ending; if they grew until there, is length rewarded?",
    ),
    (
        "bad", "Entropy collapse", "entropy-collapse", entropy_collapse,
        "Entropy fell from {first:.2g} to {now:.2g}, below a seventh of its start since step {since}, and the reward "
        "does not grow ({before:.2f} in the middle of the run, {reward:.2f} now): the policy hardly explores. A lower "
        "learning rate, --entropy_coef, clip-higher (--epsilon_high) or a KL term.",
    ),
    (
        "watch", "Entropy rises", "entropy-rises", entropy_rises,
        "Entropy went from {first:.2g} to {now:.2g}. Text that becomes noise looks like this: does a turn still end? A "
        "lower learning rate, a KL term (--beta), no --entropy_coef.",
    ),
    (
        "bad", "A domain is left behind", "broken-domain", left_behind,
        "{name}: the reward is {now:.2f}, {most:.2f} at its best; the others are at {others:.2f}. Call its function on "
        "a completion that is right.",
    ),
    (
        "bad", "Teacher and template", "another-template", holds_now("distill/first_gap", lambda gap: gap < -2),
        "The first token of an answer has {now:.1f} nats more by the teacher than by the policy since step {since}: is "
        "it a base model, or has it another chat template?",
    ),
    (
        "watch", "Failed calls", "failures", above("tools/failure_frequency", 0.2),
        "{now:.0%} of the calls of tools fail since step {since}. Can they be read (tools/unreadable_frequency)? If "
        "not: --tool_parser.",
    ),
    (
        "watch", "No calls", "failures", no_calls,
        "There are tools, and no trajectory has called one since step {since}. Does the prompt ask for it, and can the "
        "model write calls? scripts/warm_start.py --tools teaches the form.",
    ),
    (
        "watch", "Never trained on", "failures", above("async/never_trained", 0.05),
        "{now:.0%} of the prompts, since step {since}: their groups take too long. --max_staleness, or shorter limits.",
    ),
    (
        "watch", "Critic", "critic", holds_now("value/explained_variance", lambda share: share < 0.05, 2 * ENOUGH),
        "It explains {now:.0%} of the returns' variance: --critic_iterations 8, or a higher --critic_learning_rate.",
    ),
    (
        "watch", "The judge does not answer", "failures", above("rewards/judge/unanswered/mean", 0.2),
        "{now:.0%} of the completions have no answer of it since step {since}.",
    ),
    ("watch", "Left out or late", "failures", lost, "Of the last steps that were read: {said}."),
]  # fmt: skip


def notes(curves: Curves, config: dict) -> list[dict]:
    """The rules that apply, as notes; bad ones first."""
    entries = []
    for level, title, see, test, text in RULES:
        if values := test(curves, config):
            entries.append({"level": level, "title": title, "text": text.format(**values), "see": see})
    return sorted(entries, key=lambda note: note["level"] != "bad")
