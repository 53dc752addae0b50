"""Reads what runlog/log.py wrote: lines of metrics.jsonl, and curves in panels.

PANELS groups metrics. A metric that is in none of them has a panel of its own.
"""

import fnmatch
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from inputs.parts import transcript
from runfiles.storable import text_of

PHASES = ("time/generate", "time/score", "time/logprobs", "time/update", "time/push")  # in the order they happen
NOT_PHASES = ("time/step", "time/unix", "time/tokens_per_second", "time/eval")
# Columns of completions/*.parquet that runlog/log.py adds.
KNOWN = {"prompt", "completion", "reward", "advantage", "finish_reason", "row_number", "origin", "turns", "group"}
KNOWN |= {"domain", "policy_version", "length", "prompt_ids", "token_ids", "picture"}


def is_own(name: str) -> bool:
    """Whether a column is the user's: from the data row, or a reward function's log_extra."""
    return name not in KNOWN and not name.startswith(("rewards/", "tokens/"))


def read_metrics(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl; None stands for a number that was not finite. Incomplete lines are left out."""
    path = Path(run_dir) / "metrics.jsonl"
    raw = path.read_bytes().splitlines() if path.exists() else []
    return [fields for line in raw if (fields := metrics_line(line))]


def held_out(run_dir: Path) -> dict[str, list[str]]:
    """{metric: its value in each evaluation, in order}, "-" where an evaluation does not have it."""
    evaluations = [line for line in read_metrics(run_dir) if "eval/reward" in line]
    metrics = dict.fromkeys(key for line in evaluations for key in line if key.startswith("eval/"))
    values = {key: [line.get(key) for line in evaluations] for key in metrics}
    return {key: ["-" if value is None else f"{value:.3f}" for value in column] for key, column in values.items()}


MAX_LINES = 1000  # most lines of steps that are parsed for curves


def some_lines(run_dir: Path) -> tuple[list[dict], int]:
    """(lines of metrics.jsonl in order, how many steps each step's line stands for): all evaluations; and of more than
    MAX_LINES steps, since parsing is slow, every second, third ..., with the last. Broken lines are left out, as is a
    last line without its end, which is still being written."""
    path = Path(run_dir) / "metrics.jsonl"
    data = path.read_bytes() if path.is_file() else b""
    raw = data[: data.rfind(b"\n") + 1].splitlines()
    steps = [number for number, line in enumerate(raw) if b'"eval/' not in line]
    stride = -(-len(steps) // MAX_LINES) or 1
    chosen = {*steps[::-stride], *({*range(len(raw))} - {*steps})}
    return [line for number in sorted(chosen) if (line := metrics_line(raw[number]))], stride


def metrics_line(line: bytes) -> dict | None:
    try:
        fields = json.loads(line)
        return fields if isinstance(fields["step"], (int, float)) else None
    except (ValueError, TypeError, KeyError):  # ValueError: also broken UTF-8
        return None


def phases(metrics: dict) -> dict[str, float]:
    """Seconds by phase: PHASES in their order, then other `time/` keys, then the rest of time/step."""
    others = (name for name in metrics if name.startswith("time/") and name.count("/") == 1)  # a reward's calls have 2
    names = dict.fromkeys([*PHASES, *sorted(others)])
    seconds = {n.removeprefix("time/"): metrics[n] for n in names if n not in NOT_PHASES and metrics.get(n) is not None}
    if metrics.get("time/step") is not None:
        # Never negative: phases may overlap, as scoring does with generation.
        seconds["other"] = max(0.0, metrics["time/step"] - sum(seconds.values()))
    return seconds


def readable_prompt(text: str) -> str:
    """Chat messages, stored as JSON, as `role: text` lines; any other text unchanged."""
    try:
        return transcript(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):  # such as a prompt that happens to be JSON
        return text_of(text)


# ---- curves ---------------------------------------------------------------------------------------------------------

# (title, what to look for, metric names: {} stands for each domain, a trailing * for any ending)
PANELS = [
    ("Reward by domain", "is one of them left behind?", ["{}/reward"]),
    ("Held-out rows by domain", "share solved", ["eval/{}/mean@*"]),
    ("Reward by function", "which part of the reward is being earned", ["rewards/*"]),
    ("Spread of rewards", "standard deviation within groups", ["reward_std"]),
    ("Held-out rows", "never trained on", ["eval/mean@*", "eval/pass@*"]),
    ("Held-out rows by function", "parts of the score", ["eval/rewards/*"]),
    ("Groups without signal", "all completions scored alike: they teach nothing", ["frac_reward_zero_std"]),
    ("Completion length", "tokens", ["completions/mean_length", "completions/max_length"]),
    ("Cut off", "share of completions that hit the length limit", ["completions/clipped_ratio"]),
    ("Turns", "a trajectory, on average", ["turns/mean", "tools/call_frequency"]),
    ("Failed calls", "share of the calls of tools", ["tools/failure_frequency"]),
    ("Entropy", "towards 0 the policy has stopped exploring", ["entropy"]),
    ("Clipped tokens", "share of tokens the policy loss clips", ["clip_ratio/*"]),
    ("KL", "distance from the reference model", ["kl", "kl/*"]),
    ("Distance from the teacher", "nats a token", ["distill/reverse_kl", "distill/divergence"]),
    ("Gradient norm", "before clipping", ["grad_norm"]),
    ("Trainer against generator", "small and flat", ["sampling/logprob_diff_mean", "sampling/kl"]),
    ("Age of the weights that sample", "optimizer steps behind", ["policy_lag", "staleness/max", "staleness/mean"]),
    ("Importance weights", "trainer / generator; near 1 is good", ["sampling/ratio_mean", "sampling/ess"]),
    ("Loss", "no measure of progress: watch the reward", ["loss"]),
    ("Learning rate", "", ["lr"]),
    ("Held-out reward", "mean score", ["eval/reward"]),
    ("Held-out length", "tokens", ["eval/mean_length"]),
    ("Groups without signal by domain", "they teach nothing", ["{}/frac_reward_zero_std"]),
    ("Completion length by domain", "tokens", ["{}/completions/mean_length"]),
    ("Prompts by domain", "of a step", ["{}/prompts"]),
    ("Reward by function and domain", "which part is earned", ["{}/rewards/*"]),
]
SOLVED = ["eval/mean@*"]  # share of held-out completions solved: the headline


def is_number(value) -> bool:
    """Whether it can be drawn: plots fail on numbers near the end of their range."""
    return isinstance(value, (int, float)) and abs(value) < 1e100  # False for nan


def is_evaluation(line: dict) -> bool:
    return any(key.startswith("eval/") for key in line)


class Curves:
    """Lines of metrics.jsonl by metric. If a step occurs again, its last line counts; values that are no numbers are
    left out."""

    def __init__(self, lines: Iterable[dict] = ()):
        by_metric: dict[str, dict[float, float]] = defaultdict(dict)
        for line in lines:
            times = {} if is_evaluation(line) else {f"seconds/{name}": value for name, value in phases(line).items()}
            for name, value in (line | times).items():
                if name != "step" and is_number(value) and not (name == "time/unix" and not times):
                    by_metric[name][line["step"]] = value
        self.columns = {name: arrays(values) for name, values in by_metric.items()}

    def all(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values), ascending by step."""
        return self.columns.get(name, (np.array([]), np.array([])))

    def names_like(self, patterns: list[str]) -> list[str]:
        """Metrics with data that match, in the order of the patterns."""
        return list(dict.fromkeys(name for pattern in patterns for name in fnmatch.filter(self.columns, pattern)))

    def axis(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, x at these steps). kind of x: "step", "tokens" (num_tokens) or "seconds" (of steps alone, without
        pauses and evaluations)."""
        x, y = self.all("num_tokens" if kind == "tokens" else "time/step")
        if kind == "step" or not len(x):
            return np.array([0.0, 1e9]), np.array([0.0, 1e9])
        if kind == "seconds":
            y = np.cumsum(y * np.diff(x, prepend=0.0))  # a line may stand for several steps
        return np.concatenate([[0.0], x]), np.concatenate([[0.0], y])


def arrays(values: dict[float, float]) -> tuple[np.ndarray, np.ndarray]:
    steps = np.array(sorted(values), float)
    return steps, np.array([values[step] for step in steps], float)


def domains(config: dict) -> list[str]:
    """Names of a run's domains."""
    return [part["name"] for part in config.get("domains") or ()]


def panels(curves: Curves, config: dict) -> list[tuple[str, str, list[str]]]:
    """(title, what to look for, metrics) of each panel with data: PANELS, then a panel for each remaining metric."""
    result: list[tuple[str, str, list[str]]] = []
    used = {"reward", "num_tokens"}
    for title, note, patterns in PANELS:
        metric_patterns = [p.format(name) for p in patterns for name in (domains(config) if "{}" in p else [""])]
        names = [name for name in curves.names_like(metric_patterns) if name not in used and not name.endswith("/std")]
        used.update(names)
        result += [(title, note, names)] if names else []
    others = [name for name in curves.columns if name not in used and not name.startswith(("time/", "seconds/"))]
    return result + [(name, "", [name]) for name in others]
