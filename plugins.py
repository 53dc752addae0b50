"""Code of others: named on the command line, as path/to/file.py:function, and packages that not every run needs."""

import ast
import hashlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from urllib.parse import unquote_plus

from cli import ConfigError


def function_path(spec: str) -> tuple[str, str] | None:
    """`path/to/file.py:function` -> (path, function); None for anything else."""
    found = re.fullmatch(r"(.+\.py):(\w+)", spec)
    return (found[1], found[2]) if found else None


def with_arguments(spec: str) -> tuple[str, dict]:
    """`NAME?key=value&...` -> (NAME, {key: value}). A value is a literal of python where it can be one, or true, false,
    none; else text. As in an address, + is a blank; %26 stands for a &, %2B for a +. ConfigError for a part without a
    value, and for a key given twice."""
    name, _, query = spec.partition("?")
    arguments = {}
    for part in filter(None, query.split("&")):
        key, equals, text = part.partition("=")
        key, text = unquote_plus(key), unquote_plus(text)
        if not key or not equals:
            raise ConfigError(f"{spec}: {part!r} is no key=value; a switch is written {key or 'key'}=true.")
        if key in arguments:
            raise ConfigError(f"{spec}: {key} is given twice; leave one out.")
        try:
            arguments[key] = ast.literal_eval(text.capitalize() if text in ("true", "false", "none") else text)
        except (ValueError, SyntaxError):
            arguments[key] = text
    return name, arguments


def require(module: str, what: str, install: str | None = None) -> None:
    """ConfigError that says what to install, if `what` needs a module that is not there. Imports nothing.

    install: pip's arguments, where its name and pinned version are not all."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{what}: {module} is not installed; pip install {install}" if install else not_installed(module, what)
        )


def not_installed(module: str, what: str) -> str:
    package = module.replace("_", "-")
    pinned = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("requirements*.txt"))
    found = re.search(rf"^{re.escape(package)}==[\w.]+", pinned, re.MULTILINE)
    return f"{what}: {package} is not installed; pip install {found[0] if found else package}"


def load_function(spec: str, also: type | tuple = ()):
    """The function `path/to/file.py:function`, or a value of the type `also`. A file runs once, however many are taken
    from it."""
    path, name = function_path(spec)
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{spec}: there is no file {path} (looked in {Path.cwd()}).")
    # The hash keeps apart two files of the same name in different folders.
    module_name = f"user_{file.stem}_{hashlib.sha1(str(file).encode()).hexdigest()[:8]}"
    if module_name not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(module_name, file)
        sys.modules[module_name] = importlib.util.module_from_spec(module_spec)
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))  # last: the file can import its neighbours, which never shadow ours
        try:
            module_spec.loader.exec_module(sys.modules[module_name])
        except BaseException as error:
            del sys.modules[module_name]
            if isinstance(error, ModuleNotFoundError) and "==" in (text := not_installed(error.name, spec)):
                raise ConfigError(text) from error
            raise
    names = vars(sys.modules[module_name])
    if name not in names or not (callable(names[name]) or isinstance(names[name], also)):
        own = [
            n for n, f in names.items() if (inspect.isfunction(f) or inspect.isclass(f)) and f.__module__ == module_name
        ]
        raise ConfigError(
            f"{spec}: {path} has no {name!r}; it has {', '.join(n for n in own if n[0] != '_') or 'nothing'}."
        )
    return names[name]
