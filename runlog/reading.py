"""What log.py has written, read back: lines of metrics.jsonl, and these as curves in panels, for report and page.

PANELS says what belongs together. A metric that no panel names is among the others.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from config import ConfigError
from inputs.parts import transcript
from safety.storable import text_of

PHASES = ("time/generate", "time/score", "time/logprobs", "time/update", "time/push")  # in the order they happen
NOT_PHASES = ("time/step", "time/unix", "time/tokens_per_second", "time/eval")
# Columns of completions/*.parquet that log.py makes itself.
KNOWN = {"prompt", "completion", "reward", "advantage", "finish_reason", "row_number", "origin", "turns", "group"}
KNOWN |= {"domain", "policy_version", "length", "prompt_ids", "token_ids", "picture"}


def is_own(name: str) -> bool:
    """Whether a column comes from the data row or from a reward function's log_extra."""
    return name not in KNOWN and not name.startswith(("rewards/", "tokens/"))


def is_phase(name: str) -> bool:
    """Of a metric: whether it is a share of a step's seconds. time/reward/NAME are calls beside sampling."""
    return name.startswith("time/") and name.count("/") == 1 and name not in NOT_PHASES


def read_metrics(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl; None stands for a number that was not finite."""
    return [line for line, _ in metrics_bytes(run_dir)]


def metrics_bytes(run_dir: Path) -> Iterator[tuple[dict, bytes]]:
    """As read_metrics, each with its bytes. A last line that is torn is left out; another one is a ConfigError."""
    path, fault = Path(run_dir) / "metrics.jsonl", None
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, data in enumerate(file, 1):
            if fault:
                raise ConfigError(fault)
            if line := parsed(data):
                yield line, data
            elif data.strip():
                what = f"{path}, line {number} is no line of metrics: {data[:80]!r}."
                fault = f"{what} Was the disk full? Remove the line."


def held_out(run_dir: Path) -> dict[str, list[str]]:
    """{metric: its value in each evaluation of the run, in order}, "-" where one has no such number."""
    evaluations = [line for line in read_metrics(run_dir) if "eval/reward" in line]
    metrics = dict.fromkeys(key for line in evaluations for key in line if key.startswith("eval/"))
    values = {key: [line.get(key) for line in evaluations] for key in metrics}
    return {key: ["-" if value is None else f"{value:.3f}" for value in found] for key, found in values.items()}


DRAWN = 1000  # lines of a run's steps that are parsed for curves


def some_lines(run_dir: Path) -> tuple[list[dict], int, int]:
    """(lines of metrics.jsonl in their order, how many steps each step's line stands for, how many cannot be read): all
    evaluations, and of more than DRAWN steps every second, third ... and the last, as parsing takes the time. A last
    line without its end is still being written."""
    path = Path(run_dir) / "metrics.jsonl"
    data = path.read_bytes() if path.is_file() else b""
    raw = data[: data.rfind(b"\n") + 1].splitlines()
    steps = [number for number, line in enumerate(raw) if b'"eval/' not in line]
    stride = -(-len(steps) // DRAWN) or 1
    chosen = {*steps[::-stride], *({*range(len(raw))} - {*steps})}
    found = [parsed(raw[number]) for number in sorted(chosen)]
    return [line for line in found if line], stride, found.count(None)


def parsed(line: bytes) -> dict | None:
    try:
        found = json.loads(line)
        return found if isinstance(found["step"], (int, float)) else None
    except (ValueError, TypeError, KeyError):  # also of broken UTF-8
        return None


def phases(metrics: dict) -> dict[str, float]:
    """Seconds by phase: the known ones in their order, then any other `time/` key, then what is left of time/step."""
    names = [*PHASES, *sorted(name for name in metrics if is_phase(name) and name not in PHASES)]
    seconds = {name.removeprefix("time/"): metrics[name] for name in names if metrics.get(name) is not None}
    if metrics.get("time/step") is not None:
        # Never negative: phases may overlap, as scoring does with generation.
        seconds["other"] = max(0.0, metrics["time/step"] - sum(seconds.values()))
    return seconds


def call_text(call: dict) -> str:
    """A call of a turn in a few words. What a run of an older version does not know of it is left out."""
    seconds = f" {call['seconds']:.2f} s" if isinstance(call.get("seconds"), float) else ""
    return f"{call['name']}{seconds}" + " failed" * bool(call.get("failed"))


def readable_prompt(text: str) -> str:
    """Chat messages, stored as JSON, as `role: text` lines; anything else as it is."""
    try:
        return transcript(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):  # a prompt that is JSON by itself, for one
        return text_of(text)


# ---- curves ---------------------------------------------------------------------------------------------------------

# (title, what to look for, metric names; a trailing * takes all that begin so)
PANELS = [
    ("Reward by function", "which part of the reward is being earned", ["rewards/*"]),
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
]
BY_DOMAIN = [  # the same of each domain, one curve a domain, where a run has several
    ("Reward by domain", "is one of them left behind?", "{}/reward"),
    ("Held-out rows by domain", "share solved", "eval/{}/mean@*"),
    ("Groups without signal by domain", "they teach nothing", "{}/frac_reward_zero_std"),
    ("Completion length by domain", "tokens", "{}/completions/mean_length"),
    ("Prompts by domain", "of a step", "{}/prompts"),
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
            for name, value in line.items():
                if name != "step" and is_number(value) and not (name == "time/unix" and is_evaluation(line)):
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

    def phases(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Steps, and the seconds of each phase in them, as reading.phases; phases below half a percent are left out."""
        others = sorted(name for name in self.columns if is_phase(name) and name not in PHASES)
        names = [name for name in (*PHASES, *others, "time/step") if name in self.columns]
        steps = np.unique(np.concatenate([self.columns[name][0] for name in names] or [[]]))
        split = {}
        for name in names:
            values = np.zeros(len(steps))  # a step without a phase: it took no time there
            values[np.searchsorted(steps, self.columns[name][0])] = self.columns[name][1]
            split[name.removeprefix("time/")] = values
        if (whole := split.pop("step", None)) is not None:  # never negative: phases may overlap
            split["other"] = np.maximum(0.0, whole - sum(split.values()))
        total = sum(float(values.sum()) for values in split.values())
        return steps, {name: values for name, values in split.items() if values.sum() > 0.005 * total}

    def axis(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and what has passed by then: "step", "tokens" (num_tokens) or "seconds" (in steps: pauses and
        evaluations do not count)."""
        if kind == "tokens":
            x, y = self.all("num_tokens")
        elif kind == "seconds":
            x, y = self.all("time/step")
            y = np.cumsum(y * np.diff(x, prepend=0.0))  # of --log_steps, and of a long run, one of several is known
        else:
            return np.array([0.0, 1e9]), np.array([0.0, 1e9])
        return np.concatenate([[0.0], x]), np.concatenate([[0.0], y])


def arrays(values: dict[float, float]) -> tuple[np.ndarray, np.ndarray]:
    steps = np.array(sorted(values), float)
    return steps, np.array([values[step] for step in steps], float)


def domains(curves: Curves, config: dict) -> list[str]:
    """Domains of a run, by its settings."""
    return [part["name"] for part in config.get("domains") or ()]


def panels(curves: Curves, config: dict, others: bool = True) -> list[tuple[str, str, dict[str, str]]]:
    """(title, what to look for, {metric: its label}) of each panel with data: PANELS, domains, and `others` that they
    leave out."""
    found: list[tuple[str, str, dict[str, str]]] = []
    used = {"reward", "reward_std", "num_tokens", "time/unix", "time/step"}
    known = domains(curves, config)

    def panel(title: str, note: str, labels: dict[str, str]) -> None:
        labels = {name: label for name, label in labels.items() if name not in used}
        used.update(labels)
        if drawn := {name: label for name, label in labels.items() if not name.endswith("/std")} or labels:
            found.append((title, note, drawn))

    for title, note, pattern in BY_DOMAIN[:2]:
        panel(title, note, {n: name for name in known for n in curves.matching([pattern.format(name)])})
    for title, note, patterns in PANELS:
        panel(title, note, {name: label_of(name) for name in curves.matching(patterns)})
    for title, note, pattern in BY_DOMAIN[2:]:
        panel(title, note, {n: name for name in known for n in curves.matching([pattern.format(name)])})
    for name in known:
        parts = curves.matching([f"{name}/rewards/*"])
        labels = {part: part.removeprefix(f"{name}/rewards/").removesuffix("/mean") for part in parts}
        panel(f"{name}: reward by function", "which part is earned", labels)
    for name in curves.columns if others else ():
        if not name.startswith("time/"):
            panel(name, "", {name: name})
    return found


def label_of(name: str) -> str:
    """A metric in the legend of its panel: "rewards/right/mean" is "right" there."""
    return name.split("/", 1)[-1].removeprefix("rewards/").removesuffix("/mean")
