"""The shape of the house: arrows between modules run down only."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("algorithms", "envs", "inputs", "runlog", "safety", "scoring", "serving")
SCRIPTS = ("train_grpo", "train_ppo", "vllm_server")


def modules() -> dict[str, Path]:
    """{dotted name: file} of everything that is imported, tests and examples left out."""
    files = [*ROOT.glob("*.py"), *(file for room in ROOMS for file in (ROOT / room).glob("*.py"))]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports anywhere: at its top, in a function, for types alone."""
    for node in ast.walk(ast.parse(file.read_text())):
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
    """Nothing imports what people copy, but train_ppo.py, which is GRPO's loop with a critic."""
    found = {name: needed & set(SCRIPTS) for name, needed in graph().items()}
    assert {name: needed for name, needed in found.items() if needed} == {"train_ppo": {"train_grpo"}}


def test_the_root_is_small():
    """What to copy, what to edit, what to start, in one glance; a file more wants a reason."""
    assert len(list(ROOT.glob("*.py"))) <= 15
