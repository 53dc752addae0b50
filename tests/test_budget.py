"""The scripts stay readable in one sitting. Raising a number here is a decision; its reason goes into the commit."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(path.name for path in ROOT.glob("*.py"))
LINES = {"train_grpo.py": 1000}  # others: 500
FUNCTION_LINES = {"train": 120}  # two screens; others: one
PARAMETERS = {"save_checkpoint": 8, "generate": 12, "_sample": 9}  # generate's and _sample's are the sampling options


def functions(module: str):
    tree = ast.parse((ROOT / module).read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_keep_their_size(module):
    assert len((ROOT / module).read_text().splitlines()) <= LINES.get(module, 500)
    for function in functions(module):
        lines = function.end_lineno - function.lineno + 1
        assert lines <= FUNCTION_LINES.get(function.name, 65), f"{function.name}: {lines} lines"
        arguments = [a for a in function.args.args + function.args.kwonlyargs if a.arg != "self"]
        assert len(arguments) <= PARAMETERS.get(function.name, 8), f"{function.name}: {len(arguments)} parameters"


@pytest.mark.parametrize("module", MODULES)
def test_no_error_is_swallowed(module):
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), f"{module}:{node.lineno}: bare except"


def test_the_script_reads_in_order():
    text = (ROOT / "train_grpo.py").read_text()
    sections = ["1 batch", "2 advantages", "3 policy losses", "4 models", "5 rollout and scoring", "6 log-probs"]
    sections += ["7 update", "8 evaluation", "9 train()", "main"]
    places = [text.index(f"# ==== {section}") for section in sections]
    assert places == sorted(places)
