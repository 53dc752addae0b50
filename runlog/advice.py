"""What stands out in a run, in words: what was seen, since when, what it may mean, where to read on.

Rules of thumb with thresholds in the open, for the page and the report. Each function looks for one thing and returns
notes: {"level": "bad" or "watch", "title", "text", "see"}. None of them can know what a task is like: they say where to
look, not what is so.
"""

from pathlib import Path

import numpy as np

from runlog import samples
from runlog.reading import SOLVED, Curves, domains

RECENT = 10  # steps that "now" is the mean of; of a short run its last third
ENOUGH = 8  # steps before there is anything to say about a trend
LOOKED_AT = 512  # completions of the last step that are looked at


def note(level: str, title: str, text: str, see: str) -> dict:
    return {"level": level, "title": title, "text": text, "see": see}


def late(values: np.ndarray) -> np.ndarray:
    return values[-min(RECENT, max(len(values) // 3, 3)) :]


def now(values: np.ndarray) -> float:
    return float(late(values).mean())


def at_first(values: np.ndarray) -> float:
    """The mean of the first steps: a tenth of them, 1 to 20."""
    return float(values[: min(max(len(values) // 10, 1), 20)].mean())


def since(steps: np.ndarray, holds: np.ndarray) -> int | None:
    """The step from which on it has held, but for one step in five; None if it does not hold now."""
    if not len(holds) or late(holds).mean() < 0.8:
        return None
    counts = np.diff(steps, prepend=2 * steps[0] - steps[min(1, len(steps) - 1)])[::-1]  # a point may be several steps
    counts = counts if len(steps) > 1 else np.ones(1)
    share = np.cumsum(holds[::-1] * counts) / np.cumsum(counts)  # of the steps from there to the last
    if not (share >= 0.8).any():  # the last point stands for many steps
        return None
    start = len(holds) - 1 - int(np.flatnonzero(share >= 0.8)[-1])
    while not holds[start]:
        start += 1
    return int(steps[start])


def silent_groups(curves: Curves, config: dict, apart: list[dict]) -> list[dict]:
    _, asked = curves.all("distill/asked")
    if len(asked) and now(asked) > 0.5 and config.get("distill_coef", 1):
        return []  # most tokens learn from a teacher, whatever the rewards are
    steps, silent = curves.all("frac_reward_zero_std")
    _, alone = curves.all("frac_singleton_groups")
    if len(silent) < ENOUGH or (len(alone) and now(alone) > 0.99) or (start := since(steps, silent > 0.6)) is None:
        return []
    rewards = curves.all("reward")[1]
    if not len(rewards):
        return []
    reward, best = now(rewards), float(rewards.max())
    if np.ptp(rewards) < 1e-9 and np.all(silent > 0.99):
        text = f"The reward was {reward:.3g} for every completion since step {steps[0]:.0f}. Call your function on an "
        text += "answer that is right: does it say so? If it does, rows are too hard (a warm start, partial credit) or "
        text += "too easy."
        return [note("bad", "Groups without signal", text, "silent-groups")]
    if reward >= 0.8 * best and best > 0 and reward > 0.7 and not apart:
        why = f"too easy (reward {reward:.2f}). Harder rows, or --dynamic_sampling, would teach more"
    elif reward < 0.15:
        why = f"too hard (reward {reward:.2f}). Easier rows, a warm start or partial credit would give a signal"
    else:
        why = f"completions of a prompt score alike (reward {reward:.2f}). Read a group, whether they say the same"
    quarters = round(4 * now(silent))
    share = f"{quarters} of 4 groups" if quarters < 4 else f"{now(silent):.0%} of the groups"
    return [note("watch", "Groups without signal", f"{share} are silent since step {start}: {why}.", "silent-groups")]


def nothing_learned(curves: Curves, config: dict) -> list[dict]:
    """A gradient of 0, although completions of a prompt score differently."""
    (steps, norm), (_, silent) = curves.all("grad_norm"), curves.all("frac_reward_zero_std")
    differ = len(silent) >= 3 and now(silent) < 0.95
    if len(norm) < 3 or not differ or (start := since(steps, norm == 0)) is None:
        return []
    text = f"The gradient is 0 since step {start}, although scores differ within groups: no token with an advantage is "
    text += "left. "
    if config.get("mask_truncated") and (cut := curves.all("completions/clipped_ratio")[1]).size and now(cut) > 0.99:
        text += "--mask_truncated leaves out completions that are cut off, which all are: a higher "
        text += "--max_completion_length."
    else:
        text += (
            "What takes them out? --group_mean_min and the like, sampling/left_out, a leave_out or advantage of yours."
        )
    return [note("bad", "Nothing is learned", text, "failures")]


def entropy(curves: Curves) -> list[dict]:
    """Little entropy is no fault where short answers are learned: it is one where learning stopped with it."""
    steps, values = curves.all("entropy")
    reward, rate = curves.all("reward")[1], curves.all("lr")[1]
    if len(values) < ENOUGH or len(reward) != len(values) or values[0] <= 0:
        return []
    if found := one_update(steps, values, reward, rate):
        return found
    first, last = at_first(values), now(values)
    if last > 3 * first and last > 0.5 and now(reward) < 0.7:
        text = f"Entropy went from {first:.2g} to {last:.2g}, the reward from {at_first(reward):.2f} to "
        text += f"{now(reward):.2f}. Text that becomes noise looks like this. Read some: does a turn still end? A "
        text += "lower learning rate, a KL term (--beta), no --entropy_coef."
        return [note("watch", "Entropy rises", text, "entropy-rises")]
    start = since(steps, values < 0.15 * first)
    if start is None or now(reward) > 0.7:
        return []
    place = int(np.searchsorted(steps, start))
    then = reward[max(place - RECENT // 2, 0) : place + 1].mean()  # when the entropy was gone
    if now(reward) > then + 0.05:
        return []
    text = f"Entropy fell from {first:.2g} to {last:.2g}, below a seventh of its start since step {start}: the policy "
    text += f"hardly explores any more, and the reward has not grown since ({then:.2f} then, {now(reward):.2f} now). A "
    text += "lower learning rate, an entropy bonus (--entropy_coef), clip-higher (--epsilon_high) or a KL term."
    return [note("bad", "Entropy collapse", text, "entropy-collapse")]


def one_update(steps: np.ndarray, entropy: np.ndarray, reward: np.ndarray, rate: np.ndarray) -> list[dict]:
    """Much of the entropy gone from one step to the next, and no step since as good as those before."""
    fall = entropy[:-1] - entropy[1:]
    place = int(fall.argmax()) + 1
    if fall[place - 1] < 0.4 * max(entropy[0], entropy[place - 1]) or reward[place:].max() >= reward[:place].mean():
        return []
    text = f"Entropy fell from {entropy[place - 1]:.2g} to {entropy[place]:.2g} between two steps, before step "
    text += f"{steps[place]:.0f}; the reward was {reward[:place].mean():.2g} until then and has been at most "
    text += f"{reward[place:].max():.2g} since. That update went too far: a lower learning rate"
    text += f" (it was {rate[place - 1]:.2g})" if len(rate) == len(entropy) else ""
    return [note("bad", "One update too far", text + ", a warm-up, or a smaller --max_grad_norm.", "entropy-collapse")]


def pulled_apart(curves: Curves) -> list[dict]:
    """One reward function is learned at the cost of another, or without it."""
    names = [name for name in curves.matching(["rewards/*"]) if name.count("/") == 2]  # functions, not their parts
    found = {name.split("/")[1]: curves.all(name)[1] for name in names}
    found = {name: values for name, values in found.items() if len(values) >= ENOUGH}
    for name, values in found.items():
        before, after = at_first(values), now(values)
        if after - before < 0.2 * max(abs(before), abs(after), 1e-9) or after - before < 0.1:
            continue
        for other, scores in found.items():
            first, last = at_first(scores), now(scores)
            fell = first > 0.05 and last < 0.5 * first
            never_began = 0 <= first < 0.05 and 0 <= last < 0.05
            if other == name or not (fell or never_began):
                continue
            text = (
                f"{name} rose from {before:.2f} to {after:.2f} while {other} went from {first:.2f} to {last:.2f}: the "
            )
            text += "first is learned, the second is not. Is the first a short cut? Read the completions that it likes "
            text += "best; a smaller weight (--reward_weights), or only where the other gave something."
            return [note("bad" if fell else "watch", "Rewards pull apart", text, "rewards-apart")]
    return []


def lost_rewards(curves: Curves, config: dict) -> list[dict]:
    """The only reward function says one thing, the completions got another."""
    shaped = any(config.get(name) for name in ("domains", "reward_weights", "kl_in_reward"))
    if len(config.get("reward_funcs") or ()) != 1 or shaped:
        return []
    name = f"rewards/{config['reward_funcs'][0].rpartition(':')[2]}/mean"
    (steps, reward), (_, given) = curves.all("reward"), curves.all(name)
    none = curves.all("unrewarded")[1]
    if len(reward) < ENOUGH or len(given) != len(reward) or np.any(none):
        return []
    apart = np.abs(reward - given) > 0.02 + 0.05 * np.abs(given)
    if late(apart).mean() < 0.8:
        return []
    place = int(np.abs(reward - given).argmax())
    text = f"Step {steps[place]:.0f}: completions got {reward[place]:.2f} on average, and {name.split('/')[1]} gave "
    text += f"{given[place]:.2f}. Rewards of turns are put at the ends of the model's turns: does the loss mask still "
    text += "know them?"
    return [note("bad", "Rewards are lost", text, "observations-trained")]


def length(curves: Curves, config: dict, apart: list[dict]) -> list[dict]:
    """Longer and longer: reward follows length while held-out rows do not follow reward."""
    found = []
    steps, lengths = curves.all("completions/mean_length")
    _, reward = curves.all("reward")
    if len(lengths) >= ENOUGH and len(reward) == len(lengths):
        first, last = at_first(lengths), now(lengths)
        later = slice(len(lengths) // 4, None)
        together = correlation(smooth(lengths)[later], smooth(reward)[later])
        if last > 1.8 * first and together > 0.7:
            text = f"Completions grew from {first:.0f} to {last:.0f} tokens, and the reward with them (correlation "
            text += f"{together:.2f})."
            bad = False
            for name in curves.matching([*SOLVED, "eval/reward"])[:1]:
                held = curves.all(name)[1]
                recent = held[len(held) // 4 :]
                gained = now(reward) - reward[len(reward) // 4 :][:RECENT].mean()
                if len(recent) >= 3 and recent[-3:].mean() - recent[:3].mean() < 0.25 * gained:
                    bad = True
                    text += f" Held-out rows did not follow: {name.removeprefix('eval/')} {recent[:3].mean():.2f} -> "
                    text += f"{recent[-3:].mean():.2f}, while the reward went up by {gained:.2f}."
            text += " Is length itself rewarded? Sort a step's completions by length and read the longest."
            found.append(note("bad" if bad else "watch", "Reward by length", text, "reward-by-length"))
    for domain in config.get("domains") or [{}]:
        name, limit = domain.get("name"), domain.get("max_completion_length", config.get("max_completion_length"))
        steps, cut = curves.all(f"{name}/completions/clipped_ratio" if name else "completions/clipped_ratio")
        if len(cut) < ENOUGH or (start := since(steps, cut > 0.2)) is None:
            continue
        text = f"{name}: " * bool(name) + f"{now(cut):.0%} of the completions hit the length limit"
        text += f" of {limit} tokens" if limit else ""
        text += f" since step {start}: "
        grew = len(lengths) and now(lengths) > 1.3 * lengths[0]
        paid = grew and len(reward) == len(lengths) and correlation(lengths, reward) > 0.7
        text += (
            "they grew until there. Is length rewarded?"
            if grew and (apart or paid)
            else "what would follow is missing. A higher --max_completion_length, or a reward for ending?"
        )
        found.append(note("watch", "Cut off", text, "cut-off"))
    return found


def stale(curves: Curves, config: dict) -> list[dict]:
    """The generator's log-probs move away from the trainer's: old weights, or another model."""
    found = []
    allowed = max([*(config.get(name) or 0 for name in ("push_steps", "max_staleness")), 1])
    for name in ("policy_lag", "staleness/max"):
        steps, lag = curves.all(name)
        if len(lag) and (start := since(steps, lag > allowed)) is not None:
            text = f"The weights that sample are {lag[-1]:.0f} optimizer steps old, and more than {allowed} since step "
            text += f"{start}. Do pushes arrive? See the server's log, and the version in the token view."
            found.append(note("bad", "A stale server", text, "stale-server"))
            break
    steps, difference = curves.all("sampling/logprob_diff_mean")
    if len(difference) >= ENOUGH:
        first, last = float(difference[0]), now(difference)
        if last > 0.08 and (start := since(steps, difference > max(0.05, 2 * min(first, 0.05)))) is not None:
            text = f"Trainer and generator differ by {last:.2g} in the log-probs of the same tokens, at the first step "
            text += f"by {first:.2g}, by more than .05 since step {start}; about .01 to .05 is usual. "
            if first < 0.08:
                lag = curves.all("policy_lag")[1]
                text += "It began well and grew: the weights that sample are old"
                text += ", although they say that they are new. " if len(lag) and not lag.any() else ". "
                text += "Does every push arrive, with everything in it?"
            else:
                text += "From the start on: another model, another temperature, or tokens that no sampler wrote?"
            found.append(note("bad", "Trainer against generator", text, "stale-server"))
    steps, size = curves.all("sampling/ess")
    if len(size) >= ENOUGH and (start := since(steps, size < 0.5)) is not None:
        text = f"The effective sample size is {now(size):.0%} of the tokens since step {start}: few of them carry the "
        text += "update."
        found.append(note("watch", "Importance weights", text, "stale-server"))
    return found


def teacher(curves: Curves) -> list[dict]:
    """Where teacher and policy do not speak of the same thing: no more training makes them agree."""
    (steps, first), (_, apart) = curves.all("distill/first_gap"), curves.all("distill/reverse_kl")
    found = []
    if len(first) >= 3 and len(apart) == len(first):
        start = since(steps, (first < -2) & (-first > 3 * np.abs(apart)))
        if start is not None:
            text = f"The first token of an answer is {-now(first):.1f} nats less likely to the teacher since step "
            text += f"{start}, tokens on average {now(apart):.2f}: a base model, or another chat template."
            found.append(note("bad", "Teacher and template", text, "another-template"))
    for name, limit, title, words in (
        ("distill/outside_top", 0.3, "Outside the teacher's top tokens", "are not among the teacher's likeliest"),
        ("distill/far_below", 0.2, "Far from the teacher", "have less than a twentieth of their probability there"),
    ):
        steps, share = curves.all(name)
        if len(share) >= 3 and (start := since(steps, share > limit)) is not None:
            text = f"{now(share):.0%} of the sampled tokens {words}, since step {start}: first a supervised pass over "
            text += "answers of the teacher, or --advantage distill."
            found.append(note("watch", title, text, "far-from-teacher"))
    return found


def left_behind(curves: Curves, config: dict) -> list[dict]:
    """A domain that earns nothing, or falls, while the others rise."""
    found = []
    rewards = {name: curves.all(f"{name}/reward") for name in domains(curves, config)}
    rewards = {name: (steps, values) for name, (steps, values) in rewards.items() if len(values) >= ENOUGH}
    for name, (steps, values) in rewards.items():
        others = [now(v) for other, (_, v) in rewards.items() if other != name]
        if not others:
            continue
        middle, level = float(np.median(others)), "watch"
        if np.ptp(values[-4 * RECENT :]) < 1e-6 and middle > values[-1] + 0.1:
            start, level = since(steps, np.abs(values - values[-1]) < 1e-6), "bad"
            text = f"the reward is {values[-1]:.2g} in every step since step {start}. Call its function on a completion"
        elif now(values) < 0.5 * float(values.max()) and values.max() > 0.1:
            text = f"the reward fell from {values.max():.2f} to {now(values):.2f}"
        elif now(values) < 0.1 and middle > 0.4:
            text = f"the reward is {now(values):.2f}. Too hard, or not scored right"
        else:
            continue
        found.append(note(level, f"Domain {name}", f"{name}: {text}; the others are at {middle:.2f}.", "broken-domain"))
    return found


SHARES = (  # (metric, limit, title, what is above it)
    ("tools/failure_frequency", 0.2, "Failed calls", "of the calls of tools fail"),
    ("tools/unreadable_frequency", 0.2, "Unreadable calls", "of the calls cannot be read (--tool_parser)"),
    ("sampling/left_out", 0.2, "Left out", "of the tokens are left out of the loss"),
    ("clip_ratio/region_mean", 0.3, "Clipped", "of the tokens are clipped"),
)
COUNTS = (  # (metric, title, what there should be none of)
    ("rollout/failed", "Failed trajectories", "trajectories failed and were left out"),
    ("unrewarded", "No reward", "completions had no reward function that applied"),
    ("rollout/unrewarded", "Left out without a reward", "completions without a reward were left out"),
    ("reward_timeouts", "Late rewards", "rewards ran out of time (--reward_timeout; the terminal names the function)"),
)


def failures(curves: Curves, config: dict) -> list[dict]:
    found = []
    for name, limit, title, words in SHARES:
        steps, values = curves.all(name)
        always = len(values) and values.min() > 0.99  # then the first step says it
        if (len(values) >= 3 or always) and (start := since(steps, values > limit)) is not None:
            found.append(note("watch", title, f"{now(values):.0%} {words} since step {start}.", "failures"))
    for name, title, words in COUNTS:
        _, values = curves.all(name)
        if len(values) and values[-RECENT:].sum() > 0:
            text = f"{values[-RECENT:].sum():.0f} {words} in the last {min(len(values), RECENT)} steps that were read."
            found.append(note("watch", title, text, "failures"))
    steps, calls = curves.all("tools/call_frequency")
    if config.get("tools") and len(calls) >= 3 and not late(calls).any():
        text = f"There are tools, and no trajectory has called one since step {since(steps, calls == 0)}. Does the "
        text += "prompt ask for it, and can the model write calls? scripts/warm_start.py --tools teaches the form."
        found.append(note("watch", "No calls", text, "failures"))
    _, explained = curves.all("value/explained_variance")
    if len(explained) >= 2 * ENOUGH and now(explained) < 0.05:
        text = f"The critic explains {now(explained):.0%} of the returns' variance. It learns slower than the policy: "
        text += "--critic_iterations 8, or a higher --critic_learning_rate."
        found.append(note("watch", "Critic", text, "critic"))
    _, norm = curves.all("grad_norm")
    if len(norm) >= ENOUGH and now(norm[-3:]) > 10 * np.median(norm) > 0:
        text = f"The gradient norm is {now(norm[-3:]):.3g}, usually {np.median(norm):.3g}."
        found.append(note("watch", "Gradient norm", text, "failures"))
    return found


def of_curves(curves: Curves, config: dict) -> list[dict]:
    """Notes on the metrics; the bad ones first."""
    apart = pulled_apart(curves)
    found = [*lost_rewards(curves, config), *stale(curves, config), *apart, *length(curves, config, apart)]
    found += [*nothing_learned(curves, config), *entropy(curves), *left_behind(curves, config), *teacher(curves)]
    found += [*silent_groups(curves, config, apart), *failures(curves, config)]
    return sorted(found, key=lambda note: note["level"] != "bad")


def both(of_file: list[dict], of_metrics: list[dict]) -> list[dict]:
    """Each title once: what completions show comes first, and of what both show the metrics know since when."""
    known = {note["title"] for note in of_metrics}
    return sorted([n for n in of_file if n["title"] not in known] + of_metrics, key=lambda note: note["level"] != "bad")


def smooth(values: np.ndarray) -> np.ndarray:
    size = max(len(values) // 20, 1)
    return np.convolve(values, np.ones(size) / size, "same")[size : len(values) - size or None]


def correlation(x: np.ndarray, y: np.ndarray) -> float:
    n = min(len(x), len(y))
    x, y = x[:n], y[:n]
    return float(np.corrcoef(x, y)[0, 1]) if n > 2 and x.std() > 0 and y.std() > 0 else 0.0


# ---- the completions of a step --------------------------------------------------------------------------------------


def of_completions(path: Path, config: dict) -> list[dict]:
    """Notes on the first completions of a step, told by what the metrics cannot show. Raises samples.Unreadable."""
    names = ["group", "prompt", "completion", "reward", "length", "domain", "policy_version", "turns"]
    names += ["origin", "tokens/trained"]
    number = min(samples.count(path), LOOKED_AT)
    found = samples.rows(path, list(range(number)), names)
    step = samples.step_of(path)
    return [
        *_trained_outside(found, step),
        *_length_rank(found, step),
        *_versions(found, step, config),
        *_alike(found, step),
    ]


def _trained_outside(rows: list[dict], step: int) -> list[dict]:
    """Trained tokens that the model did not write: outside of its turns, or without a sampler's log-prob."""
    outside = total = touched = 0
    for row in rows:
        trained = row.get("tokens/trained")
        spans = [(turn["start"], turn["end"]) for turn in samples.turns(row)]
        if trained is None or not spans or not all(isinstance(place, int) for span in spans for place in span):
            continue
        own = np.zeros(len(trained), bool)
        for start, end in spans:
            own[start:end] = True
        wrong = int((np.asarray(trained, bool) & ~own).sum())
        outside, total, touched = outside + wrong, total + int(np.sum(trained)), touched + bool(wrong)
    if outside <= 0.002 * total:  # a template may put a token that ends a turn behind it
        return []
    text = f"{outside / total:.0%} of the trained tokens of step {step} stand outside of the model's turns, in "
    text += (
        f"{touched} of {len(rows)} trajectories: answers of tools or of the environment are learned as if the model "
    )
    text += "had said them. "
    text += "Open one in the token view, coloured by trained / masked."
    return [note("bad", "Observations are trained on", text, "observations-trained")]


def _length_rank(rows: list[dict], step: int) -> list[dict]:
    """Within groups, does the longest score highest? Spearman's correlation over all groups."""
    groups: dict = {}
    for row in rows:
        size = row.get("length") or len(str(row.get("completion") or ""))
        if isinstance(row.get("reward"), (int, float)):
            groups.setdefault(row.get("group", row.get("prompt")), []).append((size, row["reward"]))
    x, y = [], []
    for pairs in groups.values():
        sizes, rewards = np.array(pairs, float).T
        if len(pairs) > 2 and np.ptp(rewards) > 0 and np.ptp(sizes) > 0:
            x += list((rank(sizes) - rank(sizes).mean()) / len(pairs))
            y += list((rank(rewards) - rank(rewards).mean()) / len(pairs))
    together = correlation(np.array(x), np.array(y))
    if len(x) < 16 or together < 0.7:
        return []
    text = f"Within the groups of step {step} the longer completion scores higher almost always (rank correlation "
    text += f"{together:.2f}). Is length itself rewarded?"
    return [note("bad" if together > 0.85 else "watch", "Reward by length", text, "reward-by-length")]


def rank(values: np.ndarray) -> np.ndarray:
    """Ranks, of equal values their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _versions(rows: list[dict], step: int, config: dict) -> list[dict]:
    sampled_now = [row for row in rows if not row.get("origin")]  # what was remembered may be old
    versions = [row["policy_version"] for row in sampled_now if isinstance(row.get("policy_version"), int)]
    allowed = max([*(config.get(name) or 0 for name in ("push_steps", "max_staleness")), 1])
    if not versions or (age := step - 1 - min(versions)) <= allowed:
        return []
    text = f"Completions of step {step} were sampled by weights of version {min(versions)}, {age} optimizer steps old; "
    text += f"{allowed} is allowed by the settings. Do pushes arrive? If after_rollout added them, mark them as "
    text += 'remembered: info["origin"] = "replay".'
    return [note("bad", "A stale server", text, "stale-server")]


def _alike(rows: list[dict], step: int) -> list[dict]:
    """Groups whose completions are word for word the same."""
    groups: dict = {}
    for row in rows:
        groups.setdefault(row.get("group", row.get("prompt")), []).append(row.get("completion"))
    several = [texts for texts in groups.values() if len(texts) > 2]
    same = sum(len(set(texts)) == 1 for texts in several)
    if not several or same < 0.5 * len(several):
        return []
    text = f"In {same} of {len(several)} groups of step {step} all completions are word for word the same."
    return [note("watch", "No variety", text, "entropy-collapse")]
