"""DeepCoder's columns: `problem`, `starter_code`, and `tests`, which is JSON in a text, of three forms:

    primeintellect   [{"type": "stdin_stdout", "input": "1 2\\n", "output": "3\\n", "fn_name": null}, ...], or of
                     {"type": "function_call", "input": [arguments], "output": [result], "fn_name": ...}
    taco             {"inputs": [...], "outputs": [...]}, with "fn_name" where a function is called
    lcbv5            [{"input", "output", "testtype": "stdin" or "functional", "metadata": {"func_name": ...}}, ...]

Programs run in the sandbox (scoring/programs.py, docs/sandbox.md). Rows whose tests cannot be read are left out, and
counted.
"""

import json

from published import published

MOST = 15  # tests of a row, those with the longest inputs
READS, RETURNS = "It reads from standard input and prints the answer.", "Write a function `{}` that returns the result."
ASK = "{problem}\n\nWrite it in Python. {how} Think first; give the whole program in one block ```python at the end."


def rows(split: str = "train", seed: int = 42, source: str | None = None, config: str = "lcbv5") -> list[dict]:
    test, found = "test" if config == "lcbv5" else None, []  # taco and primeintellect have one split
    given = published("agentica-org/DeepCoder-Preview-Dataset", split, source, config=config, test=test)
    for row in given:
        if not (tests := cases(row["tests"])):
            continue
        name = tests[0][2]
        how = RETURNS.format(name) if name else READS
        how = f"Begin with this:\n```python\n{row['starter_code']}\n```\n" if row.get("starter_code") else how
        prompt = [{"role": "user", "content": ASK.format(problem=row["problem"], how=how)}]
        found.append({"prompt": prompt, "cases": json.dumps(tests)})
    if left_out := len(given) - len(found):
        print(f"DeepCoder: {left_out} of {len(given)} rows have no tests that can be read and are left out")
    return found


def cases(tests: str) -> list[tuple]:
    """[(standard input, output, None)], or [(arguments, result, name of a function)]; [] of what cannot be read."""
    try:
        tests = json.loads(tests)
        if isinstance(tests, dict):
            pairs, name = zip(tests["inputs"], tests["outputs"], strict=True), tests.get("fn_name")
            tests = [{"input": i, "output": o, "fn_name": name} for i, o in pairs]
        made = [case(**test) for test in tests]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return []
    return sorted(made, key=lambda test: len(str(test[0])), reverse=True)[:MOST]


def case(input, output, type=None, fn_name=None, testtype=None, metadata=None, **more) -> tuple:
    if testtype == "functional" and (metadata or {}).get("func_name"):
        return read(input), json.loads(output), metadata["func_name"]
    if fn_name and type != "stdin_stdout":
        if not isinstance(input, list):
            raise TypeError("arguments are a list")
        return input, output, fn_name, True  # some results stand in lists of one; TACO's grader takes either
    return text(input), text(output), None


def read(arguments: str) -> list:
    """LiveCodeBench's: JSON, an argument a line."""
    return [json.loads(line) for line in arguments.splitlines() if line.strip()]


def text(value) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value))
