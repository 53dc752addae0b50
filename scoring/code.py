"""Programs that a model writes, run with tests in the sandbox."""

import concurrent.futures
import logging

from safety.sandbox import SandboxError, run_tests
from scoring.text import answer_part, completion_text, python_of

logger = logging.getLogger(__name__)


def code_tests(completions, tests, **columns) -> list[dict | None]:
    """Share of the row's `tests` that the completion's program passes, in the sandbox, all in one process a completion.
    A test is a statement of python; of `assert add(1, 2) == 3`, a call compared with a literal, the
    program never sees what is expected. The program is the last ```python block of the answer, or the whole answer.

    None where a row has no tests. Where the sandbox does not start: {"reward": 0, "error": 1}.
    """
    programs = []
    for completion in completions:
        text = completion_text(completion)
        found = python_of(text)
        programs.append(answer_part(text) if found is None else found)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(passed, programs, tests))


code_tests.executes_code = code_tests.per_trajectory = True


def passed(program: str, tests: list[str] | None) -> dict | None:
    if not tests:
        return None
    if isinstance(tests, str) or not all(isinstance(test, str) for test in tests):
        form = 'a list of python statements, such as ["assert add(1, 2) == 3"]'
        raise ValueError(f"column `tests` must be {form}; a row has {tests!r:.200}")
    try:
        outcomes, timed_out = run_tests(program, tests)
    except SandboxError as error:
        logger.warning("code_tests could not run a program, which counts as 0 and as an error: %s", error)
        return {"reward": 0.0, "timeout": 0.0, "error": 1.0}
    return {"reward": sum(outcomes) / len(tests), "timeout": float(timed_out), "error": 0.0}
