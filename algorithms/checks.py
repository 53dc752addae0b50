"""What users' functions say about themselves, and what they returned, looked at before it is trained on."""

import contextlib
import dis
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import fields

import torch
from torch import Tensor

import cli
import utils
from config import ConfigError, TrainConfig, known_name
from inputs.trajectory import same_row, stands_in
from plugins import function_path
from safety.calls import say_once, warn_once

TAKEN = {"loss", "tokens", "entropy", "lr", "grad_norm", "kl", "not_finite"}  # names of what an update logs itself
# Of Batch, if a function asks.
FIELDS = ("old_logprobs", "ref_logprobs", "entropy", "sum_pi_squared", "baselines", "teacher_logprobs", "teacher_top")
FIELDS += ("current_logprobs",)

LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "transformers"}  # they read no knob of ours


def names_in(function: Callable) -> set[str]:
    """Attributes and globals that a function's own code reads; empty where that cannot be seen."""
    return set(getattr(getattr(function, "__code__", None), "co_names", ()))


def uses_argument(function: Callable, name: str, place: int) -> bool:
    """Whether the argument at `place`, whatever the function calls it, is read in its code. True where that cannot be
    seen: of a partial, of a function with *args, of one that reads `name` elsewhere."""
    code = getattr(function, "__code__", None)
    if code is None or place >= code.co_argcount or name in code.co_names:
        return True
    argument = code.co_varnames[place]
    loads = [i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD")]
    return any(argument == value or (isinstance(value, tuple) and argument in value) for value in loads)


def names_within(code) -> set[str]:
    """As `names_in`, with the functions within; text too, where getattr is called, which may name a field by it."""
    codes = [code]
    for code in codes:  # grows
        codes += [inner for inner in code.co_consts if inspect.iscode(inner)]
    names = {name for code in codes for name in code.co_names}
    texts = {text for code in codes for text in code.co_consts if isinstance(text, str)}
    return names | texts if "getattr" in names else names


def is_foreign(one) -> bool:
    return str(getattr(one, "__module__", None) or getattr(one, "__name__", None)).partition(".")[0] in LIBRARIES


def read_by(function: Callable, seen: set | None = None) -> set[str] | None:
    """Attributes and globals that a function reads, and those of the functions that it calls by name, also as a
    module's. None where that cannot all be seen: of partials, of objects that are called, of closures."""
    seen, function = set() if seen is None else seen, inspect.unwrap(function)
    if not inspect.isfunction(function) or function.__closure__:
        return None
    if function in seen:
        return set()
    seen.add(function)
    names, known = names_within(function.__code__), function.__globals__
    reached = [*vars(function).values(), *(function.__defaults__ or ()), *(known[n] for n in names & known.keys())]
    for module in [one for one in reached if inspect.ismodule(one) and not is_foreign(one)]:
        reached += [vars(module)[name] for name in names & vars(module).keys()]
    written_in_python = (type, functools.partial, types.FunctionType, types.MethodType)
    called = [one for one in reached if isinstance(one, written_in_python) or hasattr(type(one).__call__, "__code__")]
    parts = [read_by(one, seen) for one in called if not isinstance(one, type) and not is_foreign(one)]
    return None if None in parts else names.union(*parts)


# Settings, whether anything reads them, and with what something would. Functions of one's own may read any.
UNREAD = (
    ("lora_r lora_alpha lora_targets", lambda c: c.use_peft, "with --use_peft"),
    ("reward_model", lambda c: scores_by(c, "reward_model"), "by --reward_funcs reward_model"),
    ("judge_url judge_model judge_template", lambda c: scores_by(c, "judge"), "by --reward_funcs judge"),
    ("eval_generations eval_temperature", lambda c: c.eval_steps or c.eval_only, "with --eval_steps or --eval_only"),
    ("max_turns max_turn_length", lambda c: c.rollout != "single_turn", "with --tools, --mcp_config or --env"),
    ("hub_repo_id", lambda c: c.push_to_hub, "with --push_to_hub"),
    ("resample_rounds", lambda c: c.dynamic_sampling, "with --dynamic_sampling"),
    ("kl_horizon", lambda c: c.kl_target is not None, "with --kl_target"),
    ("ref_sync_alpha", lambda c: c.ref_sync_steps, "with --ref_sync_steps"),
    ("entropy_coef_step", lambda c: c.entropy_target is not None, "with --entropy_target"),
    ("max_turn_length", lambda c: c.max_turn_length <= c.max_completion_length, "below --max_completion_length"),
)


def scores_by(cfg: TrainConfig, name: str) -> bool:
    return any(function == name or function_path(function) for function in cfg.reward_funcs)


def say_unread(cfg: TrainConfig) -> None:
    """Print each setting of UNREAD that is not at its default and that nothing reads, in any domain."""
    usual = type(cfg)()
    for names, is_read, where in UNREAD:
        given = [name for name in names.split() if getattr(cfg, name) != getattr(usual, name)]
        if given and not any(is_read(own) for own in cfg.by_domain()):
            flags = " and ".join(f"--{name} {shown(getattr(cfg, name))}" for name in given)
            say_once(f"  without effect         {flags}, read only {where}")


def shown(value) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def say_without_effect(tables: dict[str, dict], used: dict[str, Callable], script: dict, cfg: TrainConfig) -> None:
    """Print each knob of the algorithm that is not at its default and is read by an advantage, loss or KL estimator,
    but by none in use, and by no other function of the script, whose globals these are, or of the one that runs it.
    Nothing where it cannot be seen what those in use read."""
    say_unread(cfg)
    in_use = [read_by(function) for function in used.values()]
    if None in in_use:
        return
    named = {f"--{kind} {name}": function for kind, table in tables.items() for name, function in table.items()}
    readers = {name: read_by(function) or set() for name, function in named.items()}
    places = [script, vars(sys.modules["__main__"])]
    own = [one for place in places for one in place.values() if getattr(one, "__module__", None) == place["__name__"]]
    own += [method for one in own if inspect.isclass(one) for method in vars(one).values()]
    read = set().union(*(names_in(one) for one in own if one not in named.values()), *in_use)
    groups, usual = cli.field_help(TrainConfig), type(cfg)()
    for field in fields(cfg):
        group, _ = groups.get(field.name, ("algorithm", ""))  # a knob of one's own is in no group
        if not group.startswith(("algorithm", "teacher")):
            continue
        those = [name for name, names in readers.items() if field.name in names]
        value = getattr(cfg, field.name)
        if those and field.name not in read and value != getattr(usual, field.name):
            who = ", ".join(those[:4]) + (f" and {len(those) - 4} more" if len(those) > 4 else "")
            say_once(f"  without effect         --{field.name} {value}, which is read by {who}")


def check_needs(name: str, function: Callable) -> None:
    """ConfigError if `needs` below a function is no tuple of known fields, or `weights` no known way."""
    known_name(f"{name}: .weights", getattr(function, "weights", "agg"), ("agg", "sum"))
    asked = getattr(function, "needs", ())
    if isinstance(asked, str):
        raise ConfigError(f'{name}: .needs = "{asked}" is text; write a tuple, .needs = ("{asked}",).')
    for field in asked:
        known_name(f"{name}: .needs", field, FIELDS)


def shaping(cfg: TrainConfig) -> list[str]:
    """Flags that change rewards after the reward functions."""
    flags = [f"--{flag}" for flag in ("reward_mean", "reward_std") if getattr(cfg, flag) != "none"]
    return flags + ["--kl_in_reward"] * cfg.kl_in_reward


def check_shaping(advantage: Callable, cfg: TrainConfig) -> None:
    """ConfigError for shaped rewards under an advantage that reads them only as they were given."""
    flags, seen = shaping(cfg), names_in(advantage)
    if flags and "scores" in seen and not seen & {"shaped_scores", "rewards", "returns_to_go", "turn_returns"}:
        raise ConfigError(
            f"--advantage {cfg.advantage}: it reads batch.scores, which are as the reward functions gave them, so "
            f"{' and '.join(flags)} would have no effect; have it read batch.shaped_scores, or leave out the flag."
        )


def prepared(functions: dict[str, Callable], batch, cfg: TrainConfig) -> dict:
    """What the functions compute once a step, before it is cut: {name: number, or tensor [B, ...]}."""
    found, whose = {}, dict.fromkeys(batch.extras, 'an advantage, or t.info["extras"],')
    for name, function in functions.items():
        if prepare := getattr(function, "prepare", None):
            with explained(f"{name}: .prepare", prepare, batch, says=function), utils.counted(not batch.stand_in):
                extras = prepare(batch, cfg)
            if not isinstance(extras, dict):
                raise TypeError(f"{name}: .prepare must return a dict, {{name: tensor or number}}; got {type(extras)}.")
            allowed = (), tuple(batch.loss_mask.shape[:1]), tuple(batch.loss_mask.shape)
            for key, value in extras.items():
                if key in whose:
                    raise ValueError(f"{name}: .prepare returned {key!r}, which {whose[key]} has prepared; rename one.")
                whose[key] = name
                if isinstance(value, Tensor) and tuple(value.shape) in allowed:
                    found[key] = value.to(batch.loss_mask.device)
                elif isinstance(value, int | float):
                    found[key] = value
                else:
                    shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
                    raise ValueError(
                        f"{name}: .prepare returned {key!r} {shape}; give a number, a tensor with a value for each of "
                        f"the {len(batch)} rows (group_mean and center_by_group make one), or one for each token."
                    )
    return found


@contextlib.contextmanager
def explained(what: str, function: Callable, batch, says: Callable | None = None) -> Iterator[None]:
    """An error within that comes of a field that nobody computed says how to ask for it: below `says`."""
    try:
        yield
    except KeyError as error:
        if "extras" not in names_in(function) or error.args[0] in batch.extras:
            raise
        raise RuntimeError(
            f"{what} reads batch.extras[{error.args[0]!r}], which nothing gave in this step: neither a `prepare` nor "
            f't.info["extras"] of any trajectory on any rank. Known: {sorted(batch.extras) or "none"}. Where only some '
            f"steps have it: batch.extras.get({error.args[0]!r})"
        ) from error
    except (TypeError, AttributeError) as error:
        read = [field for field in FIELDS if field in names_in(function) and getattr(batch, field, None) is None]
        if not read:
            raise
        name = getattr(says or function, "__name__", "it")
        raise TypeError(
            f"{what} reads batch.{read[0]}, which is not computed unless a function asks for it: "
            f"write {name}.needs = ({', '.join(map(repr, read))},) below it. Such a field is a constant: "
            "the entropy with its gradient is own_term's second argument."
        ) from error


def computed(advantage: Callable, batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """(what an advantage computes, its statistics), if it can be trained on."""
    reads = type(batch).reads
    reads.clear()
    with explained(f"advantage {cfg.advantage!r}", advantage, batch):
        result = advantage(batch, cfg)
    if flags := shaping(cfg) if reads == {"scores"} else ():
        warn_once(
            f"--advantage {cfg.advantage} read batch.scores, which are as the reward functions gave them, and not "
            f"batch.shaped_scores, which have what {' and '.join(flags)} made of them."
        )
    advantages, stats = result if isinstance(result, tuple) else (result, {})
    return check_advantages(advantages, batch, cfg), dict(stats)


def check_advantages(advantages: Tensor, batch, cfg: TrainConfig) -> Tensor:
    """The advantages themselves, if they can be trained on."""
    remedy = "spread(values, batch.loss_mask) makes it from [B]"
    return checked(f"advantage {cfg.advantage!r}", advantages, batch, remedy)


def check_loss(result, batch, cfg: TrainConfig) -> tuple[Tensor, dict]:
    """What a policy loss returned, if it is (loss per token, statistics)."""
    name = f"policy loss {cfg.policy_loss!r}"
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise TypeError(f"{name} must return (loss per token [B, T], dict of statistics [B, T]); got {type(result)}.")
    return check_term(name, result[0], batch), check_statistics(name, result[1], batch)


def with_numbers(returned, sampled: list = ()) -> tuple[list, dict]:
    """(trajectories, metrics) of what after_rollout returned for those that were sampled. One that has the row of a
    sampled one has its row number, too. Where some were added to the placeholder of a rank on which all had failed,
    that goes. Collective."""
    trajectories, numbers = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not isinstance(trajectories, list) or not isinstance(numbers, dict):
        raise TypeError(
            f"after_rollout must return a list of trajectories, or that and a dict of numbers; got {type(returned)}."
        )
    played = [t for t in trajectories if not stands_in(t)]
    row_numbers = {id(t.row): t.info["row_number"] for t in reversed(sampled) if "row_number" in t.info}
    for t in played:
        t.info = t.info | ({"row_number": row_numbers[id(t.row)]} if id(t.row) in row_numbers else {})
    warn_of_mixed_groups(played)
    return played or trajectories, over_ranks(numbers, len(played))


def logged(numbers: dict, batch) -> dict[str, float]:
    """`over_ranks` of what a function gave to log of a batch. Of values [B, T] the sampled tokens count. Collective."""
    sampled, size = batch.loss_mask > 0, batch.loss_mask.shape
    of_tokens = {n: v[sampled] for n, v in numbers.items() if isinstance(v, Tensor) and v.shape == size}
    return over_ranks(numbers | of_tokens, 0 if batch.stand_in else len(batch))


def over_ranks(numbers: dict, rows: int) -> dict[str, float]:
    """{name: a number, or numbers for each of something} over all ranks, by the rule of `utils.over_ranks`. One number
    stands for all `rows`, this rank's completions; a rank without any has nothing to say. Collective."""
    mine = {}
    for name, value in numbers.items() if rows else ():
        value = torch.as_tensor(value, dtype=torch.float64)
        if name.endswith("_max"):
            mine[name] = max(value.flatten().tolist(), default=-math.inf), 1
        else:
            alike = 1 if value.ndim or name.endswith("_sum") else rows
            mine[name] = float(value.sum()) * alike, value.numel() * alike
    return utils.over_ranks(mine)


def warn_of_mixed_groups(trajectories: list) -> None:
    """A warning where completions of different data rows have one group number: a remembered trajectory keeps the one
    that it had in its own step, where another prompt had it."""
    first: dict[int, object] = {}  # of each group
    for t in trajectories:
        rows = [one.info.get("row_number") for one in (first.setdefault(t.group, t), t)]
        if None not in rows and rows[0] != rows[1] and not same_row(t.row, first[t.group].row):
            warn_once(
                f"after_rollout: completions of rows {rows[0]} and {rows[1]} are in one group ({t.group}), "
                "so advantages compare answers to different prompts. A remembered trajectory still has the number of "
                "its own step: give it that of a group of its row in this one, replace(t, group=...), or a free one.",
                kind="mixed groups",
            )


def check_term(name: str, term: Tensor, batch) -> Tensor:
    """A part of the loss, if it can be added up and trains something."""
    term = checked(name, term, batch, "do not average: --loss_agg does")
    if torch.is_grad_enabled() and not term.requires_grad and bool(term.any()):
        raise ValueError(
            f"{name} returned a term without a gradient: it would move the loss and train nothing. Take logprobs or "
            "entropy into it without .detach(); a number to log goes into the statistics."
        )
    return term


def check_statistics(name: str, statistics: dict, batch) -> dict:
    """The statistics themselves, if each is a value per token, or can be taken for one ([B, 1], a number)."""
    rows, length = batch.loss_mask.shape
    if taken := sorted(TAKEN & statistics.keys()):
        raise ValueError(f"{name} returned the statistic {taken[0]!r}, which the script logs; take another name.")
    for key, matrix in statistics.items():
        shape = tuple(matrix.shape) if isinstance(matrix, Tensor) else None
        if shape not in ((), (1, 1), (rows, 1), (1, length), (rows, length)):
            got = type(matrix).__name__ if shape is None else shape
            raise ValueError(
                f"{name} returned the statistic {key!r} as {got}; it must be a tensor with a value per token, "
                f"({rows}, {length}), or per completion, ({rows}, 1): values[:, None] makes that from [B]."
            )
    return statistics


def unknown_in(batch) -> list[str]:
    """Fields of Batch that are nan on some sampled tokens: of a teacher that was not asked, of a demonstration."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    by_token = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.shape == batch.loss_mask.shape}
    return [f"batch.{name}" for name, value in by_token.items() if value[batch.loss_mask > 0].isnan().any()]


def checked(name: str, matrix: Tensor, batch, remedy: str) -> Tensor:
    shape = tuple(batch.loss_mask.shape)
    if not isinstance(matrix, Tensor) or tuple(matrix.shape) != shape:
        got = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"{name} returned {got}; it must be a value per token, {shape}: {remedy}.")
    matrix = matrix.where(batch.loss_mask > 0, 0)  # elsewhere log-probs are 0: log(1 - p) would be inf, times 0 nan
    with read_once():
        _finite.append((name, batch, torch.isfinite(matrix.detach()).all()))
    return matrix


# Of what was checked: whose it is, the batch, and whether it is finite, not read yet.
_finite: list[tuple[str, object, Tensor]] = []
_open = 0  # `read_once` blocks around us


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """What is `checked` within is known to be finite at the end, by one read: each waits for the GPU."""
    global _open
    _open += 1
    try:
        yield
        if _open == 1 and _finite:
            good = torch.stack([finite for *_, finite in _finite]).tolist()
            if not all(good):
                name, batch, _ = _finite[good.index(False)]
                unknown = " and ".join(unknown_in(batch))
                why = f"{unknown} has nan on some." if unknown else "Does it divide by a std or a length of 0?"
                raise ValueError(f"{name} returned nan or infinity on a sampled token. {why}")
    finally:
        _open -= 1
        if not _open:
            _finite.clear()
