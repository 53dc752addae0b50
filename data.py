"""Rows: where they come from, what makes one valid, and whose turn it is.

A row is a dict. `prompt` is its only required column: a non-empty string or a list of chat messages. `answer`, `image`
and `images` are the other standard names. Every column is kept and handed to the reward functions by keyword.

    load_rows("openai/gsm8k", config="main", split="train")       hub id, or a folder that `datasets` can load
    load_rows("rows.jsonl")                                       .jsonl .json .csv .parquet: these have no splits
    load_rows("reasoning_gym:chain_sum?min_terms=2&size=500")     a reasoning-gym task and its parameters
    load_rows("examples/sums.py:rows", split="test", seed=42)     a function, called as rows(split=..., seed=...)
    load_rows("recipes/gsm8k.py:rows?source=my.jsonl")            ... and source="my.jsonl"
    load_rows("seeds:2000")                                       a seed a row, for environments that make the prompts

Mistakes raise ConfigError: what was given, what is allowed, what to do.
"""

import csv
import functools
import itertools
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from config import ConfigError, function_path, known_name, load_function, require, shorten, with_arguments
from inputs.parts import PartError, parts_of

# `datasets` and reasoning_gym are imported where such rows are read: a run with rows of a function needs neither.

NO_PROMPT = [{"role": "user", "content": ""}]  # of rows whose environment makes the prompt
FILE_TYPES = (".jsonl", ".json", ".csv", ".parquet")
GYM_SPLITS = ("train", "test", "validation")
PROMPT_RULE = "`prompt` must be a non-empty string or a list of chat messages [{'role': 'user', 'content': '...'}]"
AT_ONCE = 1000  # rows that are read from the disk together
LOOKED_AT = 100  # rows that are looked at before anything else starts; others are when they are drawn
REMEDY = "Build or rename columns in format_row (train script) or a function of yours: --dataset_id file.py:function"


# ---- rows that stay on disk -----------------------------------------------------------------------------------------


class Rows(Sequence):
    """Rows that stay on disk, in `table`, a `datasets.Dataset`. Each is made a dict by `make` when it is taken, and a
    new one each time. name: what messages call them."""

    def __init__(self, table, make: Callable[[dict], dict], name: str):
        self.table, self.make, self.name = table, make, name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, place):
        if not isinstance(place, slice):
            return made(self.make, self.table[place], f"{self.name}, row {place}")
        columns, numbers = self.table[place], range(len(self))[place]
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return [made(self.make, row, f"{self.name}, row {n}") for n, row in zip(numbers, rows, strict=True)]

    def __iter__(self) -> Iterator[dict]:
        return itertools.chain.from_iterable(self[start : start + AT_ONCE] for start in range(0, len(self), AT_ONCE))


def made(make: Callable[[dict], dict], row: dict, where: str) -> dict:
    """What `make` makes of a row; what it raises says where."""
    try:
        return make(row)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except Exception as error:
        error.add_note(f"Raised at {where}, whose columns are {', '.join(map(str, row))}.")
        raise


def columns_of(rows) -> set[str] | None:
    """Those that all of the first rows have; None where there are no rows."""
    first = [*rows[:LOOKED_AT]]
    return set.intersection(*({*row} for row in first)) if first else None


def has_column(rows, *names: str) -> bool:
    """Whether one of the first rows has one of them."""
    return any(name in row for row in rows[:LOOKED_AT] for name in names)


def without_nulls(value):
    """Without the keys that are None in dicts, as Arrow gives each dict the keys of all others. A message's `content`
    stays: templates ask whether it is None."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None or (k == "content" and "role" in value)}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def own_keys(row: dict) -> dict:
    """`without_nulls` of every column."""
    return {name: without_nulls(value) for name, value in row.items()} if isinstance(row, dict) else row


def from_table(table, name: str) -> Rows:
    """Rows of a `datasets.Dataset`: images are opened when a row is taken, and decoded when they are first used."""
    images = [name for name in ("image", "images") if name in table.column_names]
    if not images:
        return Rows(table, own_keys, name)
    from inputs.pictures import opened_value, undecoded  # which need Pillow

    files = undecoded(table, images)
    decoded = [name for name in images if files.features[name] != table.features[name]]

    def make(row: dict) -> dict:
        return own_keys(row) | {name: opened_value(row[name]) for name in decoded}

    return Rows(files, make, name)


# ---- loading --------------------------------------------------------------------------------------------------------


def load_rows(
    dataset_id: str,
    config: str | None = None,
    split: str = "train",
    seed: int = 0,
    format_row: Callable[[dict], dict] | None = None,
    own_prompts: bool = True,
):
    """All rows of a data set, checked: a list of dicts; or Rows, which stay on disk, and of which the first and the
    last are looked at. Files have no splits: held-out rows need a file of their own.

    `format_row` makes a row from each one, before the check; of Rows whenever one is taken. Without `own_prompts` a row
    may lack `prompt`: it is an empty one, for an environment to complete.
    """
    rows = read_rows(dataset_id, config, split, seed)
    if len(rows) == 0:
        raise ConfigError(f"{dataset_id}: has no rows.")

    def whole(row: dict) -> dict:
        check_dict(row)
        row = row if own_prompts or "prompt" in row else row | {"prompt": NO_PROMPT}
        return format_row(row) if format_row else row

    if isinstance(rows, list):
        looked_at = rows = [made(whole, row, f"{dataset_id}, row {number}") for number, row in enumerate(rows)]
    else:
        rows = Rows(rows.table, lambda row, make=rows.make: whole(make(row)), rows.name)
        looked_at, _ = rows[:LOOKED_AT], rows[len(rows) - 1]  # the last, as files are cut off at their end
    for number, row in enumerate(looked_at):
        made(check_row, row, f"{dataset_id}, row {number}")
    return rows


def read_rows(dataset_id: str, config: str | None, split: str, seed: int):
    if dataset_id.startswith("seeds:"):
        return load_seeds(dataset_id, split, seed)
    if dataset_id.startswith("reasoning_gym:"):
        return load_gym(dataset_id.removeprefix("reasoning_gym:"), split, seed)
    if names_function(dataset_id):
        return load_from_function(dataset_id, split, seed)
    if names_file(dataset_id):
        return load_file(dataset_id)
    return from_table(load_hub(dataset_id, config, split), dataset_id)


def names_function(dataset_id: str) -> bool:
    return function_path(dataset_id.partition("?")[0]) is not None


def names_file(dataset_id: str) -> bool:
    return not names_function(dataset_id) and Path(dataset_id).suffix.lower() in FILE_TYPES


def load_file(path: str):
    """A .json file is a list of rows, a .jsonl file one row a line; .csv values are strings."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"{path}: no such file (looked in {Path.cwd()}).")
    kind = file.suffix.lower()[1:]
    try:
        if kind == "json":
            if not isinstance(rows := json.loads(file.read_text(encoding="utf-8-sig")), list):
                raise ValueError(f"it is a {type(rows).__name__}; give a list of rows, [{{...}}, ...]")
            return rows
        if kind == "jsonl":
            return Rows(lines_of(file), lambda row: parsed(row["text"]), path)
        how = {}
        if kind == "csv":
            import datasets  # a .json file needs none

            with file.open(encoding="utf-8-sig", newline="") as opened:
                names = next(csv.reader(opened))
            texts = datasets.Features({name: datasets.Value("string") for name in names})
            how = dict(features=texts, keep_default_na=False)
        return from_table(table_of(kind, file, **how), path)
    except Exception as error:  # of `datasets` and what it reads with, which derive from no class of their own
        raise ConfigError(f"{path}: not valid {kind}: {error.__cause__ or error}") from error


def table_of(kind: str, file: Path, **how):
    """The `datasets.Dataset` of a file, which it keeps in its cache."""
    import datasets

    if os.environ.get("RANK", "0") != "0":
        datasets.disable_progress_bars()
    return datasets.load_dataset(kind, data_files=str(file), split="train", **how)


def lines_of(file: Path):
    """A .jsonl file as lines: each is parsed when its row is taken, and so stays as it is. Arrow would make dates of
    texts, and give each dict the keys of all others."""
    import pyarrow.compute as compute

    table = table_of("text", file)
    blank = np.asarray(compute.equal(compute.utf8_trim_whitespace(table.data.column("text")), ""))
    return table.select(np.flatnonzero(~blank)) if blank.any() else table


def parsed(line: str):
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"not valid jsonl: {error}, in {shorten(line)}") from None


def load_hub(dataset_id: str, config: str | None, split: str):
    """A `datasets.Dataset` of the hub, or of a folder."""
    import datasets

    try:
        if not any((Path(dataset_id) / name).exists() for name in ("dataset_dict.json", "state.json")):
            return datasets.load_dataset(dataset_id, config, split=split)
        saved = datasets.load_from_disk(dataset_id)
    except (OSError, ValueError) as error:  # unknown name, hub out of reach, unknown configuration or split
        raise ConfigError(
            f"--dataset_id={dataset_id} (configuration {config}, split {split}) cannot be loaded: {error}\n"
            f"Allowed: a hub id with --dataset_config and --dataset_split, a {'/'.join(FILE_TYPES)} file, "
            "reasoning_gym:TASK?parameter=value, or path/to/file.py:function."
        ) from error
    splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    known_name(f"split of {dataset_id}", split, splits)
    return splits[split]


def load_from_function(spec: str, split: str, seed: int):
    name, arguments = with_arguments(spec)
    rows = load_function(name)(**arguments, split=split, seed=seed)
    if rows is None:
        raise ConfigError(f"{spec} returned None; return or yield rows, which are dicts.")
    if isinstance(rows, Rows):
        return rows
    if "datasets" in sys.modules and isinstance(rows, sys.modules["datasets"].Dataset):
        return from_table(rows, spec)
    return [own_keys(row) for row in rows]


def load_seeds(spec: str, split: str, seed: int) -> list[dict]:
    """`seeds:2000`: so many rows of no prompt but a seed each, other ones in every split."""
    known_name(f"split of {spec}", split, GYM_SPLITS)
    count = spec.removeprefix("seeds:")
    if not count.isdecimal() or int(count) == 0:
        raise ConfigError(f"--dataset_id={spec}: give a number of rows behind the colon, such as seeds:2000.")
    first = gym_seed(seed, split)
    return [{"prompt": NO_PROMPT, "seed": first + n} for n in range(int(count))]


# ---- reasoning-gym --------------------------------------------------------------------------------------------------


def load_gym(task: str, split: str, seed: int) -> list[dict]:
    """`prompt` is the task's question; its own keys (question, answer, metadata) stay, and `reasoning_gym_task` tells
    the reward function reasoning_gym which scorer to use. Parameter `size` sets the number of rows, `seed` overrides.
    """
    require("reasoning_gym", f"--dataset_id=reasoning_gym:{task}")
    import reasoning_gym

    known_name("split of a reasoning-gym task", split, GYM_SPLITS)
    name, parameters = parse_gym(task)
    parameters["seed"] = gym_seed(parameters.get("seed", seed), split)
    try:
        items = [*reasoning_gym.create_dataset(name, **parameters)]
    except (AssertionError, TypeError, ValueError) as error:  # the task's own checks
        raise ConfigError(f"--dataset_id=reasoning_gym:{task}: {name} refuses these parameters: {error}") from error
    return [{"prompt": item["question"], **item, "reasoning_gym_task": task} for item in items]


def gym_seed(seed: int, split: str) -> int:
    """Seed of a split's item 0. Item i is drawn from seed + i, so data sets of neighbouring seeds would be the same
    rows shifted: seeds are spread over [0, 2^29), and splits lie 2^29 apart (numpy allows up to 2^32).
    """
    return seed * 7_368_787 % 2**29 + GYM_SPLITS.index(split) * 2**29


def parse_gym(task: str) -> tuple[str, dict]:
    """`chain_sum?min_terms=2&allow_negation=true` -> ("chain_sum", {"min_terms": 2, "allow_negation": True})."""
    from reasoning_gym.factory import DATASETS

    name, parameters = with_arguments(task)
    known_name("reasoning-gym task", name, [known for known in DATASETS if known != "composite"])
    return name, parameters


# ---- checking -------------------------------------------------------------------------------------------------------


def check_dict(row) -> None:
    if not isinstance(row, dict):
        raise ConfigError(f"is a {type(row).__name__}, {shorten(row)}; a row must be a dict. {REMEDY}")


def check_row(row) -> None:
    """ConfigError if no prompt can be made of it."""
    check_dict(row)
    if "prompt" not in row:
        raise ConfigError(f"no column `prompt`, only {', '.join(map(str, row))}. {PROMPT_RULE}. {REMEDY}")
    prompt = row["prompt"]
    if not isinstance(prompt, (str, list)) or not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ConfigError(f"`prompt` is {shorten(prompt)}. {PROMPT_RULE}.")
    for number, message in enumerate(prompt if isinstance(prompt, list) else ()):
        fits = isinstance(message, dict) and isinstance(message.get("role"), str)
        # content is text or a list of parts; an assistant that only calls tools has none
        fits = fits and (isinstance(message.get("content"), (str, list)) or message.get("tool_calls"))
        if not fits:
            fault = f"message {number} of `prompt` has no `role`, or no `content`: {shorten(message)}"
            raise ConfigError(f"{fault}. {PROMPT_RULE}.")
        try:
            parts_of(message.get("content"))
        except PartError as error:
            raise ConfigError(f"message {number} of `prompt`: {error}. {PROMPT_RULE}.") from None


def check_step_size(num_rows: int, prompts_per_step: int, world_size: int) -> None:
    """ConfigError unless there are enough rows."""
    if num_rows < prompts_per_step:
        most = num_rows // world_size * world_size
        raise ConfigError(
            f"--prompts_per_step={prompts_per_step}: the prompts of a step are distinct; of {num_rows} rows give at "
            f"most {most}, or more data."
        )


# ---- whose turn it is -----------------------------------------------------------------------------------------------


class Order:
    """Which rows a step takes, on all ranks together. They are shuffled anew in each epoch, by (seed, epoch), and are
    distinct: what is left of an epoch when it is too little for a step stays out of it.

    Of several domains each has its share of a step, to less than one prompt, and epochs of its own; one that ends
    within a step is followed by the next. Nothing depends on the steps before, so a resumed run needs no history.

    sizes: rows of each domain, which lie one domain behind the other. weights: one each, relative to one another.
    """

    def __init__(self, sizes: list[int], weights: list[float], per_step: int, seed: int):
        self.sizes, self.per_step, self.seed = sizes, per_step, seed
        self.first = np.cumsum([0, *sizes[:-1]])  # row of each domain
        self.ends = per_step * np.cumsum(weights) / np.sum(weights)
        self.ends[-1] = per_step

    @classmethod
    def of(cls, rows, cfg) -> "Order":
        """Of a run's rows, by its domains if it has any."""
        counts = Counter(row["domain"] for row in (rows if cfg.domains else ()))
        sizes = [counts[entry["name"]] for entry in cfg.domains] or [len(rows)]
        weights = [entry["weight"] for entry in cfg.domains] or [1]
        return cls(sizes, weights, cfg.prompts_per_step, cfg.seed)

    def counts(self, steps: np.ndarray) -> np.ndarray:
        """Prompts of each domain in each of the steps, [steps, domains]. What is rounded moves by the golden ratio from
        step to step, so that over many each domain has its share."""
        ends = np.floor(self.ends + steps[:, None] * 0.618033988749895 % 1)
        return np.diff(ends, prepend=0).astype(int)

    def step(self, step: int) -> np.ndarray:
        """Rows of a step (from 0), [per_step]; domains are mixed, as each rank and minibatch takes a part."""
        counts = self.counts(np.arange(step + 1))
        before, now = counts[:-1].sum(axis=0), counts[-1]
        rows = np.concatenate([self.rows(domain, before[domain], now[domain]) for domain in range(len(self.sizes))])
        return np.random.default_rng([self.seed, step]).permutation(rows) if len(self.sizes) > 1 else rows

    def rows(self, domain: int, start: int, count: int) -> np.ndarray:
        """`count` rows of a domain from place `start` of all its epochs in a row."""
        size = self.sizes[domain]
        length = size if len(self.sizes) > 1 else size - size % self.per_step
        epochs, places = np.divmod(np.arange(start, start + count), length)
        orders = {epoch: shuffled(size, self.seed, int(epoch), domain) for epoch in set(epochs)}
        found = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        return self.first[domain] + np.array(found, dtype=int)

    def extra(self, random: np.random.Generator, rows: list[int], count: int) -> np.ndarray:
        """`count` random rows: the first of the domain of the first of `rows`, and so on, by turns."""
        replaced = np.resize(rows, count)
        domains = np.searchsorted(self.first, replaced, side="right") - 1
        return self.first[domains] + random.integers(np.array(self.sizes)[domains])


@functools.lru_cache(maxsize=16)
def shuffled(size: int, *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size)


# ---- what a config reads --------------------------------------------------------------------------------------------


def rows_of(rows: list[dict], cfg, source: str, names: list[str]) -> list[dict]:
    """The rows of a data set that are this config's domain's, with its name in their column `domain`: those that name
    it there, or all rows of a data set without that column. Without domains, all as they are.

    names: of all domains.
    """
    if not cfg.domain:
        return rows
    if not has_column(rows, "domain"):
        return [row | {"domain": cfg.domain} for row in rows]
    for number, row in enumerate(rows):
        known_name(f"{source}, row {number}, column `domain` (which of --config)", row.get("domain"), names)
    found = [row for row in rows if row["domain"] == cfg.domain]
    if not found:
        raise ConfigError(f"{source}: no row names {cfg.domain!r} in its column `domain`; leave that domain out.")
    return found


def sources(cfg) -> dict[str, tuple]:
    """What a config reads, "train" and "eval": (data set, configuration, split, whether rows bring their prompts)."""
    found = {} if cfg.eval_only else {"train": (cfg.dataset_id, cfg.dataset_split)}
    if (cfg.eval_only or cfg.eval_steps) and cfg.eval_split is not None:
        found["eval"] = (cfg.eval_dataset_id or cfg.dataset_id, cfg.eval_split)
    return {use: (name, cfg.dataset_config, split, not cfg.env) for use, (name, split) in found.items()}


def load_data(cfg, format_row: Callable[[dict], dict] | None = None, whole=None) -> tuple[Sequence[dict], list[dict]]:
    """Training rows and held-out rows (empty without evaluation). Of a domain's config, its rows; then whole: the run's
    config."""
    found = {"train": [], "eval": []}
    if "eval" in sources(cfg) and not cfg.eval_dataset_id and names_file(cfg.dataset_id):
        without = ", or give this domain `eval_split: none`" if cfg.domain else ", or take --eval_steps none"
        name = f"name the held-out rows' file with {'' if cfg.domain else '--'}eval_dataset_id"
        raise ConfigError(f"{cfg.dataset_id} has no splits: {name}{without}.")
    for use, (dataset_id, config, split, own_prompts) in sources(cfg).items():
        loaded = load_rows(dataset_id, config, split, cfg.seed, format_row, own_prompts)
        loaded = rows_of(loaded, cfg, dataset_id, [own.domain for own in (whole or cfg).by_domain()])
        if use == "eval" or cfg.env:  # held-out rows are few, and an environment's get a seed
            loaded = loaded if isinstance(loaded, list) else [*loaded]
        if cfg.env:  # rows may have equal prompts, or be one object, and should not all be the same game
            named = f"{cfg.seed} {dataset_id} {split}"
            loaded = [
                row if row.get("seed") is not None else row | {"seed": zlib.crc32(f"{named} {number}".encode())}
                for number, row in enumerate(loaded)
            ]
        found[use] = loaded
        if os.environ.get("RANK", "0") == "0":
            print(f"{f'{cfg.domain}: ' if cfg.domain else ''}{dataset_id} [{split}]: {len(loaded)} rows")
    return found["train"], found["eval"]
