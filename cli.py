"""From a dataclass to a command line: flags, choices, --help from the fields' comments, YAML, and "did you mean".

Knows nothing of what is configured; config.py does.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import io
import math
import os
import re
import sys
import textwrap
import tokenize
import types
import typing
from typing import Literal

import yaml


class ConfigError(ValueError):
    """A setting that cannot work. The message says what was given, what is allowed and what to do."""


def nearest(name: str, known) -> str | None:
    """The known name that `name` was probably meant to be."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1)), None)


def known_name(kind: str, name: str, known) -> None:
    """Raise ConfigError if `name` is not in `known`, listing what is and the nearest guess."""
    if name not in known:
        guess = nearest(name, known)
        hint = f" Did you mean {guess!r}?" if guess else ""
        raise ConfigError(f"{kind}: unknown name {name!r}; known are {', '.join(sorted(known))}.{hint}")


def field_help(cls: type) -> dict[str, tuple[str, str]]:
    """Field name -> (group, help): the comment behind the field, under its `# --- group ---`, bases first."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed([c for c in cls.__mro__ if dataclasses.is_dataclass(c)]):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # typed into an interpreter: works, without help texts
            continue
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
        rulers = {line: text.strip("- ") for line, text in comments.items() if re.fullmatch("--- .+ ---", text)}
        for node in ast.parse(source).body[0].body:
            if isinstance(node, ast.AnnAssign):
                above = [name for line, name in rulers.items() if line < node.lineno]
                inherited = found.get(node.target.id, ("of this script", ""))
                text = [comments[line] for line in range(node.lineno, node.end_lineno + 1) if line in comments]
                found[node.target.id] = (above[-1] if above else inherited[0], " ".join(text) or inherited[1])
    return found


def _split(annotation) -> tuple[object, bool]:
    """`X | None` -> (X, True); anything else -> (itself, False)."""
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType) and type(None) in args:
        return next(a for a in args if a is not type(None)), True
    return annotation, False


def is_none(value) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


KIND_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
KIND_NAMES[dict] = "`name: value` lines in a --config file, not text"


def convert(name: str, annotation, value):
    """A string (command line) or YAML value as the field's type; ConfigError naming the flag otherwise."""
    kind, optional = _split(annotation)
    if typing.get_origin(kind) is Literal and value in typing.get_args(kind):  # one choice may be called none
        return value
    if typing.get_origin(kind) is list:
        items = value if isinstance(value, list) else [value]
        if len(items) == 1 and is_none(items[0]):
            return None if optional else []
        return [convert(name, typing.get_args(kind)[0], item) for item in items]
    if is_none(value):
        if optional:
            return None
        raise ConfigError(f"--{name}: cannot be unset; give a value.")
    if typing.get_origin(kind) is Literal:
        known_name(f"--{name}", value, typing.get_args(kind))
    if kind is dict and isinstance(value, dict):
        return value
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    try:
        # YAML knows true, lists and maps: str() would take them all, and int(True) is 1.
        if kind is bool or not isinstance(value, (str, int, float)) or (isinstance(value, bool) and kind is not str):
            raise ValueError
        # int("1e3") fails and int(1.5) truncates: go through float and insist that nothing is lost.
        if kind is int and not isinstance(value, int) and not re.fullmatch(r"[+-]?\d+", str(value)):
            if float(value) != int(float(value)):
                raise ValueError
            return int(float(value))
        if kind is float and math.isnan(float(value)):
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"--{name}={value}: expected {KIND_NAMES.get(kind, kind)}.") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ConfigError(f"{message}. See --help.")


def build_parser(cls: type, description: str | None = None) -> argparse.ArgumentParser:
    hints, helps, groups = typing.get_type_hints(cls), field_help(cls), {}
    parser = _Parser(
        prog=os.path.basename(sys.argv[0]),
        description=description,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
        usage="[torchrun --nproc_per_node=N] %(prog)s [--config FILE.yaml] [--flag value ...]",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of `flag: value` lines; the command line wins over it"
    )
    for f in dataclasses.fields(cls):
        group, text = helps.get(f.name, ("options", ""))
        groups.setdefault(group, parser.add_argument_group(group) if group not in groups else None)
        kind, _ = _split(hints[f.name])
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        options = dict(dest=f.name, default=argparse.SUPPRESS, help=f"{text} [{shown}]".replace("%", "%%"))
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is list:
            options |= dict(nargs="*", metavar="X")
        elif typing.get_origin(kind) is Literal:
            options["metavar"] = "{" + ",".join(map(str, typing.get_args(kind))) + "}"
        else:
            options["metavar"] = kind.__name__.upper()
        groups[group].add_argument(f"--{f.name}", **options)
    return parser


OF_OTHER_SCRIPTS = {"max_staleness": "train_async.py", "asynchronous": "train_async.py, which takes these flags"}


def unknown_argument(given: str, hints: dict) -> ConfigError:
    """What was meant by an argument that the parser does not know."""
    if not given.startswith("--"):
        return ConfigError(
            f"unexpected {given!r}. Switches take no value: --flag turns one on, --no-flag off. See --help."
        )
    flags = {f"--{name}": name for name in hints} | {
        f"--no-{n}": f"no_{n}" for n, kind in hints.items() if kind is bool
    }
    word = given.split("=")[0].lstrip("-").replace("-", "_").lower()
    if word in OF_OTHER_SCRIPTS:
        return ConfigError(f"unknown argument {given!r}: it is one of {OF_OTHER_SCRIPTS[word]}.")
    if "." in word:
        return ConfigError(f"unknown argument {given!r}. Settings of a domain stand in the list of the --config file.")
    guess = nearest(word, flags.values())
    meant = next((flag for flag, name in flags.items() if name == guess), None)
    hint = f"Did you mean {meant}?" if meant else "See --help."
    return ConfigError(f"unknown argument {given!r}. {hint} A knob of your own stands above the line CONFIG = ...")


def read_yaml(path: str, known: list[str]) -> dict:
    """`flag: value` lines of a --config file, the names checked; without the section `example`, which
    examples/run.py reads and checks."""
    try:
        with open(path) as file:
            values = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"--config={path}: cannot be read ({error.strerror}); give a YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--config={path}: not YAML ({' '.join(str(error).split())}); write `flag: value` lines."
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"--config={path}: expected `flag: value` lines, found a {type(values).__name__}.")
    if isinstance(values.get("example"), dict):
        del values["example"]
    for name in values:
        known_name(f"--config={path}", name, known)
    return values


def shorten(value, limit: int = 200) -> str:
    try:
        text = repr(value)
    except Exception:  # whatever a class of somebody else's raises here must not hide what is being said about it
        text = f"<a {type(value).__name__} that cannot be shown>"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
