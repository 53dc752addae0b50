"""Whole programs, run in the sandbox (docs/sandbox.md) on tests of what they print or of what a function returns.

--reward_funcs scoring/programs.py:all_pass     column `cases`: JSON of [[standard input, output, null], ...], or of
                                                [[arguments, result, name of a function], ...]
"""

import json
from concurrent.futures import ThreadPoolExecutor

from safety.sandbox import SandboxError, run_python, run_tests
from scoring.text import BLOCK, answer_part, completion_text

SECONDS = 6.0  # of each test


def all_pass(completions, cases, **columns) -> list[dict]:
    """1 if the program passes every test, as DeepCoder has it: a share would pay for guesses. Logged: the share."""
    scores = []
    for completion, tests in zip(completions, cases, strict=True):
        program = (BLOCK.findall(answer_part(completion_text(completion))) or [""])[-1]
        with ThreadPoolExecutor(4) as pool:
            passed = list(pool.map(lambda test, program=program: passes(program, *test), json.loads(tests)))
        scores.append({"reward": float(all(passed)), "passed": sum(passed) / len(passed)})
    return scores


all_pass.per_trajectory = all_pass.executes_code = True


def passes(program: str, given, wanted, name: str | None) -> bool:
    """What is printed is compared word by word, line by line."""
    try:
        if program and name:
            function = f"(Solution().{name} if 'Solution' in globals() else {name})"
            return run_tests(program, [f"assert {function}(*{given!r}) == {wanted!r}"], SECONDS)[0][0]
        result = run_python(program, given, SECONDS) if program else None
    except SandboxError:
        return False
    words = [line.split() for line in wanted.rstrip().split("\n")] if result else None
    return bool(result) and not result.status and [line.split() for line in result.stdout.rstrip().split("\n")] == words
