"""The form of a script's settings, what they are and what is wrong with them, and whether a run with them fits."""

import importlib.util
import json
import math
import os
import re
import shlex
import sys
import typing
from dataclasses import MISSING, replace
from pathlib import Path
from types import ModuleType

import data
import domains
from cli import ConfigError, field_help, flags, known_name, without_none
from config import TrainConfig, load_config
from looking.prepare import DROPPED
from plugins import function_path
from runlog.log import name_run
from safety import credentials

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
        self.game = None  # what is played (tools.py)

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
    """ConfigError for code outside of the folder in which the page was started: a python file, as load_function finds
    it, or a file of MCP servers, whose commands are run."""
    if name == "mcp_config":
        what, paths = "MCP servers of files", [Path(spec)]
    else:
        found = map(function_path, (spec, spec.partition("?")[0]))  # not everything that names one takes arguments
        what, paths = "python files", [Path(path).expanduser() for path, _ in filter(None, found)]
    here = Path.cwd().resolve()
    for path in map(Path.resolve, paths):
        if not path.is_relative_to(here) or path.is_relative_to(here / DROPPED):  # the page puts files of others there
            raise ConfigError(f"--{name}={spec}: from here only {what} in {Path.cwd()} are run; copy it there.")


# may name files that are run
CODE = ("dataset_id", "eval_dataset_id", "reward_funcs", "tools", "env", "teacher_prompt", "mcp_config")


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
        "settings": {name: text for name, text in settings.items() if name not in NOT_SHOWN},
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


def fit(script: Script, given: dict) -> dict:
    """What plan.py says."""
    plan = script.plan
    names = {field.name for field in flags(plan.PlanConfig)} | {"config"}
    given = given | {"settings": {k: v for k, v in (given.get("settings") or {}).items() if k in names}}
    settings = given["settings"] | (given.get("plan") or {})
    cfg, _ = settled(script, given | {"settings": settings}, plan.PlanConfig)
    return plan.told(cfg)
