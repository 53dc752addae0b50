"""What the page's forks do (bench.py): each action is a function (script, given) -> plain values, and calls what the
training calls. given["settings"] are the form's texts, {flag: text}.
"""

import asyncio
import base64
import importlib.util
import io
import json
import math
import os
import queue
import re
import shlex
import sys
import threading
import time
import traceback
import typing
from dataclasses import MISSING, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch

import data
import domains
import rewards
import rollouts
import utils
from cli import ConfigError, field_help, flags, known_name, without_none
from config import TrainConfig, load_config
from envs import adapters, formats
from envs.tools import Call
from hf_generator import HFGenerator
from inputs.pictures import load_image
from inputs.processor import load_processor, with_template_kwargs
from inputs.prompts import build_prompt, image_sources
from looking.output import Tail
from runlog import samples
from runlog.log import completion_rows, name_run
from runlog.reading import readable_prompt
from runlog.tokens import vocabulary_of
from safety import credentials
from safety.storable import text_of
from vllm_client import Completion

SHOWN = 40  # rows of a list
BINS = 40
MOST_TEXT = 100_000  # characters of a column
MOST_COMPLETIONS = 64
NOT_SHOWN = ("server_token",)
FROM_ENVIRONMENT = dict(os.environ)


class Script:
    """A train script, imported under its own name, and what this process keeps between questions."""

    def __init__(self, path: str):
        self.path = Path(path).resolve()
        sys.argv = [path]
        self.module = loaded(self.path)
        self.config = self.module.TrainConfig
        self.plan = loaded(Path(data.__file__).parent / "plan.py")
        self.before = set(sys.modules)
        self.kept: dict = {}  # rows, and what reads them, by what they follow from
        self.game: Game | None = None

    def __getitem__(self, name: str):
        """What the script has under that name, or the script that it builds on."""
        for module in (self.module, sys.modules.get("train_grpo")):
            if hasattr(module, name):
                return getattr(module, name)
        raise ConfigError(f"{self.path.name} has no `{name}`.")

    def forget(self) -> None:
        """So that files of users are read anew, with what they import."""
        for name in set(sys.modules) - self.before:
            file = getattr(sys.modules[name], "__file__", None)
            if name.startswith("user_") or (file and Path(file).is_relative_to(Path.cwd()) and ".venv" not in file):
                del sys.modules[name]


def loaded(path: Path) -> ModuleType:
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]


# ---- settings -------------------------------------------------------------------------------------------------------


def words_of(cls: type, settings: dict[str, str]) -> list[list[str]]:
    """The command line that settings as texts stand for, the words of each flag together. An empty text is none."""
    hints, groups = typing.get_type_hints(cls), []
    known = [field.name for field in flags(cls)]
    for name, value in settings.items():
        if not isinstance(value, str) or not value.strip() or name in NOT_SHOWN:
            continue
        if name == "config":
            groups.append([f"--config={value.strip()}"])
            continue
        known_name("setting", name, known)
        kind, _ = without_none(hints[name])
        if kind is bool and value in ("true", "false"):
            groups.append([f"--{name}" if value == "true" else f"--no-{name}"])
        elif typing.get_origin(kind) is list:
            try:
                groups.append([f"--{name}", *shlex.split(value)])
            except ValueError as error:
                raise ConfigError(f"--{name}={value}: {error}; quotes come in pairs.") from None
        else:
            groups.append([f"--{name}={value if kind is str else value.strip()}"])
    return groups


def inside(spec: str, name: str) -> None:
    """ConfigError for a python file outside of the folder in which the page was started."""
    path = re.match(r"(.+?\.py)(:|$)", spec.partition("?")[0])
    if path and not Path(path[1]).expanduser().resolve().is_relative_to(Path.cwd().resolve()):
        raise ConfigError(f"--{name}={spec}: from here only python files in {Path.cwd()} are run; copy it there.")


CODE = ("dataset_id", "eval_dataset_id", "reward_funcs", "tools", "env", "teacher_prompt")  # may name python files


def settled(script: Script, given: dict, cls: type | None = None) -> tuple[TrainConfig, list[list[str]]]:
    """(the config, the words of each flag). ConfigError as on the command line."""
    cls = cls or script.config
    words = words_of(cls, given.get("settings") or {})
    os.environ |= {name: value for name, value in FROM_ENVIRONMENT.items() if name not in os.environ}
    os.environ["WORLD_SIZE"] = str(ranks_of(given))
    cfg = load_config(cls, sum(words, []))
    os.environ.pop("WORLD_SIZE")
    for own in cfg.by_domain():
        for name in CODE:
            value = getattr(own, name, None)
            for spec in value if isinstance(value, list) else [value] if value else []:
                inside(spec, name)
    return cfg, words


def ranks_of(given: dict) -> int:
    ranks = given.get("ranks") or 1
    if not isinstance(ranks, int) or not 1 <= ranks <= 1024:
        raise ConfigError(f"{ranks!r:.40} processes: give a number from 1 on.")
    return ranks


def shown_value(value) -> str:
    """As one would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return shlex.join(map(str, value)) if not any(isinstance(one, dict) for one in value) else json.dumps(value)
    return json.dumps(value) if isinstance(value, dict) else str(value)


def usual(field) -> object:
    return field.default if field.default is not MISSING else field.default_factory()


def form(script: Script, given: dict) -> dict:
    """The fields of the script's TrainConfig, and those that plan.py adds."""
    own = fields_of(script, script.config)
    here = sorted(str(path.parent) for path in Path("models").glob("*/config.json"))
    for field in own:
        if field["name"] == "model_id":
            field["known"] = here
    planned = [field for field in fields_of(script, script.plan.PlanConfig) if field["group"] == "plan"]
    first = next((vars(c)["first_flags"] for c in script.config.__mro__ if "first_flags" in vars(c)), {})
    files = sorted(str(p) for folder in ("recipes", "examples", ".") for p in Path(folder).glob("*.yaml"))
    return {"fields": own, "plan": planned, "first": {k: v.split() for k, v in first.items()}, "files": files}


def fields_of(script: Script, cls: type) -> list[dict]:
    hints, helps, found = typing.get_type_hints(cls), field_help(cls), []
    for field in flags(cls):
        if field.name in NOT_SHOWN:
            continue
        group, text = helps.get(field.name, ("options", ""))
        kind, optional = without_none(hints[field.name])
        choices = list(map(str, typing.get_args(kind))) if typing.get_origin(kind) is typing.Literal else []
        known = known_by(script, text, field.name)
        name = "choice" if choices else "list" if typing.get_origin(kind) is list else kind.__name__
        if name == "list" and typing.get_args(kind)[0] is dict:  # domains stand in a --config file
            continue
        found.append(
            {
                **{"name": field.name, "group": group, "help": text, "kind": name, "optional": optional},
                **{
                    "default": shown_value(usual(field)),
                    "choices": choices,
                    "known": known,
                },
            }
        )
    return found


def known_by(script: Script, text: str, name: str) -> list[str]:
    """The names that a help text speaks of: `name in ADVANTAGES`."""
    if name == "preset":
        text = "PRESETS"
    for word in re.findall(r"\b[A-Z][A-Z_]{3,}\b", text):
        for module in [script.module, *map(sys.modules.get, PLACES)]:
            if isinstance(table := getattr(module, word, None), dict):
                return sorted(map(str, table))
    return []


PLACES = ("train_grpo", "config", "rewards", "rollouts", "envs.adapters", "envs.tools")


def check(script: Script, given: dict) -> dict:
    """What the settings are, or the first fault of them, and the command and the file that say the same."""
    try:
        cfg, words = settled(script, given)
        for own in cfg.by_domain():
            with domains.named(own):
                script["check_algorithm"](own)
    except ConfigError as error:
        text = credentials.mask(str(error))
        names = [field.name for field in flags(script.config)]
        named = next((name for name in re.findall(r"--(?:no-)?(\w+)", text) if name in names), None)
        return {"error": text, "field": named}
    values = {field.name: getattr(cfg, field.name) for field in flags(script.config) if field.repr}
    plain = script.config()
    differs = [name for name, value in values.items() if value != getattr(plain, name)]
    settings = given.get("settings") or {}
    asked = [name for name in settings if name in values and settings[name].strip()]
    name, ranks = name_run(cfg), ranks_of(given)
    runs = Path(given.get("runs") or "runs")
    if cfg.output_dir == plain.output_dir and Path(cfg.output_dir).resolve() != runs.resolve():
        cfg, words = replace(cfg, output_dir=str(runs)), [*words, [f"--output_dir={runs}"]]
    if not cfg.run_name:
        words = [*words, [f"--run_name={name}"]]
    launcher = f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python"
    serves = cfg.generator == "vllm" and bool(given.get("serves"))
    return {
        "error": None,
        "values": {name: shown_value(value) for name, value in values.items()},
        "differs": differs,
        "flags": words,
        "command": f"{launcher} {script.path.name} {shlex.join(sum(words, []))}".strip(),
        "yaml": "".join(f"{name}: {as_yaml(values[name])}\n" for name in asked),
        **{"run_name": name, "run_dir": str(Path(cfg.output_dir).resolve() / name), "ranks": ranks, "serves": serves},
        **{"model_id": cfg.model_id, "window": cfg.max_prompt_length + cfg.max_completion_length},
        **{"generator": cfg.generator, "save_steps": cfg.save_steps},
    }


def as_yaml(value) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: ".inf", -math.inf: "-.inf"}.get(value, ".nan")
    return json.dumps(value)  # which YAML reads


# ---- rows -----------------------------------------------------------------------------------------------------------


def generator_of(processor) -> SimpleNamespace:
    """What makes a prompt of a row asks of a generator. Without positions on three axes, which are not shown."""
    return SimpleNamespace(tokenizer=processor, rope_index=None)


def read(script: Script, given: dict) -> dict:
    """The rows as the training reads them: {"cfg", "processor", "parts"}. Kept, until a setting or a file differs.

    A part is what one data set gives for one use: {"use", "name", "domain", "own": its config, "rows", "lengths"}."""
    cfg, _ = settled(script, given)
    groups = field_help(script.config)
    follow = ("model", "data", "tools and environments")
    named = [field.name for field in flags(script.config) if groups.get(field.name, ("",))[0] in follow]
    named += [name for name in ("seed", "eval_steps", "eval_only", "rollout", "reward_funcs") if name not in named]
    key = repr([(name, getattr(own, name)) for own in cfg.by_domain() for name in named]), files_of(cfg)
    if script.kept.get("key") == key:
        return script.kept | {"cfg": formats.settled(cfg, script.kept["processor"])}
    script.kept = {}
    script.forget()
    adapters._MADE.clear()
    for own in cfg.by_domain():
        with domains.named(own):
            rollouts.check_rollout(own)
    processor = with_template_kwargs(load_processor(cfg.model_id), cfg.chat_template_kwargs)
    cfg = formats.settled(cfg, processor)
    parts, done, error = [], {}, None

    def measured(rows, name: str, own, uses: list) -> list[int]:
        lengths = rollouts.measure(rows, name, processor=processor, cfg=own)
        use = uses.pop(0)
        parts.append({"use": use, "name": name, "domain": own.domain, "own": own, "rows": rows, "lengths": lengths})
        return lengths

    try:
        for own in cfg.by_domain():
            with domains.named(own):
                uses = list(data.sources(own))
                measure = partial(measured, own=own, uses=uses)
                data.load_data(own, script["format_row"], measure, cfg, done)
    except ConfigError as fault:
        if not parts:
            raise
        error = str(fault)  # such as that all are too long: which these are can be seen
    script.kept = {"key": key, "cfg": cfg, "processor": processor, "parts": parts, "error": error}
    return script.kept


def files_of(cfg) -> list:
    """When the files were changed that rows come from."""
    found = []
    for own in cfg.by_domain():
        for spec in (own.dataset_id, own.eval_dataset_id, own.mcp_config, own.env, *own.tools):
            path = Path(re.sub(r"(\.py):.*$", r"\1", (spec or "").partition("?")[0])).expanduser()
            if spec and path.is_file():
                found.append((str(path), path.stat().st_mtime_ns))
    return found


def rows(script: Script, given: dict) -> dict:
    """How many, their columns, lengths as a histogram, and which are left out."""
    try:
        known = read(script, given)
    except ConfigError as error:
        cfg, _ = settled(script, given)
        if "no column `prompt`" not in str(error) or not data.names_file(cfg.dataset_id):
            raise
        found = data.load_file(cfg.dataset_id)  # a file whose question stands in another column
        first = {name: text_of(value)[:300] for name, value in found[0].items()} if len(found) else {}
        return {"parts": [], "error": str(error), "file": {"path": cfg.dataset_id, "first": first}}
    told = []
    for number, part in enumerate(known["parts"]):
        lengths, limit = np.array(part["lengths"]), part["own"].max_prompt_length
        out = np.flatnonzero(lengths > limit)
        edges = np.unique(np.linspace(0, max(int(lengths.max(initial=1)), 1) + 1, BINS + 1).astype(int))
        counts, _ = np.histogram(lengths, edges)
        listed = [*range(min(len(lengths), SHOWN)), *out[:SHOWN].tolist()]
        told.append(
            {
                **{"part": number, "use": part["use"], "name": part["name"], "domain": part["domain"]},
                **{"count": len(lengths), "left_out": len(out), "limit": limit, "columns": columns_of(part["rows"])},
                **{"edges": edges.tolist(), "counts": counts.tolist(), "median": float(np.median(lengths))},
                **{"longest": int(lengths.max()), "first_step": first_step(script, known, part)},
                "rows": [line(part, n) for n in dict.fromkeys(listed)],
            }
        )
    return {"parts": told, "error": known["error"], "parser": known["cfg"].tool_parser}


def columns_of(rows) -> list[str]:
    if not isinstance(rows, list):
        return list(rows.column_names)
    return list(dict.fromkeys(name for row in rows[:1000] for name in row))


def first_step(script: Script, known: dict, part: dict) -> list[int]:
    """Numbers of the rows that the first step takes, among those in use."""
    cfg = known["cfg"]
    kept = sum(length <= cfg.max_prompt_length for length in part["lengths"])
    if part["use"] != "train" or cfg.domains or kept < cfg.prompts_per_step:
        return []
    sampler = script["PromptSampler"](kept, cfg.prompts_per_step, cfg.seed, 0, 1, {})
    places = [n for n, length in enumerate(part["lengths"]) if length <= cfg.max_prompt_length]
    return [places[int(n)] for n in sampler.next(0)]


def line(part: dict, number: int) -> dict:
    prompt = part["rows"][number]["prompt"]
    text = prompt if isinstance(prompt, str) else " ".join(text_of(m.get("content")) for m in prompt)
    return {"row": number, "tokens": part["lengths"][number], "text": text[:200]}


def chosen(known: dict, given: dict) -> tuple[dict, dict]:
    """(part, row) that is asked for, by their numbers. The row is a copy."""
    part, number = given.get("part", 0), given.get("row", 0)
    parts = known["parts"]
    if not isinstance(part, int) or not 0 <= part < len(parts):
        raise ConfigError(f"there is no part {part!r:.40} of the data.")
    count = len(parts[part]["rows"])
    if not isinstance(number, int) or not 0 <= number < count:
        raise ConfigError(f"there is no row {number!r:.40}; there are {count}, from 0 on.")
    return parts[part], dict(parts[part]["rows"][number])


async def begun(row: dict, processor, own) -> tuple[dict, object]:
    """(the row as the model is shown it, the environment that began it, None without any)."""
    if own.rollout != "multi_turn":
        return row, None
    environment = await rollouts.take_environment(adapters.environment_maker(own), row, own)
    messages = await rollouts.reset(environment, row, own, processor)
    return rollouts.begun(row, messages, environment, processor, own)[0], environment


def row(script: Script, given: dict) -> dict:
    """A row as the model will see it: token by token, with its columns and images."""
    known = read(script, given)
    (own, one), processor = own_row(known, given), known["processor"]

    async def prompt():
        shown, environment = await begun(one, processor, own)
        made = build_prompt(one, generator_of(processor), own, shown)
        if environment is not None:
            await rollouts.put_away(environment, one, False, own)
        return shown, made

    shown, made = asyncio.run(prompt())
    pictures = [picture(source, own) for source in image_sources(shown)[:8]]
    others = {name: text_of(value)[:MOST_TEXT] for name, value in one.items() if name not in ("image", "images")}
    return {
        "tokens": {"prompt": samples.spelled(np.array([], int), vocabulary_of(processor)), "columns": {}, "turns": []}
        | {"completion": samples.spelled(np.array(made.token_ids), vocabulary_of(processor))},
        "length": len(made.token_ids),
        "limit": own.max_prompt_length,
        "columns": others,
        "images": pictures,
        "text": readable_prompt(text_of(shown["prompt"])),
        "generations": rollouts.group_size(one, own),
    }


def picture(source, cfg) -> str:
    """As the model gets it, after scaling."""
    image, _ = load_image(source, cfg)
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


# ---- what a hand types ----------------------------------------------------------------------------------------------


class Typed:
    """A generator whose tokens somebody has typed: `generate` gives the next ones.

    texts: a list of {"text"}, or {"ids", "finish"} where the tokens themselves are known."""

    image_bytes, rope_index = 0, None

    def __init__(self, processor, texts: list[dict]):
        self.tokenizer, self.texts, self.place = processor, texts, 0

    def tokens(self, given: dict, most: int) -> tuple[list[int], str]:
        """(ids, as a policy would have sampled them, with the token that ends a turn; how it ended)."""
        tokenizer = getattr(self.tokenizer, "tokenizer", self.tokenizer)
        ids, end = given.get("ids"), tokenizer.eos_token_id
        finish = given.get("finish") or "stop"
        if ids is None:
            ids = tokenizer(given["text"], add_special_tokens=False)["input_ids"]
            ids = ids if end is None or given.get("finish") == "length" else [*ids, end]
        return (ids, finish) if len(ids) <= most else (ids[:most], "length")

    async def generate(self, prompt_ids, *, n=1, max_tokens, **_) -> list[Completion]:
        made = []
        for _ in range(n):
            ids, finish = self.tokens(self.texts[min(self.place, len(self.texts) - 1)], max_tokens)
            self.place += 1
            made.append(Completion(ids, [0.0] * len(ids), finish, 0, list(prompt_ids)))
        return made


def checked_texts(given: dict) -> list[dict]:
    texts = given.get("completions")
    ok = isinstance(texts, list) and 0 < len(texts) <= MOST_COMPLETIONS
    if not ok or not all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in texts):
        raise ConfigError(f"give 1 to {MOST_COMPLETIONS} completions.")
    return texts


# ---- rewards --------------------------------------------------------------------------------------------------------


def own_row(known: dict, given: dict) -> tuple[TrainConfig, dict]:
    """The row that is scored, and its domain's config."""
    part, one = chosen(known, given)
    own = known["cfg"].of(one) if known["cfg"].domains else known["cfg"]
    return own, one


def score(script: Script, given: dict) -> dict:
    """Completions of a row, typed or sampled now, scored as in training, and the advantages of the group."""
    known = read(script, given)
    script.forget()
    own, one = own_row(known, given)
    processor, notes = known["processor"], []
    sampling = given.get("sample")
    if sampling:
        size = number_of(sampling, "n", 1, MOST_COMPLETIONS)
        own = replace(own, temperature=float(sampling.get("temperature") or own.temperature))
        generator = sampler_of(script, own, processor)
    else:
        texts = checked_texts(given)
        size, generator = len(texts), Typed(processor, texts)
        if own.rollout == "multi_turn":
            own = replace(own, max_turns=1)
            notes.append("Typed completions are one turn; whole trajectories are played under Tools, or sampled.")
    own = replace(own, num_generations=size)
    begun_at = time.perf_counter()
    trajectories = asyncio.run(rollouts.call_rollout(one, generator, own))
    seconds = time.perf_counter() - begun_at
    failed = [t for t in trajectories if "failure" in t.info]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(trajectories)} failed: {failed[0].info['failure']}")
    for number, t in enumerate(trajectories):
        t.group = 0
        t.info["row_number"] = given.get("row", 0)
        t.info["number"] = number
    functions = all_scored(trajectories, own, processor)
    told = advantages(script, trajectories, own) if not any(f["error"] for f in functions) else {}
    batch = told.pop("batch", None)
    means = told.pop("means", [None] * size)
    totals = [sum(t.token_rewards) for t in trajectories]
    known_ids = vocabulary_of(processor)
    shown = completion_rows(trajectories, totals, means, batch, with_tokens=True)
    return {
        "functions": functions,
        "completions": [
            {
                "text": t.info["completion"],
                "ids": list(t.token_ids) if all(t.loss_mask) else None,
                "finish": t.finish_reason,
                "reward": total,
                "advantage": mean,
                "length": sum(t.loss_mask),
                "turns": samples.turns(row),
                "tokens": samples.token_view(arrays(row), known_ids),
            }
            for t, total, mean, row in zip(trajectories, totals, means, shown, strict=True)
        ],
        "notes": notes + told.get("notes", []),
        "advantage": own.advantage,
        "several": own.rollout == "multi_turn",
        "seconds": seconds,
    }


def arrays(row: dict) -> dict:
    return {name: np.asarray(value) if name.endswith("_ids") else value for name, value in row.items()}


def number_of(given: dict, name: str, low: int, high: int) -> int:
    value = given.get(name)
    if not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r:.40}; give a number from {low} to {high}.")
    return value


def sampler_of(script: Script, own, processor):
    """A generator of the model, as it is before training: a server, or a copy in this process."""
    if own.generator == "vllm":
        client = utils.reach_servers(replace(own, server_timeout=min(own.server_timeout, 20.0)))
        client.tokenizer, client.rope_index = processor, None
        return client
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # here nothing is forked after it
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = script["load_hf_model"](own, getattr(torch, own.compute_dtype)).to(device)
    generator = HFGenerator(model, processor)
    generator.seed(time.time_ns() % 2**31)
    return generator


def all_scored(trajectories: list, own, processor) -> list[dict]:
    weights = own.reward_weights or [1.0] * len(own.reward_funcs)
    pairs = zip(own.reward_funcs, weights, strict=True)
    return [scored(spec, weight, trajectories, own, processor) for spec, weight in pairs]


def scored(spec: str, weight: float, trajectories: list, own, processor) -> dict:
    """One reward function on the group, alone: its values, seconds, what it printed, or what it raised, and where. What
    it is worth is added to the trajectories' rewards, as `rewards.score` does it for all."""
    one = replace(own, reward_funcs=[spec], reward_weights=[weight])
    told = {"name": spec, "weight": weight, "error": None, "where": None, "values": [], "components": []}
    before = [dict(t.info.get("rewards", {})) for t in trajectories]
    with printed() as said:
        start = time.perf_counter()
        try:
            columns = set(trajectories[0].row)
            functions = rewards.get_reward_functions(one, columns)
            start = time.perf_counter()  # without what it takes to import it
            asyncio.run(rewards.score(trajectories, functions, one, processor))
        except BaseException as error:
            whole = isinstance(error, ConfigError | rewards.RewardError)
            text = str(error) if whole else f"{type(error).__name__}: {error}"
            # A ConfigError is raised by a line of ours, which says nothing of the user's.
            told |= {"error": credentials.mask(text)}
            told |= {"where": None if isinstance(error, ConfigError) else place_of(error)}
        told["seconds"] = time.perf_counter() - start
    told["said"] = said()
    if not told["error"]:
        name = spec.rpartition(":")[2]
        for t, old in zip(trajectories, before, strict=True):
            found = t.info["rewards"]
            told["values"].append(found[name])
            told["components"].append({key.partition("/")[2]: v for key, v in found.items() if key != name})
            t.info["rewards"] = old | found
        told["late"] = trajectories[0].info["reward_timeouts"] > 0
    return told


class printed:
    """What is printed under this block, by this process or by what it starts: `said()` afterwards."""

    def __enter__(self):
        self.tail = Tail()
        sys.stdout.flush(), sys.stderr.flush()
        self.saved = os.dup(1), os.dup(2)
        for number in (1, 2):
            os.dup2(self.tail.writer, number)
        os.close(self.tail.writer)
        return lambda: self.text

    def __exit__(self, *_):
        sys.stdout.flush(), sys.stderr.flush()
        for number, saved in zip((1, 2), self.saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        self.tail.thread.join(0.1)  # it ends when nobody can write any more
        self.text = self.tail.since(0)[0]


def place_of(error: BaseException) -> dict | None:
    """The line of a user's file on which an error came up: {"file", "line", "text", "trace"}."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    here = [f for f in frames if Path(f.filename).is_relative_to(Path.cwd()) and ".venv" not in f.filename]
    if isinstance(error, SyntaxError) and error.filename:
        return {"file": error.filename, "line": error.lineno, "text": (error.text or "").strip(), "trace": ""}
    if not here:
        return None
    last = here[-1]
    file = os.path.relpath(last.filename)
    trace = "".join(traceback.format_list(here))[-4000:]
    return {"file": file, "line": last.lineno, "text": last.line, "trace": trace}


def advantages(script: Script, trajectories: list, own) -> dict:
    """{"batch", "means": the advantage of each, "notes"}: of this group alone."""
    notes = []
    if own.kl_in_reward:
        own, notes = replace(own, kl_in_reward=False), ["Without --kl_in_reward, which needs the model."]
    batch = script["collate"](trajectories, 0, torch.device("cpu"), 0, 0)
    try:
        script["shape_rewards"](batch, own, {})
        script["add_advantages"](batch, own)
    except Exception as error:
        return {"notes": [*notes, f"--advantage {own.advantage} needs more than one group's rewards: {error}"]}
    means = script["row_mean"](batch.advantages, batch.loss_mask)[:, 0].tolist()
    return {"batch": batch, "means": means, "notes": notes}


# ---- tools and environments -----------------------------------------------------------------------------------------


def tools(script: Script, given: dict) -> dict:
    """What the model is told of its tools, in the prompt of a row, and the turns that an environment offers."""
    known = read(script, given)
    own, one = own_row(known, given)
    if own.rollout != "multi_turn":
        return {"tools": [], "several": False, "env": None, "actions": []}

    async def look():
        shown, environment = await begun(one, known["processor"], own)
        listed = [tool.schema()["function"] for tool in environment.tools.values()]
        told = listed, environment.instructions, bool(shown.get("tool_schemas")), list(map(str, environment.actions()))
        await rollouts.put_away(environment, one, False, own)
        return told

    listed, instructions, by_template, actions = asyncio.run(look())
    return {
        **{"tools": listed, "several": True, "env": own.env, "parser": own.tool_parser, "actions": actions[:32]},
        "told": "by the chat template" if by_template else instructions,
    }


def call(script: Script, given: dict) -> dict:
    """One call of a tool, as the environment makes it for the model."""
    known = read(script, given)
    own, one = own_row(known, given)
    try:
        arguments = json.loads(given.get("arguments") or "{}")
    except ValueError as error:
        raise ConfigError(f"the arguments are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ConfigError('the arguments are a JSON object, as {"name": "value"}.')

    async def made():
        _, environment = await begun(one, known["processor"], own)
        if not hasattr(environment, "toolbox"):
            raise ConfigError(f"--env {own.env} reads its calls itself: play it.")
        wanted = Call(str(given.get("name")), arguments)
        await environment.enter_servers([wanted])
        messages, events = await environment.toolbox.run([wanted], environment.tools)
        await rollouts.put_away(environment, one, False, own)
        return messages[0], events[0]

    message, event = asyncio.run(made())
    told = {"content": text_of(message["content"]), "seconds": event["seconds"], "failed": bool(event["failed"])}
    return told


class Game:
    """A trajectory that somebody plays as the model: the training's own rollout, whose generator waits for a text."""

    def __init__(self, script: Script, known: dict, given: dict):
        self.processor = known["processor"]
        self.own, self.row = own_row(known, given)
        self.own = replace(self.own, num_generations=1, env_errors="stop")
        self.said, self.asked = queue.Queue(), queue.Queue()
        self.spans: list[tuple[int, int]] = []  # of the player's tokens, among all
        self.start = 0  # tokens of the prompt
        threading.Thread(target=self.play, daemon=True).start()

    def play(self) -> None:
        try:
            typed = Typed(self.processor, [])
            typed.generate = partial(self.generate, typed)
            found = asyncio.run(rollouts.call_rollout(self.row, typed, self.own))
            self.asked.put(("end", found[0]))
        except BaseException as error:
            self.asked.put(("error", error))

    async def generate(self, typed: Typed, prompt_ids, *, n=1, max_tokens, **_) -> list[Completion]:
        self.asked.put(("turn", list(prompt_ids), max_tokens))
        text = await asyncio.get_running_loop().run_in_executor(None, self.said.get)
        ids, finish = typed.tokens({"text": text}, max_tokens)
        self.spans.append((len(prompt_ids), len(prompt_ids) + len(ids)))
        return [Completion(ids, [0.0] * len(ids), finish, 0, list(prompt_ids))]

    def next(self) -> dict:
        """What follows: a turn to take, or how it ended."""
        kind, *found = self.asked.get()
        known = vocabulary_of(self.processor)
        if kind == "error":
            raise found[0]
        if kind == "turn":
            ids, left = found
            self.start = self.start or len(ids)
            mask = [any(a <= n < b for a, b in self.spans) for n in range(self.start, len(ids))]
            last = self.spans[-1][1] if self.spans else 0
            spans = [(a - self.start, b - self.start) for a, b in self.spans]
            row = {"prompt_ids": np.array(ids[: self.start]), "token_ids": np.array(ids[self.start :], int)}
            row |= {"tokens/trained": np.array(mask, bool), "turns": [{"start": a, "end": b} for a, b in spans]}
            answer = self.processor.decode(ids[last:])
            return {"over": False, "tokens": samples.token_view(row, known), "answer": answer, "left": left}
        (trajectory,) = found
        functions = all_scored([trajectory], self.own, self.processor)
        total = sum(trajectory.token_rewards)
        (row,) = completion_rows([trajectory], [total], [None], with_tokens=True)
        return {
            **{"over": True, "tokens": samples.token_view(arrays(row), known), "turns": samples.turns(row)},
            **{"finish": trajectory.finish_reason, "reward": total, "functions": functions},
        }


def play(script: Script, given: dict) -> dict:
    """Begin a trajectory of a row; "actions": turns that can be chosen, where the environment names them."""
    known = read(script, given)
    actions = tools(script, given)["actions"]
    script.forget()
    script.game = Game(script, known, given)
    return script.game.next() | {"actions": actions}


def say(script: Script, given: dict) -> dict:
    """The model's next turn."""
    if script.game is None:
        raise ConfigError("nothing is being played; begin anew.")
    if not isinstance(given.get("text"), str):
        raise ConfigError("give the turn's text.")
    script.game.said.put(given["text"])
    return script.game.next()


# ---- whether it fits ------------------------------------------------------------------------------------------------


def fit(script: Script, given: dict) -> dict:
    """What plan.py says."""
    plan = script.plan
    names = {field.name for field in flags(plan.PlanConfig)} | {"config"}
    given = given | {"settings": {k: v for k, v in (given.get("settings") or {}).items() if k in names}}
    settings = given["settings"] | (given.get("plan") or {})
    cfg, _ = settled(script, given | {"settings": settings}, plan.PlanConfig)
    return plan.told(cfg)


ACTIONS = {"form": form, "check": check, "rows": rows, "row": row, "score": score, "tools": tools, "call": call}
ACTIONS |= {"play": play, "say": say, "fit": fit}


def apart(script: Script, action: str, given: dict) -> bool:
    """Whether an action is done in a fork of the session's process, so that a crash costs no more than its answer. Not
    where there are tools: servers and threads of the session's process are not in a fork."""
    if action in ("form", "check", "fit"):
        return True
    return action == "score" and all(own.rollout != "multi_turn" for own in read(script, given)["cfg"].by_domain())
