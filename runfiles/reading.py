"""What runlog/log.py has written, read back: lines of metrics.jsonl, and these as curves in panels.

PANELS says what belongs together. A metric that no panel names has one of its own.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from config import ConfigError
from inputs.parts import transcript
from runfiles.storable import text_of

PHASES = ("time/generate", "time/score", "time/logprobs", "time/update", "time/push")  # in the order they happen
NOT_PHASES = ("time/step", "time/unix", "time/tokens_per_second", "time/eval")
# Columns of completions/*.parquet that runlog/log.py makes itself.
KNOWN = {"prompt", "completion", "reward", "advantage", "finish_reason", "row_number", "origin", "turns", "group"}
KNOWN |= {"domain", "policy_version", "length", "prompt_ids", "token_ids", "picture"}


def is_own(name: str) -> bool:
    """Whether a column comes from the data row or from a reward function's log_extra."""
    return name not in KNOWN and not name.startswith(("rewards/", "tokens/"))


def read_metrics(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl; None stands for a number that was not finite. A last line that is torn is left out;
    another one is a ConfigError."""
    path = Path(run_dir) / "metrics.jsonl"
    raw = path.read_bytes().splitlines() if path.exists() else []
    found = [parsed(line) for line in raw]
    for number, line in enumerate(found[:-1], 1):
        if line is None:
            what = f"{path}, line {number} is no line of metrics: {raw[number - 1][:80]!r}."
            raise ConfigError(f"{what} Was the disk full? Remove the line.")
    return [line for line in found if line]


def held_out(run_dir: Path) -> dict[str, list[str]]:
    """{metric: its value in each evaluation of the run, in order}, "-" where one has no such number."""
    evaluations = [line for line in read_metrics(run_dir) if "eval/reward" in line]
    metrics = dict.fromkeys(key for line in evaluations for key in line if key.startswith("eval/"))
    values = {key: [line.get(key) for line in evaluations] for key in metrics}
    return {key: ["-" if value is None else f"{value:.3f}" for value in found] for key, found in values.items()}


DRAWN = 1000  # lines of a run's steps that are parsed for curves


def some_lines(run_dir: Path) -> tuple[list[dict], int]:
    """(lines of metrics.jsonl in their order, how many steps each step's line stands for): all evaluations, and of more
    than DRAWN steps every second, third ... and the last, as parsing takes the time. Torn lines are left out; a last
    line without its end is still being written."""
    path = Path(run_dir) / "metrics.jsonl"
    data = path.read_bytes() if path.is_file() else b""
    raw = data[: data.rfind(b"\n") + 1].splitlines()
    steps = [number for number, line in enumerate(raw) if b'"eval/' not in line]
    stride = -(-len(steps) // DRAWN) or 1
    chosen = {*steps[::-stride], *({*range(len(raw))} - {*steps})}
    return [line for number in sorted(chosen) if (line := parsed(raw[number]))], stride


def parsed(line: bytes) -> dict | None:
    try:
        found = json.loads(line)
        return found if isinstance(found["step"], (int, float)) else None
    except (ValueError, TypeError, KeyError):  # also of broken UTF-8
        return None


def phases(metrics: dict) -> dict[str, float]:
    """Seconds by phase: the known ones in their order, then any other `time/` key, then what is left of time/step."""
    others = (name for name in metrics if name.startswith("time/") and name.count("/") == 1)  # a reward's calls have 2
    names = dict.fromkeys([*PHASES, *sorted(others)])
    seconds = {n.removeprefix("time/"): metrics[n] for n in names if n not in NOT_PHASES and metrics.get(n) is not None}
    if metrics.get("time/step") is not None:
        # Never negative: phases may overlap, as scoring does with generation.
        seconds["other"] = max(0.0, metrics["time/step"] - sum(seconds.values()))
    return seconds


def readable_prompt(text: str) -> str:
    """Chat messages, stored as JSON, as `role: text` lines; anything else as it is."""
    try:
        return transcript(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):  # a prompt that is JSON by itself, for one
        return text_of(text)


# ---- curves ---------------------------------------------------------------------------------------------------------

# (title, what to look for, metric names: {} stands for each domain, and a trailing * takes all that begin so)
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
    return isinstance(value, (int, float)) and abs(value) < 1e100  # not so of nan


def is_evaluation(line: dict) -> bool:
    return any(key.startswith("eval/") for key in line)


class Curves:
    """Lines of metrics.jsonl by metric. A step that occurs again counts once, the last time; what is no number is left
    out."""

    def __init__(self, lines: Iterable[dict] = ()):
        found: dict[str, dict[float, float]] = defaultdict(dict)
        for line in lines:
            own = {} if is_evaluation(line) else {f"seconds/{name}": value for name, value in phases(line).items()}
            for name, value in (line | own).items():
                if name != "step" and is_number(value) and not (name == "time/unix" and not own):
                    found[name][line["step"]] = value
        self.columns = {name: arrays(values) for name, values in found.items()}

    def all(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values), ascending by step."""
        return self.columns.get(name, (np.array([]), np.array([])))

    def matching(self, patterns: list[str]) -> list[str]:
        """Metrics that have a number, in the order of the patterns."""
        fits = [
            name
            for pattern in patterns
            for name in self.columns
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))
        ]
        return list(dict.fromkeys(fits))

    def axis(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and what has passed by then: "step", "tokens" (num_tokens) or "seconds" (in steps: pauses and
        evaluations do not count)."""
        x, y = self.all("num_tokens" if kind == "tokens" else "time/step")
        if kind == "step" or not len(x):
            return np.array([0.0, 1e9]), np.array([0.0, 1e9])
        if kind == "seconds":
            y = np.cumsum(y * np.diff(x, prepend=0.0))  # of --log_steps, and of a long run, one of several is known
        return np.concatenate([[0.0], x]), np.concatenate([[0.0], y])


def arrays(values: dict[float, float]) -> tuple[np.ndarray, np.ndarray]:
    steps = np.array(sorted(values), float)
    return steps, np.array([values[step] for step in steps], float)


def domains(config: dict) -> list[str]:
    """Domains of a run, by its settings."""
    return [part["name"] for part in config.get("domains") or ()]


def panels(curves: Curves, config: dict) -> list[tuple[str, str, list[str]]]:
    """(title, what to look for, metrics) of each panel with data: PANELS, and each metric that they leave out."""
    found: list[tuple[str, str, list[str]]] = []
    used = {"reward", "num_tokens"}
    for title, note, patterns in PANELS:
        known = [p.format(name) for p in patterns for name in (domains(config) if "{}" in p else [""])]
        names = [name for name in curves.matching(known) if name not in used and not name.endswith("/std")]
        used.update(names)
        found += [(title, note, names)] if names else []
    others = [name for name in curves.columns if name not in used and not name.startswith(("time/", "seconds/"))]
    return found + [(name, "", [name]) for name in others]
