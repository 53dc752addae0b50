"""The shape of the house: arrows between modules run down only."""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
ROOMS = ("algorithms", "envs", "inputs", "looking", "runlog", "safety", "scoring", "serving")


def modules() -> dict[str, Path]:
    """{dotted name: file} of everything that is imported, tests and examples left out."""
    files = [*ROOT.glob("*.py"), *(file for room in ROOMS for file in (ROOT / room).glob("*.py"))]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports anywhere: at its top, in a function, for types alone."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from inner & known.keys()
            if not inner <= known.keys():  # a name that stands in the module itself
                yield node.module


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: set(imported(file, known)) for name, file in known.items()}


def test_no_import_circle():
    try:
        order = list(TopologicalSorter(graph()).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(reversed(error.args[1]))}")
    assert len(order) == len(modules())


def test_nothing_reaches_up():
    """Only scripts build on a script: train_ppo.py and train_async.py on GRPO's loop, and copies of them."""
    scripts = {
        name for name, file in modules().items() if '\nif __name__ == "__main__":' in file.read_text(encoding="utf-8")
    }
    scripts -= {"rollouts"}  # it plays environments from the command line, and is a module all the same
    scripts = {name for name in scripts if "." not in name}
    found = {name for name, needed in graph().items() if needed & scripts}
    assert found <= scripts and {"train_ppo", "train_async"} <= found


def test_imports_stand_at_the_top():
    """But for packages that are optional or take seconds to import, and modules of ours that import such: --help and
    mistakes answer at once. Others say why."""
    late = []
    for file in modules().values():
        lines = file.read_text(encoding="utf-8").split("\n")
        for function in ast.walk(ast.parse("\n".join(lines))):
            for node in ast.walk(function) if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) else ():
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                    standard = any(name.partition(".")[0] in sys.stdlib_module_names for name in names)
                    said = "#" in "".join(lines[node.lineno - 2 : node.lineno])
                    late += [f"{file.name}:{node.lineno} {names}"] * (standard and not said)
    assert not late


def without_encoding(call: ast.Call) -> bool:
    """Whether a call reads or writes text in the encoding of the machine's locale."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "encoding" in given or None in given:
        return False
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if method else getattr(call.func, "id", "")
    if name in ("read_text", "write_text"):
        return len(call.args) < 1 + (name == "write_text")
    if name in ("open", "fdopen"):
        place = 0 if method and name == "open" else 1  # of the mode; pathlib's open has no file before it
        mode = given.get("mode") or next(iter(call.args[place:]), ast.Constant("r"))
        known = isinstance(mode, ast.Constant) and isinstance(mode.value, str)
        if place == 0 and not (known and set(mode.value) <= set("rwax+bt")):
            return False  # another open, such as PIL's or os.open
        return not (known and "b" in mode.value)
    return any(getattr(given.get(word), "value", False) is True for word in ("text", "universal_newlines"))


def test_text_is_never_read_or_written_in_the_encoding_of_the_locale():
    """Under LC_ALL=C without UTF-8 mode it is ASCII, and a run ends at the first other letter."""
    files = [*ROOT.glob("*.py")]
    for room in (*ROOMS, "examples", "recipes", "scripts", "tests", "benchmarks"):
        files += (ROOT / room).rglob("*.py")
    nodes = ((file, node) for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:90]}"
        for file, node in nodes
        if isinstance(node, ast.Call) and without_encoding(node)
    ]
    assert not found, "give encoding='utf-8':\n" + "\n".join(found)
