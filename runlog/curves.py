"""Metrics of a run as curves: what the report and the page (look.py) draw, and in which panels.

PANELS says what belongs together. A metric that no panel names is among "Other metrics".
"""

import math
import time
from array import array
from collections.abc import Iterable
from itertools import groupby, islice

import numpy as np

from runlog.reading import PHASES, is_phase

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
POINTS = 400  # a curve of more steps is drawn as means over bins, with their extremes
BLOCK = 200  # lines that are taken together
EXACT = 64  # the first and last steps that stay single ones, whatever is thinned


def is_number(value) -> bool:
    """Whether it can be drawn: plots fail on numbers near the end of their range."""
    return isinstance(value, (int, float)) and abs(value) < 1e100  # not so of nan


def duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if seconds < 120 else f"{minutes:.1f} min" if minutes < 120 else f"{hours:.1f} h"


def is_evaluation(line: dict) -> bool:
    return any(key.startswith("eval/") for key in line)


def merged(points: np.ndarray, size: float) -> np.ndarray:
    """Points in bins of `size` steps: of each the mean step and value, the lowest and the highest, the number of steps.
    points: [5, points], rows as in `Curves.points` -> [5, bins]"""
    if size == 1 or not points.shape[1]:
        return points
    starts = np.flatnonzero(np.diff(np.floor(points[0] / size), prepend=-np.inf))
    x, y, low, high, count = points
    steps = np.add.reduceat(count, starts)
    means = [np.add.reduceat(values * count, starts) / steps for values in (x, y)]
    return np.array([*means, np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts), steps])


def size_for(steps: np.ndarray, points: int, size: float = 1.0) -> float:
    """Of bins of steps: the least power of two, from `size` on, that leaves no more points. Bins of one size lie in
    those of the next, and begin at the same steps however long the run is: what has been drawn stays as it is."""
    while len(steps) > points and np.count_nonzero(np.diff(np.floor(steps / size))) >= points:
        size *= 2
    return size


class Curves:
    """Lines of metrics.jsonl by metric, added in the order in which they were written.

    A step that occurs again, as an evaluation may, counts once, the last time. What is no number is left out.

    most: points of a metric that are kept, so that neither memory nor the time to draw grows with a run that goes on.
    Where there are more steps, neighbours among those that are neither the first nor the last EXACT become one point,
    which knows their extremes. None: all are kept.
    """

    def __init__(self, lines: Iterable[dict] = (), most: int | None = None):
        self.columns: dict[str, tuple[array, array]] = {}  # name: (steps, values), the newest
        self.thinned: dict[str, tuple[float, np.ndarray]] = {}  # name: (size of its bins, points older than those)
        self.most, self.last = most, -math.inf
        self.mark = time.time_ns()  # another one where what was read before is not what would be read now
        self.add(lines)

    def add(self, lines: Iterable[dict]) -> None:
        """More lines, written after those before. Lines with the same metrics in a row are taken by column: fast."""
        lines = iter(lines)
        while block := list(islice(lines, BLOCK)):  # of an iterator never all at once
            self._add(block)

    def _add(self, lines: list[dict]) -> None:
        for names, group in groupby(lines, key=tuple):
            rows = list(group)
            steps = array("d", [row["step"] for row in rows])
            if min(steps) < self.last:
                self.mark = time.time_ns()
            self.last = max(self.last, max(steps))
            for name, values in zip(names, zip(*(row.values() for row in rows), strict=True), strict=True):
                if name == "step" or (name == "time/unix" and is_evaluation(rows[0])):
                    continue
                x, y = self.columns.setdefault(name, (array("d"), array("d")))
                if all(map(is_number, values)):
                    x.extend(steps)
                    y.extend(values)
                else:
                    kept = [pair for pair in zip(steps, values, strict=True) if is_number(pair[1])]
                    x.extend(step for step, _ in kept)
                    y.extend(value for _, value in kept)
                if not x and name not in self.thinned:
                    del self.columns[name]
                elif self.most and len(x) > self.most // 2:
                    self._thin(name)

    def _thin(self, name: str) -> None:
        points = self.points(name)
        first, old, new = np.split(points, [EXACT, max(points.shape[1] - EXACT, EXACT)], axis=1)
        size = size_for(old[0], self.most // 2, self.thinned.get(name, (1.0,))[0])
        self.thinned[name] = size, np.hstack([first, merged(old, size)])
        self.columns[name] = array("d", new[0]), array("d", new[1])

    def copy(self) -> "Curves":
        made = Curves(most=self.most)
        made.columns = {name: (x[:], y[:]) for name, (x, y) in self.columns.items()}
        made.thinned, made.mark, made.last = dict(self.thinned), self.mark, self.last
        return made

    def points(self, name: str) -> np.ndarray:
        """Rows: step, value, lowest and highest value, number of steps; ascending by step.  [5, points]"""
        x, y = (np.array(values) for values in self.columns.get(name, ((), ())))
        points = np.array([x, y, y, y, np.ones(len(x))])
        if name in self.thinned:
            points = np.hstack([self.thinned[name][1], points])
        if not (np.diff(points[0]) > 0).all():
            _, last = np.unique(points[0][::-1], return_index=True)  # of equal steps the one written last
            points = points[:, ::-1][:, last]
        return points

    def all(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps, values), ascending by step."""
        points = self.points(name)
        return points[0], points[1]

    def total(self, name: str) -> float:
        """The sum of the values of all steps."""
        _, values, _, _, steps = self.points(name)
        return float((values * steps).sum())

    def count(self, name: str) -> int:
        """How many steps have a value."""
        return int(self.points(name)[4].sum())

    def size(self, points: int = POINTS) -> float:
        """Of bins that leave about so many points of the longest curve, and at least half of that."""
        return size_for(self.points(max(self.columns, key=self.length))[0], points) if self.columns else 1.0

    def length(self, name: str) -> int:
        """Of a metric: how many points are kept."""
        return len(self.columns[name][0]) + (self.thinned[name][1].shape[1] if name in self.thinned else 0)

    def series(self, name: str, size: float | None = None) -> tuple[list[float], list[float]]:
        """Steps and values to draw."""
        points = merged(self.points(name), size or self.size())
        return points[0].tolist(), points[1].tolist()

    def matching(self, patterns: list[str]) -> list[str]:
        """Metrics that have a number, in the order of the patterns."""
        fits = [
            name
            for pattern in patterns
            for name in self.columns
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))
        ]
        return list(dict.fromkeys(fits))

    def phases(self, size: float = 1.0) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Steps, in bins of `size`, and the mean seconds of each phase in them, as reading.phases; phases below half a
        percent are left out."""
        others = sorted(name for name in self.columns if is_phase(name) and name not in PHASES)
        names = [name for name in (*PHASES, *others, "time/step") if name in self.columns]
        read = {name: merged(self.points(name), size) for name in names}
        bins_of = {name: np.floor(points[0] / size) if size > 1 else points[0] for name, points in read.items()}
        bins = np.unique(np.concatenate([*bins_of.values(), []]))
        place = {name: np.searchsorted(bins, own) for name, own in bins_of.items()}
        steps, counts = np.zeros(len(bins)), np.zeros(len(bins))
        for name, (x, _, _, _, count) in read.items():  # steps without a phase count: it took no time in them
            steps[place[name]], counts[place[name]] = x, np.maximum(counts[place[name]], count)

        def spread_out(name: str) -> np.ndarray:
            values = np.zeros(len(bins))
            values[place[name]] = read[name][1] * read[name][4] / counts[place[name]]
            return values

        split = {name.removeprefix("time/"): spread_out(name) for name in names if name != "time/step"}
        if "time/step" in read:  # never negative: phases may overlap, as scoring does with generation
            split["other"] = np.maximum(0.0, spread_out("time/step") - sum(split.values()))
        whole = sum(float(values.sum()) for values in split.values())
        return steps, {name: values for name, values in split.items() if values.sum() > 0.005 * whole}

    def step_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps, seconds of the step): time/step, or the sum of the phases."""
        x, y = self.all("time/step")
        if len(x):
            return x, y
        steps, split = self.phases()
        return steps, sum(split.values(), np.zeros(len(steps)))

    def axis(self, kind: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and what has passed by then: "step", "tokens" (num_tokens) or "seconds" (in steps: pauses and
        evaluations do not count)."""
        if kind == "tokens":
            x, y = self.all("num_tokens")
        elif kind == "seconds":
            x, y = self.step_seconds()
            y = np.cumsum(y * np.diff(x, prepend=0.0))  # of --log_steps one is logged
        else:
            return np.array([0.0, 1e9]), np.array([0.0, 1e9])
        return np.concatenate([[0.0], x]), np.concatenate([[0.0], y])


def domains(curves: Curves, config: dict) -> list[str]:
    """Domains of a run: those of its settings, or those that have a reward of their own."""
    listed = config.get("domains")
    named = [part.get("name") if isinstance(part, dict) else part for part in listed or () if listed]
    if named := [name for name in named if isinstance(name, str)]:
        return named
    found = [name.removesuffix("/reward") for name in curves.columns if name.endswith("/reward")]
    return [name for name in found if name != "eval" and not name.startswith(("rewards/", "eval/", "time/"))]


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
