"""A reward for programs that a model writes: they run with tests in the sandbox."""

import concurrent.futures
import logging

from safety.sandbox import SandboxError, run_tests
from scoring.text import answer_part, completion_text, python_of

logger = logging.getLogger(__name__)


def code_tests(completions, tests, **columns) -> list[dict | None]:
    """Share of the row's `tests` that the completion's program passes. All run in the sandbox, in one process per
    completion. A test is a Python statement. For `assert add(1, 2) == 3`, a call compared with a literal, the program
    never sees the expected value. The program is the last ```python block of the answer, or the whole answer.

    None if a row has no tests. If the sandbox does not start: {"reward": 0, "error": 1}.
    """
    programs = []
    for completion in completions:
        text = completion_text(completion)
        block = python_of(text)
        programs.append(answer_part(text) if block is None else block)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(run_program, programs, tests))


code_tests.executes_code = code_tests.per_trajectory = True


def run_program(program: str, tests: list[str] | None) -> dict | None:
    if not tests:
        return None
    if isinstance(tests, str) or not all(isinstance(test, str) for test in tests):
        form = 'a list of python statements, such as ["assert add(1, 2) == 3"]'
        raise ValueError(f"column `tests` must be {form}; a row has {tests!r:.200}")
    try:
        outcomes, timed_out = run_tests(program, tests)
    except SandboxError as error:
        logger.warning("code_tests could not run a program; it scores 0 and counts as an error: %s", error)
        return {"reward": 0.0, "timeout": 0.0, "error": 1.0}
    return {"reward": sum(outcomes) / len(tests), "timeout": float(timed_out), "error": 0.0}
