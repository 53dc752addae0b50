"""The shape of the house: arrows between modules run down only."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
ROOMS = sorted(file.parent.name for file in ROOT.glob("*/__init__.py"))


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


@pytest.mark.parametrize("place", [str, lambda name: name.partition(".")[0]], ids=["files", "rooms"])
def test_no_import_circle(place):
    """Between files, and between rooms: folders, and the files at the root."""
    between: dict[str, set[str]] = {}
    for name, needed in graph().items():
        between.setdefault(place(name), set()).update({place(other) for other in needed} - {place(name)})
    try:
        order = list(TopologicalSorter(between).static_order())
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(reversed(error.args[1]))}")
    assert len(order) == len(between) > 20


def test_nothing_reaches_up():
    """Only scripts build on a script: train_ppo.py and train_async.py on GRPO's loop, and copies of them."""
    scripts = {
        name for name, file in modules().items() if '\nif __name__ == "__main__":' in file.read_text(encoding="utf-8")
    }
    scripts = {name for name in scripts if "." not in name}
    found = {name for name, needed in graph().items() if needed & scripts}
    assert found <= scripts and {"train_ppo", "train_async"} <= found
