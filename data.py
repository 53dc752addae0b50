"""Rows of data: loading them, checking them, and choosing those of a step.

A row is a dict. `prompt` is its only required column: a non-empty string or a list of chat messages. `answer`, `image`
and `images` are the other standard names. Every column is kept and passed to the reward functions by keyword.

    load_rows("openai/gsm8k", config="main", split="train")       hub id, or a folder that `datasets` can load
    load_rows("rows.jsonl")                                       .jsonl .json .csv .parquet: these have no splits
    load_rows("reasoning_gym:chain_sum?min_terms=2&size=500")     a reasoning-gym task and its parameters
    load_rows("examples/sums.py:rows", split="test", seed=42)     a function, called as rows(split=..., seed=...)
    load_rows("recipes/gsm8k.py:rows?source=my.jsonl")            ... and source="my.jsonl"
    load_rows("seeds:2000")                                       one seed per row: the environment makes the prompt

Mistakes raise ConfigError with what was given, what is allowed and what to do.
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

# `datasets` and reasoning_gym are imported only for rows that need them; rows of a function need neither.

NO_PROMPT = [{"role": "user", "content": ""}]  # for rows whose environment makes the prompt
FILE_TYPES = (".jsonl", ".json", ".csv", ".parquet")
GYM_SPLITS = ("train", "test", "validation")
PROMPT_RULE = "`prompt` must be a non-empty string or a list of chat messages [{'role': 'user', 'content': '...'}]"
AT_ONCE = 1000  # rows read from disk together
LOOKED_AT = 100  # rows checked before anything else starts; the others are checked when drawn
REMEDY = "Build or rename columns in a function of yours: --dataset_id FILE.py:FUNCTION"


# ---- rows that stay on disk -----------------------------------------------------------------------------------------


class Rows(Sequence):
    """Rows that stay on disk, in `table`, a `datasets.Dataset`. Each time a row is taken, `make` turns it into a new
    dict. name: what messages call the rows."""

    def __init__(self, table, make: Callable[[dict], dict], name: str):
        self.table, self.make, self.name = table, make, name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, place):
        if not isinstance(place, slice):
            return new_row(self.make, self.table[place], f"{self.name}, row {place}")
        columns, numbers = self.table[place], range(len(self))[place]
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return [new_row(self.make, row, f"{self.name}, row {n}") for n, row in zip(numbers, rows, strict=True)]

    def __iter__(self) -> Iterator[dict]:
        return itertools.chain.from_iterable(self[start : start + AT_ONCE] for start in range(0, len(self), AT_ONCE))


def new_row(make: Callable[[dict], dict], row: dict, place: str) -> dict:
    """make(row); an error that it raises is reported with `place`."""
    try:
        return make(row)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    except Exception as error:
        error.add_note(f"Raised at {place}, whose columns are {', '.join(map(str, row))}.")
        raise


def columns_of(rows) -> set[str] | None:
    """Columns that all of the first rows have; None if there are no rows."""
    first = [*rows[:LOOKED_AT]]
    return set.intersection(*({*row} for row in first)) if first else None


def has_column(rows, *names: str) -> bool:
    """Whether any of the first rows has any of these columns."""
    return any(name in row for row in rows[:LOOKED_AT] for name in names)


def without_nulls(value):
    """The value without dict keys that are None: Arrow gives each dict the keys of all others. A message's `content`
    stays even if None, as templates ask for it."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None or (k == "content" and "role" in value)}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def row_without_nulls(row: dict) -> dict:
    """`without_nulls` of every column."""
    return {name: without_nulls(value) for name, value in row.items()} if isinstance(row, dict) else row


def from_table(table, name: str) -> Rows:
    """Rows of a `datasets.Dataset`. Images are opened when a row is taken, and decoded when they are first used."""
    images = [name for name in ("image", "images") if name in table.column_names]
    if not images:
        return Rows(table, row_without_nulls, name)
    from inputs.pictures import opened_value, undecoded_images  # here: needs Pillow

    files = undecoded_images(table, images)
    decoded = [name for name in images if files.features[name] != table.features[name]]

    def make(row: dict) -> dict:
        return row_without_nulls(row) | {name: opened_value(row[name]) for name in decoded}

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
    """All rows of a data set, checked: a list of dicts, or Rows, which stay on disk and of which the first and the last
    are checked. Files have no splits: held-out rows need a file of their own.

    `format_row` converts each row before the check; for Rows, whenever one is taken. Without `own_prompts` a row may
    lack `prompt`: it gets an empty one, which an environment completes.
    """
    rows = read_rows(dataset_id, config, split, seed)
    if len(rows) == 0:
        raise ConfigError(f"{dataset_id}: has no rows.")

    def to_row(row: dict) -> dict:
        check_dict(row)
        row = row if own_prompts or "prompt" in row else row | {"prompt": NO_PROMPT}
        return format_row(row) if format_row else row

    if isinstance(rows, list):
        checked_rows = rows = [new_row(to_row, row, f"{dataset_id}, row {number}") for number, row in enumerate(rows)]
    else:
        rows = Rows(rows.table, lambda row, make=rows.make: to_row(make(row)), rows.name)
        checked_rows, _ = rows[:LOOKED_AT], rows[len(rows) - 1]  # the last, too: broken files are cut off at the end
    for number, row in enumerate(checked_rows):
        new_row(check_row, row, f"{dataset_id}, row {number}")
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
        options = {}
        if kind == "csv":
            import datasets  # here: .json files do not need it

            with file.open(encoding="utf-8-sig", newline="") as stream:
                names = next(csv.reader(stream))
            features = datasets.Features({name: datasets.Value("string") for name in names})
            options = dict(features=features, keep_default_na=False)
        return from_table(table_of(kind, file, **options), path)
    except Exception as error:  # `datasets` and its readers have no error class of their own
        raise ConfigError(f"{path}: not valid {kind}: {error.__cause__ or error}") from error


def table_of(kind: str, file: Path, **options):
    """The `datasets.Dataset` of a file; `datasets` keeps it in its cache."""
    import datasets

    if os.environ.get("RANK", "0") != "0":
        datasets.disable_progress_bars()
    return datasets.load_dataset(kind, data_files=str(file), split="train", **options)


def lines_of(file: Path):
    """A .jsonl file as a table of lines. Each is parsed only when its row is taken, so values stay unchanged: Arrow
    would turn texts into dates, and give each dict the keys of all others."""
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
    """A `datasets.Dataset` from the hub or from a folder."""
    import datasets

    try:
        if not any((Path(dataset_id) / name).exists() for name in ("dataset_dict.json", "state.json")):
            return datasets.load_dataset(dataset_id, config, split=split)
        saved = datasets.load_from_disk(dataset_id)
    except (OSError, ValueError) as error:  # unknown name, hub out of reach, unknown configuration or split
        raise ConfigError(
            f"--dataset_id={dataset_id} (dataset_config {config}, split {split}) cannot be loaded: {error}\n"
            f"Allowed: a hub id that has these, a {'/'.join(FILE_TYPES)} file, "
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
    return [row_without_nulls(row) for row in rows]


def load_seeds(spec: str, split: str, seed: int) -> list[dict]:
    """`seeds:2000`: that many rows, each with a seed and an empty prompt; seeds differ between splits."""
    known_name(f"split of {spec}", split, GYM_SPLITS)
    count = spec.removeprefix("seeds:")
    if not count.isdecimal() or int(count) == 0:
        raise ConfigError(f"--dataset_id={spec}: give the number of rows after the colon, such as seeds:2000.")
    first = gym_seed(seed, split)
    return [{"prompt": NO_PROMPT, "seed": first + n} for n in range(int(count))]


# ---- reasoning-gym --------------------------------------------------------------------------------------------------


def load_gym(task: str, split: str, seed: int) -> list[dict]:
    """Rows of a reasoning-gym task. `prompt` is the task's question. The task's own keys (question, answer, metadata)
    stay, and `reasoning_gym_task` tells the reward function reasoning_gym which scorer to use. The parameter `size`
    sets the number of rows; `seed` overrides the run's seed."""
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
    """Seed of a split's item 0. Item i is drawn from seed + i, so with neighbouring seeds data sets would be the same
    rows, shifted. Hence seeds are spread over [0, 2^29), and splits lie 2^29 apart (numpy allows up to 2^32)."""
    return seed * 7_368_787 % 2**29 + GYM_SPLITS.index(split) * 2**29


def parse_gym(task: str) -> tuple[str, dict]:
    """`chain_sum?min_terms=2&allow_negation=true` -> ("chain_sum", {"min_terms": 2, "allow_negation": True})."""
    from reasoning_gym.factory import DATASETS

    name, parameters = with_arguments(task)
    known_name("reasoning-gym task", name, [dataset for dataset in DATASETS if dataset != "composite"])
    return name, parameters


# ---- checking -------------------------------------------------------------------------------------------------------


def check_dict(row) -> None:
    if not isinstance(row, dict):
        raise ConfigError(f"is a {type(row).__name__}, {shorten(row)}; a row must be a dict. {REMEDY}")


def check_row(row) -> None:
    """ConfigError if no prompt can be made from the row."""
    check_dict(row)
    if "prompt" not in row:
        raise ConfigError(f"no column `prompt`, only {', '.join(map(str, row))}. {PROMPT_RULE}. {REMEDY}")
    prompt = row["prompt"]
    if not isinstance(prompt, (str, list)) or not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ConfigError(f"`prompt` is {shorten(prompt)}. {PROMPT_RULE}.")
    for number, message in enumerate(prompt if isinstance(prompt, list) else ()):
        valid = isinstance(message, dict) and isinstance(message.get("role"), str)
        # content is text or a list of parts; an assistant message that only calls tools has none
        valid = valid and (isinstance(message.get("content"), (str, list)) or message.get("tool_calls"))
        if not valid:
            fault = f"message {number} of `prompt` has no `role`, or no `content`: {shorten(message)}"
            raise ConfigError(f"{fault}. {PROMPT_RULE}.")
        try:
            parts_of(message.get("content"))
        except PartError as error:
            raise ConfigError(f"message {number} of `prompt`: {error}. {PROMPT_RULE}.") from None


def check_step_size(num_rows: int, prompts_per_step: int, world_size: int) -> None:
    """ConfigError if there are fewer rows than prompts in a step."""
    if num_rows < prompts_per_step:
        largest = num_rows // world_size * world_size
        fault = f"the prompts of a step are distinct, but there are only {num_rows} rows"
        raise ConfigError(f"--prompts_per_step={prompts_per_step}: {fault}; use at most {largest}, or add data.")


# ---- rows of a step -------------------------------------------------------------------------------------------------


class Order:
    """Which rows a step takes, over all ranks. Rows are shuffled anew in each epoch, by (seed, epoch), and those of a
    step are distinct: what remains of an epoch and is too little for a step is left out.

    Each of several domains has its share of a step, to less than one prompt, and its own epochs; one that ends within a
    step is followed by the next. Nothing depends on the steps before, so a resumed run needs no history.

    sizes: number of rows of each domain; domains lie one after another. weights: one per domain, relative to one
    another.
    """

    def __init__(self, sizes: list[int], weights: list[float], per_step: int, seed: int):
        self.sizes, self.per_step, self.seed = sizes, per_step, seed
        self.first = np.cumsum([0, *sizes[:-1]])  # first row of each domain
        self.ends = per_step * np.cumsum(weights) / np.sum(weights)
        self.ends[-1] = per_step

    @classmethod
    def of(cls, rows, cfg) -> "Order":
        """The order of a run's rows, by its domains if it has any."""
        counts = Counter(row["domain"] for row in (rows if cfg.domains else ()))
        sizes = [counts[entry["name"]] for entry in cfg.domains] or [len(rows)]
        weights = [entry["weight"] for entry in cfg.domains] or [1]
        return cls(sizes, weights, cfg.prompts_per_step, cfg.seed)

    def counts(self, steps: np.ndarray) -> np.ndarray:
        """Prompts of each domain in each of the steps, [steps, domains]. The rounding shifts by the golden ratio from
        step to step, so that over many steps each domain gets its share."""
        ends = np.floor(self.ends + steps[:, None] * 0.618033988749895 % 1)
        return np.diff(ends, prepend=0).astype(int)

    def step(self, step: int) -> np.ndarray:
        """Rows of a step (from 0), [per_step]; domains are mixed, since each rank and minibatch takes a part."""
        counts = self.counts(np.arange(step + 1))
        starts, sizes = counts[:-1].sum(axis=0), counts[-1]
        rows = np.concatenate([self.rows(domain, starts[domain], sizes[domain]) for domain in range(len(self.sizes))])
        return np.random.default_rng([self.seed, step]).permutation(rows) if len(self.sizes) > 1 else rows

    def rows(self, domain: int, start: int, count: int) -> np.ndarray:
        """`count` rows of a domain, from place `start` in its epochs laid end to end."""
        size = self.sizes[domain]
        length = size if len(self.sizes) > 1 else size - size % self.per_step
        epochs, places = np.divmod(np.arange(start, start + count), length)
        orders = {epoch: shuffled(size, self.seed, int(epoch), domain) for epoch in set(epochs)}
        numbers = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        return self.first[domain] + np.array(numbers, dtype=int)

    def extra(self, random: np.random.Generator, rows: list[int], count: int) -> np.ndarray:
        """`count` random rows, as replacements: of the domain of the first of `rows`, then of the second, and so on, in
        turn."""
        pattern = np.resize(rows, count)
        domains = np.searchsorted(self.first, pattern, side="right") - 1
        return self.first[domains] + random.integers(np.array(self.sizes)[domains])


@functools.lru_cache(maxsize=16)
def shuffled(size: int, *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size)


# ---- rows of a config -----------------------------------------------------------------------------------------------


def rows_of(rows: list[dict], cfg, source: str, names: list[str]) -> list[dict]:
    """The rows of a data set that belong to this config's domain, with its name in their column `domain`: those that
    name it there, or all rows of a data set without that column. Without domains, all rows, unchanged.

    names: of all domains.
    """
    if not cfg.domain:
        return rows
    if not has_column(rows, "domain"):
        return [row | {"domain": cfg.domain} for row in rows]
    for number, row in enumerate(rows):
        known_name(f"{source}, row {number}, column `domain` (which of --config)", row.get("domain"), names)
    of_domain = [row for row in rows if row["domain"] == cfg.domain]
    if not of_domain:
        raise ConfigError(f"{source}: no row names {cfg.domain!r} in its column `domain`; leave that domain out.")
    return of_domain


def sources(cfg) -> dict[str, tuple]:
    """The data that a config reads, by "train" and "eval": (data set, configuration, split, whether rows bring
    prompts)."""
    splits = {} if cfg.eval_only else {"train": (cfg.dataset_id, cfg.dataset_split)}
    if (cfg.eval_only or cfg.eval_steps) and cfg.eval_split is not None:
        splits["eval"] = (cfg.eval_dataset_id or cfg.dataset_id, cfg.eval_split)
    return {use: (name, cfg.dataset_config, split, not cfg.env) for use, (name, split) in splits.items()}


def load_data(cfg, format_row: Callable[[dict], dict] | None = None, run_cfg=None) -> tuple[Sequence[dict], list[dict]]:
    """Training rows and held-out rows (empty without evaluation). For a domain's config these are its rows; run_cfg is
    then the config of the run."""
    data = {"train": [], "eval": []}
    if "eval" in sources(cfg) and not cfg.eval_dataset_id and names_file(cfg.dataset_id):
        flag, otherwise = "--eval_dataset_id", "take --eval_steps none"
        if cfg.domain:
            flag, otherwise = "eval_dataset_id", "give this domain `eval_split: none`"
        raise ConfigError(f"{cfg.dataset_id} has no splits: name the held-out rows' file with {flag}, or {otherwise}.")
    for purpose, (dataset_id, config, split, own_prompts) in sources(cfg).items():
        rows = load_rows(dataset_id, config, split, cfg.seed, format_row, own_prompts)
        rows = rows_of(rows, cfg, dataset_id, [domain.domain for domain in (run_cfg or cfg).by_domain()])
        if purpose == "eval" or cfg.env:  # held-out rows are few; an environment's rows get a seed
            rows = rows if isinstance(rows, list) else [*rows]
        if cfg.env:  # rows with equal prompts, even one object repeated, should be different games
            key = f"{cfg.seed} {dataset_id} {split}"
            rows = [
                row if row.get("seed") is not None else row | {"seed": zlib.crc32(f"{key} {number}".encode())}
                for number, row in enumerate(rows)
            ]
        data[purpose] = rows
        if os.environ.get("RANK", "0") == "0":
            print(f"{f'{cfg.domain}: ' if cfg.domain else ''}{dataset_id} [{split}]: {len(rows)} rows")
    return data["train"], data["eval"]
