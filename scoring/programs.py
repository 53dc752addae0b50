"""Whole programs, run in the sandbox (docs/sandbox.md) on tests of what they print or of what a function returns.

--reward_funcs scoring/programs.py:all_pass     column `cases`: JSON of [[standard input, output, null], ...], or of
                                                [[arguments, result, name of a function], ...]; with true behind
                                                the name, [5] may also stand for a result of 5
"""

import json
from concurrent.futures import ThreadPoolExecutor

from safety.calls import warn_once
from safety.sandbox import OUTPUT_LIMIT, SandboxError, run_python, run_tests
from scoring.text import completion_text, python_of

SECONDS = 6.0  # of each test
# JSON knows no tuples, so a function may return one where a list is wanted, as LiveCodeBench and TACO have it.
LISTED = (
    "\n\ndef _listed(value):\n    return list(map(_listed, value)) if isinstance(value, (list, tuple)) else value\n"
)


def all_pass(completions, cases, **columns) -> list[dict | None]:
    """1 if the program passes every test, as DeepCoder has it: a share would pay for guesses. Logged: the share.

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
    result = run_python(program, given, SECONDS, kept=OUTPUT_LIMIT) if program else None
    words = [line.split() for line in wanted.rstrip().split("\n")] if result else None
    return bool(result) and not result.status and [line.split() for line in result.stdout.rstrip().split("\n")] == words
