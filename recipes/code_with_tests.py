"""DeepCoder's columns: `problem`, `starter_code`, and `tests`, which is JSON in a text, of three forms:

    primeintellect   [{"type": "stdin_stdout", "input": "1 2\\n", "output": "3\\n", "fn_name": null}, ...], or of
                     {"type": "function_call", "input": [arguments], "output": [result], "fn_name": ...}
    taco             {"inputs": [...], "outputs": [...]}, with "fn_name" where a function is called
    lcbv5            [{"input", "output", "testtype": "stdin" or "functional", "metadata": {"func_name": ...}}, ...]

Rows whose tests cannot be read are left out, and counted. `all_pass`, the reward, runs programs in the sandbox
(docs/sandbox.md) on tests of what they print or of what a function returns.
"""

import json
from concurrent.futures import ThreadPoolExecutor

from published import published

from safety.results import warn_once
from safety.sandbox import SandboxError, run_python, run_tests
from scoring.text import completion_text, python_of

MOST = 15  # tests of a row, those with the longest inputs
SECONDS = 6.0  # of each test
# JSON knows no tuples, so a function may return one where a list is wanted, as LiveCodeBench and TACO have it.
LISTED = (
    "\n\ndef _listed(value):\n    return list(map(_listed, value)) if isinstance(value, (list, tuple)) else value\n"
)
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


# ---- the reward ------------------------------------------------------------------------------------------------------


def all_pass(completions, cases, **columns) -> list[dict | None]:
    """1 if the program passes every test, as DeepCoder has it: a share would pay for guesses. Logged: the share.

    Column `cases`: JSON of what `cases` above makes; with true behind the name, [5] may also stand for a result of 5.

    Tests for which the sandbox does not start are logged as `error`; without them the score may be unknown: None.
    """
    scores = []
    for completion, tests in zip(completions, cases, strict=True):
        program, tests = python_of(completion_text(completion)) or "", json.loads(tests or "[]")
        if not tests:
            scores.append(None)
            continue
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(lambda test, program=program: outcome(program, *test), tests))
        ran = [passed for passed in outcomes if passed is not None]
        error = 1 - len(ran) / len(outcomes)
        reward = None if error and all(ran) else float(all(ran))
        scores.append({"reward": reward, "passed": sum(ran) / len(ran) if ran else None, "error": error})
    return scores


all_pass.per_trajectory = all_pass.executes_code = True


def outcome(program: str, *test) -> bool | None:
    """Whether it passes; None if it could not be run."""
    try:
        return passes(program, *test)
    except SandboxError as error:
        warn_once(f"all_pass could not run a program, which counts as an error: {error}", "all_pass")
        return None


def passes(program: str, given, wanted, name: str | None, wrapped: bool = False) -> bool:
    """What is printed is compared word by word, line by line. wrapped: the result may stand in a list of one."""
    if program and name:
        function = f"(Solution().{name} if 'Solution' in globals() else {name})"
        results = [wanted, *wanted] if wrapped and isinstance(wanted, list) and len(wanted) == 1 else [wanted]
        tests = [f"assert _listed({function}(*{given!r})) == {result!r}" for result in results]
        return any(run_tests(program + LISTED, tests, SECONDS)[0])
    result = run_python(program, given, SECONDS, max_output=2**20) if program else None
    words = [line.split() for line in wanted.rstrip().split("\n")] if result else None
    return bool(result) and not result.status and [line.split() for line in result.stdout.rstrip().split("\n")] == words
