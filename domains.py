"""Several domains in one run, each with data, rewards, tools and limits of its own, their prompts drawn by weight.

    domains:                          # in a --config file; what stands beside it holds for all of them
      - name: math
        weight: 2                     # of three prompts two
        dataset_id: math.jsonl
        reward_funcs: math
      - name: search
        dataset_id: questions.jsonl
        mcp_config: search.json
        reward_funcs: squad_em

A domain is the run's config with some settings of its own, those of BY_DOMAIN. `cfg.of(row)` is the config of a row's
domain: rollouts, rewards, tools and filters get that one. A run without the list is one domain without a name.

`weight` is a number, a schedule, or `success`:

    weight: 2                         # relative to the other weights
    weight: [[0, 1.0], [100, 0.2]]    # by step, straight lines between these points
    weight: success                   # 4 p (1 - p), p the share solved lately, and at least FLOOR

docs/data-and-rewards.md has a whole file. Nothing here imports torch: config.py reads it first.
"""

import contextlib
import dataclasses
import functools
import math
import re
import sys
import threading
import typing
from collections import Counter
from fractions import Fraction

from cli import ConfigError, convert, known_name, shorten

# What may differ by domain. A knob of your own may, too: domains.BY_DOMAIN.add("my_knob")
BY_DOMAIN = {
    *"dataset_id dataset_config dataset_split eval_dataset_id eval_split eval_solved".split(),
    *"system_prompt no_apply_chat_template allow_special_tokens max_prompt_length max_pixels min_pixels".split(),
    *"rollout max_completion_length min_completion_length".split(),
    *"env tools mcp_config tool_parser max_turns max_turn_length max_tool_result max_calls_per_turn".split(),
    *"tool_timeout tool_concurrency tool_cache env_errors tokenization_check".split(),
    *"reward_funcs reward_weights reward_model judge_url judge_model judge_max_tokens judge_template".split(),
    *"teacher_urls teacher_model teacher_prompt teacher_timeout".split(),
    *"reward_timeout reward_on_timeout group_std_min group_mean_min group_mean_max".split(),
}
OWN_KEYS = ("name", "weight")
# First words of metrics: math/reward must not be taken for one of these.
TAKEN = (
    "advantages async clip_ratio completions dynamic_sampling eval images kl kl_cov lr ranks rewards rollout".split()
)
TAKEN += "distill sampling staleness time tools turns value".split()
LARGEST = ("max_prompt_length", "max_completion_length")  # of the whole run: that of the domain with the most

FLOOR = 0.1  # least weight by success: what is always or never solved is tried again now and then
WINDOW = 20  # steps that a success rate looks back
TRIED = 200  # steps drawn to see how many prompts of a domain one of them has at most


# ---- settings -------------------------------------------------------------------------------------------------------


def read(cfg) -> list:
    """The config of each domain, from a config whose unset settings are not filled in yet. ConfigError for an entry
    that cannot be one."""
    hints, names = hints_of(type(cfg)), []
    plain = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    configs, weights = [], []
    for number, entry in enumerate(cfg.domains):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ConfigError(
                f"domains, entry {number}: {shorten(entry)} is not `name: ...`, a text, and its settings; write a name "
                "that YAML takes for a number, true or false in quotes."
            )
        name = entry["name"]
        if not re.fullmatch(r"[\w.-]{1,50}", name) or name in TAKEN:
            why = "other metrics begin with it" if name in TAKEN else "give letters, digits, - . _"
            raise ConfigError(f"domains, name {name!r}: {why}; its metrics will be called NAME/reward.")
        if name in names:
            raise ConfigError(f"domains: two are named {name!r}; rename one.")
        names.append(name)
        for key in entry:
            if key not in BY_DOMAIN and key in plain:
                allowed = ", ".join([*OWN_KEYS, *sorted(BY_DOMAIN)])
                raise ConfigError(
                    f"domain {name!r}: {key} is one for the whole run; let it stand beside `domains`, not in it. A "
                    f"domain may have: {allowed}."
                )
            known_name(f"domain {name!r}", key, {*OWN_KEYS, *BY_DOMAIN})
        try:
            weights.append(read_weight(entry.get("weight", 1)))
            own = {key: convert(key, hints[key], value) for key, value in entry.items() if key not in OWN_KEYS}
            configs.append(type(cfg)(**plain | own | {"domains": []}))
            if "eval_dataset_id" in own and configs[-1].eval_split is None:
                raise ConfigError(
                    "its eval_dataset_id is never read with eval_split none, which stands beside `domains` or in it; "
                    "give it `eval_split: test`, or leave eval_dataset_id out."
                )
        except ConfigError as error:
            raise ConfigError(f"domain {name!r}: {error}") from None
    for step in {int(point[0]) for weight in weights if isinstance(weight, list) for point in weight}:
        if not any(weight == "success" or weight_at(weight, step) > 0 for weight in weights):
            raise ConfigError(f"domains: at step {step} all weights are 0; give one of them more.")
    cfg.domains = [entry | {"weight": weight} for entry, weight in zip(cfg.domains, weights, strict=True)]
    return configs


def settle(cfg, configs: list) -> None:
    """Write into cfg.domains what `read` found: where each differs. Read again, that gives the same."""
    for name in LARGEST if configs else ():
        setattr(cfg, name, max(getattr(own, name) for own in configs))
    cfg.domains = [
        {"name": entry["name"], "weight": entry["weight"]}
        | {key: getattr(own, key) for key in sorted(BY_DOMAIN) if getattr(own, key) != getattr(cfg, key)}
        for entry, own in zip(cfg.domains, configs, strict=True)
    ]


@contextlib.contextmanager
def named(cfg):
    """A ConfigError under it says which domain it is about."""
    try:
        yield
    except ConfigError as error:
        if not cfg.domain:
            raise
        raise ConfigError(f"domain {cfg.domain!r}: {error}") from error.__cause__


@functools.cache
def hints_of(cls: type) -> dict:
    return typing.get_type_hints(cls)


def read_weight(weight):
    """The weight, its numbers as such: YAML takes 1e-1 for a text. ConfigError for what is no weight."""
    rule = "give a number above 0, points such as [[0, 1.0], [100, 0.2]] (step and weight), or success"
    if isinstance(weight, list):
        weight = [[as_number(value) for value in point] if isinstance(point, list) else point for point in weight]
    weight = as_number(weight)
    if weight == "success" or (is_number(weight) and weight > 0):
        return weight
    pairs = isinstance(weight, list) and weight and all(isinstance(p, list) and len(p) == 2 for p in weight)
    if not pairs or not all(is_number(value) and value >= 0 for point in weight for value in point):
        raise ConfigError(f"weight {weight!r}: {rule}.")
    steps = [point[0] for point in weight]
    if any(int(step) != step for step in steps) or steps != sorted(set(steps)):
        raise ConfigError(f"weight {weight!r}: the steps must be whole numbers that rise; {rule}.")
    if not any(value for _, value in weight):
        raise ConfigError(f"weight {weight!r}: it is 0 at every step; leave the domain out, or {rule}.")
    return weight


def as_number(value):
    """The number that a text says; anything else as it is."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def weight_at(weight, step: int):
    """A number or schedule at a step."""
    if not isinstance(weight, list):
        return weight
    for (begin, low), (end, high) in zip(weight, weight[1:], strict=False):
        if begin <= step < end:
            return low + (high - low) * (step - begin) / (end - begin)
    return weight[0][1] if step < weight[0][0] else weight[-1][1]


# ---- rows -----------------------------------------------------------------------------------------------------------


def rows_of(rows: list[dict], cfg, source: str, sharing: list[str]) -> list[dict]:
    """The rows of a data set that are this config's domain's, with its name in their column `domain`: those that name
    it there, or all rows of a data set without that column. Without domains, all as they are.

    sharing: the domains that take their rows from this data set.
    """
    if not cfg.domain:
        return rows
    if not any("domain" in row for row in rows):
        return [row | {"domain": cfg.domain} for row in rows]
    for number, row in enumerate(rows):
        try:
            known_name(f"{source}, row {number}, column `domain`", row.get("domain"), sharing)
        except ConfigError as error:
            raise ConfigError(
                f"{error} The column says which domain of --config a row belongs to; rename it in format_row (train "
                "script) if it means something else."
            ) from None
    found = [row for row in rows if row["domain"] == cfg.domain]
    if not found:
        raise ConfigError(f"{source}: no row names {cfg.domain!r} in its column `domain`; leave that domain out.")
    return found


def check_enough(cfg, rows: list[dict]) -> None:
    """ConfigError for a domain with fewer rows than it gives to one step: the prompts of a step are distinct."""
    mixture, counts = Mixture.of(cfg), sizes(rows, cfg)
    schedules = [weight for weight in mixture.weights if isinstance(weight, list)]
    last = cfg.max_steps - 1 if cfg.max_steps else math.inf
    steps = {0, *(min(int(point[0]), last) for weight in schedules for point in weight)}
    for number, (name, count) in enumerate(counts.items()):
        # By success, this domain may count fully while the others are at their least.
        entries = [FLOOR if w == "success" and n != number else w for n, w in enumerate(mixture.weights)]
        extreme = Mixture(dict(zip(mixture.names, entries, strict=True)), cfg.prompts_per_step)
        most = max(Fraction(extreme.shares(step)[number], extreme.unit) for step in steps) * cfg.prompts_per_step
        if extreme.constant and most.denominator > 1 and count < most + 1:  # what a step before owes may come on top
            most = max(extreme.turns(step).count(number) for step in range(min(last + 1, TRIED)))
        if name and count < most:
            raise ConfigError(
                f"domain {name!r} has {count} rows and gives up to {math.ceil(most)} of the {cfg.prompts_per_step} "
                "prompts of a step, which are distinct; lower its weight or --prompts_per_step, or give it more rows."
            )


def sizes(rows: list[dict], cfg) -> dict[str, int]:
    """Rows of each domain; without domains, {"": all}."""
    counts = Counter(row["domain"] for row in (rows if cfg.domains else ()))
    return {entry["name"]: counts[entry["name"]] for entry in cfg.domains} or {"": len(rows)}


# ---- whose prompt is next -------------------------------------------------------------------------------------------


class Mixture:
    """Deals a step's prompts out to the domains like cards, so that shares are exact over time.

    With weights 2 : 1 the order is a a b a a b ...: at any moment each domain is less than one prompt away from its
    exact share. Each prompt goes to the domain that would be the first to fall behind by a whole one, among those that
    have something due (earliest deadline first). A rank takes a part of the order, so it is mixed as the step is.

    All ranks draw the same. A weight by success knows the steps before, less the `lag` that train_async.py begins a
    step ahead. What has to be known to go on is in `ended`'s result, which checkpoints keep.
    """

    def __init__(self, weights: dict, per_step: int, lag: int = 0):
        self.names, self.weights, self.per_step, self.lag = list(weights), list(weights.values()), per_step, lag
        self.constant = all(map(is_number, self.weights))
        self.unit = 2**40  # shares are whole numbers of 1 / unit
        if self.constant:  # then they are exact
            total = sum(Fraction(str(weight)) for weight in self.weights)
            self.unit = math.lcm(*((Fraction(str(weight)) / total).denominator for weight in self.weights))
        self.outcomes: dict[int, list] = {}  # by step, of each domain: (prompts' worth of completions solved, prompts)
        self.start = 0
        self._states = {0: ([0] * len(self.names), [0] * len(self.names))}  # by step: what is due, and drawn, before
        self._turns: dict[int, list[int]] = {}
        self._lock = threading.RLock()  # train_async.py draws in the background

    @classmethod
    def of(cls, cfg) -> "Mixture":
        weights = {entry["name"]: entry["weight"] for entry in cfg.domains} or {"": 1}
        return cls(weights, cfg.prompts_per_step, getattr(cfg, "max_staleness", 0))

    def weights_at(self, step: int) -> list[float]:
        found = []
        for number, weight in enumerate(self.weights):
            if weight == "success":
                last = step - self.lag
                seen = [self.outcomes[s][number] for s in range(last - WINDOW, last) if s in self.outcomes]
                solved, tried = (sum(column) for column in zip(*seen, strict=True)) if seen else (0, 0)
                p = solved / tried if tried else 0.5
                weight = max(4 * p * (1 - p), FLOOR)
            found.append(weight_at(weight, step))
        return found

    def shares(self, step: int) -> list[int]:
        """Of each domain at a step, in units."""
        weights = [Fraction(str(weight)) for weight in self.weights_at(step)]
        shares = [int(weight / sum(weights) * self.unit) for weight in weights]
        shares[shares.index(max(shares))] += self.unit - sum(shares)  # what rounding left
        return shares

    def turns(self, step: int) -> list[int]:
        """For each prompt of the step the number of its domain."""
        with self._lock:
            if step not in self._turns:
                self._draw(step)
            return self._turns[step]

    def drawn(self, step: int) -> list[int]:
        """Prompts of each domain before the step."""
        return self._before(step)[1]

    def _before(self, step: int) -> tuple[list[int], list[int]]:
        if step < self.start:
            raise ValueError(f"step {step} was drawn before this run began at step {self.start}")
        with self._lock:
            first = step
            while first not in self._states:
                # Where all that is due is whole, all of it has been drawn: no step before has to be looked at.
                due, _ = self._states[self.start]
                due = [d + (first - self.start) * self.per_step * s for d, s in zip(due, self.shares(0), strict=True)]
                if self.constant and not any(d % self.unit for d in due):
                    self._states[first] = due, [d // self.unit for d in due]
                else:
                    first -= 1
            for s in range(first, step):
                self._draw(s)
            return self._states[step]

    def _draw(self, step: int) -> None:
        due, drawn = map(list, self._before(step))
        shares, turns = self.shares(step), []

        def deadline(number: int) -> float | int:
            """Prompts until the domain is a whole one behind."""
            missing = self.unit * (drawn[number] + 1) - due[number]
            return -(-missing // shares[number]) if shares[number] else math.inf

        for _ in range(self.per_step):
            begun = [n for n in range(len(due)) if due[n] + shares[n] > drawn[n] * self.unit]
            turns.append(min(begun or range(len(due)), key=deadline))
            drawn[turns[-1]] += 1
            due = [d + share for d, share in zip(due, shares, strict=True)]
        self._turns[step], self._states[step + 1] = turns, (due, drawn)
        recent = (self.start, *range(step - 4 - self.lag, step + 5 + self.lag))
        self._states = {s: state for s, state in self._states.items() if s in recent}
        self._turns = {s: turn for s, turn in self._turns.items() if s in recent}

    def ended(self, step: int, metrics: dict) -> dict:
        """Take note of how a step went. Returns what a run that goes on after it has to know, for `restore`, {} without
        domains.

        metrics: `NAME/prompts` and `NAME/solved`, the share of completions, of the domains that had prompts. With
        --dynamic_sampling `dynamic_sampling/NAME/prompts` and `/solved`, prompts' worth of completions, count instead:
        what is always solved, or never, is not among the prompts that a step keeps."""
        if self.names == [""]:
            return {}
        with self._lock:
            self.outcomes[step] = []
            for name in self.names:
                count, kept = metrics.get(f"dynamic_sampling/{name}/prompts"), metrics.get(f"{name}/prompts", 0)
                solved = metrics.get(f"dynamic_sampling/{name}/solved", metrics.get(f"{name}/solved", 0) * kept)
                self.outcomes[step].append((solved, kept if count is None else count))
            self.outcomes = {s: seen for s, seen in self.outcomes.items() if s > step - WINDOW - self.lag}
            state = dict(zip(self.names, zip(*self._before(step + 1), strict=True), strict=True))
            outcomes = {str(s): dict(zip(self.names, seen, strict=True)) for s, seen in self.outcomes.items()}
            return {"domains": {"step": step + 1, "unit": self.unit, "drawn": state, "outcomes": outcomes}}

    def restore(self, saved: dict | None, step: int = 0) -> None:
        """Go on where `ended` was; domains that are new begin with nothing due, and of a run that had none all are.
        step: where the run goes on if nothing was saved."""
        if self.names == [""]:
            return
        nothing, saved = (0, 0), saved or {"step": step, "unit": 1, "drawn": {}, "outcomes": {}}
        due, drawn = zip(*(saved["drawn"].get(name, nothing) for name in self.names), strict=True)
        due = [d * self.unit // saved["unit"] for d in due]
        self.start, self._turns = saved["step"], {}
        self._states = {self.start: (due, list(drawn))}
        self.outcomes = {int(s): [seen.get(n, nothing) for n in self.names] for s, seen in saved["outcomes"].items()}
