"""From a dataclass to a command line: flags, choices, --help from the fields' comments, YAML, and "did you mean".

Knows nothing of what is configured; config.py does.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import json
import math
import os
import re
import stat
import sys
import textwrap
import tokenize
import types
import typing
from typing import Literal

import yaml


class ConfigError(ValueError):
    """A setting that cannot work. The message says what was given, what is allowed and what to do."""

    status = 2  # the process's, by which a loop that starts a run again knows that this does not help


class NotNow(ConfigError):
    """A setting that cannot work as things are: a lock, a disk, a server. Another try may help."""

    status = 1


def nearest(name: str, known) -> str | None:
    """The known name that `name` was probably meant to be."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1)), None)


def known_name(kind: str, name: str, known, elsewhere: dict[str, str] | None = None) -> None:
    """Raise ConfigError if `name` is not in `known`, listing what is and the nearest guess.

    elsewhere: {name: the script that has it}, of names that other scripts know."""
    if isinstance(name, (list, dict)):
        raise ConfigError(f"{kind}: {name!r:.200} is a list or a map; give one of {', '.join(sorted(known))}.")
    if name not in known:
        guess = nearest(name, known)
        hint = f" Did you mean {guess!r}?" if guess else ""
        if script := (elsewhere or {}).get(name):
            hint = f" {name!r} is for {script}: start that with the same flags."
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


def without_none(annotation) -> tuple[object, bool]:
    """`X | None` -> (X, True); anything else -> (itself, False)."""
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType) and type(None) in args:
        return next(a for a in args if a is not type(None)), True
    return annotation, False


def is_none(value) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


KIND_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
KIND_NAMES[dict] = "`name: value` lines in a --config file, or JSON such as '{\"name\": 1}'"


def convert(name: str, annotation, value):
    """A string (command line) or YAML value as the field's type; ConfigError naming the flag otherwise."""
    kind, optional = without_none(annotation)
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
    if kind is dict and isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):  # what is no JSON fails below
            value = json.loads(value)
    if kind is dict and isinstance(value, dict):
        switch = next((v for v in value.values() if isinstance(v, _Switch)), None)
        if switch and name != "domains":  # what an entry of `domains` holds is converted by its own name later
            raise ConfigError(f"--{name}: {switch} in it may be a switch or a text; write true or false, or quote it.")
        return value
    if kind is bool and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if kind is bool and isinstance(value, _Switch):
        return value.lower() in ("yes", "on")
    if kind is str and isinstance(value, bool):
        raise ConfigError(f"--{name}={str(value).lower()}: expected text; write it in quotes.")
    try:
        # YAML knows true, lists and maps: str() would take them all, and int(True) is 1.
        if kind is bool or not isinstance(value, (str, int, float)) or isinstance(value, bool):
            raise ValueError
        # int("1e3") fails and int(1.5) truncates: go through float and insist that nothing is lost.
        if kind is int and not isinstance(value, int) and not re.fullmatch(r"[+-]?\d+", str(value)):
            if float(value) != int(float(value)):
                raise ValueError
            return int(float(value))
        if kind is float and math.isnan(float(value)):
            raise ValueError
        return str(value) if kind is str else kind(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"--{name}={cut(str(value))}: expected {KIND_NAMES.get(kind, kind)}.") from None


class _Parser(argparse.ArgumentParser):
    def __init__(self, **how):
        super().__init__(**how)
        # What begins like a number below 0 is a value; argparse's own pattern knows neither 1e-3 nor inf.
        self._negative_number_matcher = re.compile(r"-(?:\d|\.\d|inf$)")

    def error(self, message):
        raise ConfigError(f"{message}. See --help.")


class _Listed(argparse.Action):
    """Several values behind one flag. As with any flag the last one counts; that it takes the place of another is said,
    as many programs would add them up."""

    def __call__(self, parser, namespace, values, option_string=None):
        before, flag = getattr(namespace, self.dest, None), f"--{self.dest}"
        if before and before != values and os.environ.get("RANK", "0") == "0":
            print(
                f"{flag} is given twice; the last counts: {' '.join(values) or 'none'}. Several values stand behind "
                f"one flag: {flag} {' '.join(before + values)}",
                file=sys.stderr,
            )
        setattr(namespace, self.dest, values)


def flags(cls: type) -> list[dataclasses.Field]:
    """The fields that are flags: all but those declared with metadata={"flag": False}, which code sets. Of a class with
    `own_flags_alone = True` those that it declares itself; others keep their defaults."""
    own = cls.__annotations__ if getattr(cls, "own_flags_alone", False) else None
    known = [field for field in dataclasses.fields(cls) if own is None or field.name in own]
    return [field for field in known if field.metadata.get("flag", True)]


def help_page(cls: type, word: str) -> dict[str, str]:
    """Flag -> heading on the page that `--help WORD` prints, in the order in which they stand there.

    "": those of `cls.first_flags`, by what one wants to do, and those that a script adds; "all": all, by the rulers in
    the class; another word: those that have it in their name or help text. ConfigError if none has."""
    names = [field.name for field in flags(cls)]
    helps = dict.fromkeys(names, ("options", "")) | field_help(cls)
    base = next((c for c in cls.__mro__ if "first_flags" in vars(c)), None)
    if word == "all" or (not word and base is None):
        return {name: helps[name][0] for name in names}
    if not word:
        added = names if getattr(cls, "own_flags_alone", False) else set(names) - {field.name for field in flags(base)}
        first = {name: wish for wish, listed in base.first_flags.items() for name in listed.split() if name in names}
        return first | {name: "of this script" for name in names if name in added and name not in first}
    wanted = word.lstrip("-").replace("-", "_").lower()
    found = {n: helps[n][0] for n in names if wanted in n or word.lower() in helps[n][1].lower()}
    if not found:
        raise ConfigError(f"--help {cut(word)}: no flag has it in its name or text; --help all shows every flag.")
    return found


def build_parser(cls: type, description: str | None = None, page: str = "all") -> argparse.ArgumentParser:
    """The parser of all flags, whose help text is the page that `help_page` calls so."""
    hints, helps, shown = typing.get_type_hints(cls), field_help(cls), help_page(cls, page)
    fields = {f.name: f for f in flags(cls)}
    rest = len(fields) - len(shown)
    parser = _Parser(
        prog=os.path.basename(sys.argv[0]),
        description=description,
        epilog=f"{rest} more flags: --help all. Those with a word in name or text: --help WORD." if rest else None,
        add_help=False,
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=120),
        usage="[torchrun --nproc_per_node=N] %(prog)s [--config FILE.yaml] [--flag value ...]",
    )

    class Help(argparse.Action):
        def __call__(self, parser, namespace, word, option_string=None):
            build_parser(cls, description, word).print_help()
            parser.exit()

    text = "the flags one needs first; `all`: every flag; else those with WORD in name or text"
    options = dict(nargs="?", const="", default=argparse.SUPPRESS, metavar="WORD", help=text)
    parser.add_argument("--help", "-h", action=Help, **options)
    text = "YAML file of `flag: value` lines; of several --config the later win, the command line over all"
    parser.add_argument("--config", metavar="FILE", action="append", help=text)
    groups = {heading: parser.add_argument_group(heading) for heading in dict.fromkeys(shown.values())}
    for f in [fields[name] for name in dict.fromkeys([*shown, *fields])]:  # those on the page in its order
        kind, _ = without_none(hints[f.name])
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()
        text = helps.get(f.name, ("", ""))[1]
        if default not in (None, "", []):
            text += f" [{' '.join(map(str, default)) if isinstance(default, list) else default}]"
        text = text.replace("%", "%%") if f.name in shown else argparse.SUPPRESS
        options = dict(dest=f.name, default=argparse.SUPPRESS, help=text)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is list:
            options |= dict(nargs="*", metavar="X", action=_Listed)
        elif typing.get_origin(kind) is Literal:
            options["metavar"] = "{" + ",".join(map(str, typing.get_args(kind))) + "}"
        else:
            options["metavar"] = kind.__name__.upper()
        groups.get(shown.get(f.name), parser).add_argument(f"--{f.name}", **options)
    return parser


OF_OTHER_SCRIPTS = {"max_staleness": "train_async.py", "asynchronous": "train_async.py, which takes these flags"}
OF_OTHER_SCRIPTS |= dict.fromkeys(("lam", "critic_warmup"), "train_ppo.py")


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
    hint = f"Did you mean {meant}?" if meant else "See --help all."
    return ConfigError(f"unknown argument {given!r}. {hint} A knob of your own stands above the line CONFIG = ...")


MOST_BYTES, MOST_VALUES, MAX_DEPTH = 1 << 20, 100_000, 100  # of a YAML file; values with aliases written out


class _Whole(int):
    """A whole number of a YAML file. As text it is what was written: 010 is 10, and a run_name of 010 stays one."""

    def __str__(self):
        return self.written


class _Decimal(float):
    """The same for other numbers: 3.10."""

    __str__ = _Whole.__str__


class _Switch(str):
    """yes, no, on or off in a YAML file: a text, but true or false where a setting is one of these."""


class _Refused(yaml.MarkedYAMLError):
    """YAML, but not what this project reads. `problem` and `problem_mark` say what and where."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema, and merge keys (<<). YAML 1.1, PyYAML's own, would read 010 as 8, 12:30 as 750 and off as
    False. A key that stands twice is refused, and so is what would be endless when written out."""

    yaml_implicit_resolvers: dict = {}
    depth = 0

    def compose_node(self, parent, index):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise _Refused(problem=f"lists in lists deeper than {MAX_DEPTH} levels; flatten them", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor):
        node, seen = super().compose_mapping_node(anchor), {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                problem = f"`{cut(key.value)}` stands there twice, first on line {seen[key.value]}; keep one"
                raise _Refused(problem=problem, problem_mark=key.start_mark)
            seen[key.value] = key.start_mark.line + 1
        return node

    def get_single_node(self):
        node = super().get_single_node()
        if node is not None:
            self.measure(node, {})
        return node

    def measure(self, node, known: dict) -> tuple[int, int]:
        """(values in the node, depth of it), aliases written out."""
        if id(node) not in known:
            known[id(node)] = (math.inf, 0)
            parts = node.value if isinstance(node.value, list) else []
            inner = [one for part in parts for one in (part if isinstance(part, tuple) else [part])]  # keys and values
            found = [self.measure(one, known) for one in inner]
            known[id(node)] = 1 + sum(size for size, _ in found), 1 + max((depth for _, depth in found), default=0)
        size, depth = known[id(node)]
        if size > MOST_VALUES or depth > MAX_DEPTH:
            problem = f"with its aliases written out it has over {MOST_VALUES:,} values or {MAX_DEPTH} levels"
            problem = "it holds itself, by an alias" if size == math.inf else problem
            raise _Refused(problem=problem, problem_mark=node.start_mark)
        return size, depth

    def number(self, node):
        text = self.construct_scalar(node)
        kind = _Whole if node.tag.endswith("int") else _Decimal
        try:
            if kind is _Whole:
                value = _Whole(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
            else:
                value = _Decimal(re.sub(r"(?i)\.(?=inf|nan)", "", text))
        except ValueError:
            problem = f"a number of {len(text)} characters cannot be read: {cut(text)}"
            raise _Refused(problem=problem, problem_mark=node.start_mark) from None
        value.written = text
        return value


for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", "<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)
_Loader.add_implicit_resolver("!switch", re.compile("(?:yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF)$"), list("yYnNoO"))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.number)
_Loader.add_constructor("!switch", lambda loader, node: _Switch(node.value))


def load_yaml(path: str):
    """The value in a YAML file, read as YAML 1.2. ConfigError, with the line, for one that cannot be read or that says
    something twice."""
    text = read_text(path, "YAML", MOST_BYTES)
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark, said = error.problem_mark, ", ".join(filter(None, (error.context, error.problem)))
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        wrong = "" if isinstance(error, _Refused) else "not YAML: "
        raise ConfigError(f"{path}{place}: {wrong}{said}. Write `name: value` lines.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}. Write `name: value` lines.") from None


FILE_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_text(path: str, kind: str, most: int) -> str:
    """What a file of settings holds, of at most `most` bytes of UTF-8. ConfigError otherwise; never waits."""
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            what = FILE_KINDS.get(stat.S_IFMT(found.st_mode), "no file")
            raise ConfigError(f"{path}: cannot be read, as it is {what}; give a {kind} file.")
        with open(path, "rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:  # the latter: a NUL in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read ({reason}); give a {kind} file.") from None
    if len(content) > most:
        raise ConfigError(f"{path}: is larger than {most >> 20} MiB; give a {kind} file with settings.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = content.count(b"\n", 0, error.start) + 1, content[error.start]
        raise ConfigError(f"{path}, line {line}: not UTF-8: byte {byte:#x}. Save the file as UTF-8.") from None


def read_yaml(path: str, known: list[str]) -> dict:
    """`flag: value` lines of a --config file, the names checked; without the section `example`, which
    examples/run.py reads and checks."""
    try:
        values = load_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"--config={error}") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"--config={path}: expected `flag: value` lines, found a {type(values).__name__}.")
    if isinstance(values.get("example"), dict):
        del values["example"]
    for name in values:
        known_name(f"--config={path}", name, known)
    return values


def cut(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def shorten(value, limit: int = 200) -> str:
    try:
        text = repr(value)
    except Exception:  # whatever a class of somebody else's raises here must not hide what is being said about it
        text = f"<a {type(value).__name__} that cannot be shown>"
    return cut(text, limit)
