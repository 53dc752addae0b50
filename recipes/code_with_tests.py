"""DeepCoder's columns: `problem`, `starter_code`, and `tests`, which is JSON in a text, of three forms:

    primeintellect   [{"type": "stdin_stdout", "input": "1 2\\n", "output": "3\\n", "fn_name": null}, ...]
    taco             {"inputs": [...], "outputs": [...]}, with "fn_name" where a function is called
    lcbv5            [{"input", "output", "testtype": "stdin" or "functional", "metadata": {"func_name": ...}}, ...]

Programs run in the sandbox (scoring/programs.py, docs/sandbox.md).
"""

import json

from published import published

MOST = 15  # tests of a row, those with the longest inputs
READS = "It reads from standard input and prints the answer."
ASK = "{problem}\n\nWrite it in Python. {how} Think first; give the whole program in one block ```python at the end."


def rows(split: str = "train", seed: int = 42, source: str | None = None, config: str = "lcbv5") -> list[dict]:
    test, found = "test" if config == "lcbv5" else None, []  # taco and primeintellect have one split
    for row in published("agentica-org/DeepCoder-Preview-Dataset", split, source, config=config, test=test):
        tests = cases(json.loads(row["tests"]))
        how = f"Begin with this:\n```python\n{row['starter_code']}\n```\n" if row.get("starter_code") else READS
        prompt = [{"role": "user", "content": ASK.format(problem=row["problem"], how=how)}]
        found += [{"prompt": prompt, "cases": json.dumps(tests)}] if tests else []
    return found


def cases(tests: list | dict) -> list[tuple]:
    """[(standard input, output, None)], or [(arguments, result, name of a function)]. TACO puts some results into
    lists of one; its grader takes either."""
    if isinstance(tests, dict):
        pairs, name = zip(tests["inputs"], tests["outputs"], strict=True), tests.get("fn_name")
        made = [(i, o, name, True) if name else (text(i), text(o), None) for i, o in pairs]
    else:
        made = [(text(t["input"]), text(t["output"]), called(t)) for t in tests]
        made = [(read(i), json.loads(o), name) if name else (i, o, name) for i, o, name in made]
    return sorted(made, key=lambda test: len(str(test[0])), reverse=True)[:MOST]


def called(test: dict) -> str | None:
    named = test.get("testtype") == "functional" and test.get("metadata") or {}
    return named.get("func_name") or test.get("fn_name")


def read(arguments: str) -> list:
    """LiveCodeBench's: JSON, an argument a line."""
    return [json.loads(line) for line in arguments.splitlines()]


def text(value) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))
