"""Processes that score text no one can vouch for, within a time and a memory limit for each completion.

math-verify's own limits are alarm signals, which work in a main thread only, and sympy can outlast any patience: so the
limit here is the life of the process. `WorkerPool` is the trainer's side, `worker_main` the other one; a new kind of
scorer is a function like `math_scorer` and an entry in SCORERS. rewards.py uses both.
"""

import json
import logging
import os
import pickle
import queue
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache

from data import parse_gym, shorten

ITEM_TIMEOUT = 5.0  # seconds one completion may take
START_TIMEOUT = 60.0  # seconds a process may take to import its library
WORKER_MEMORY = 4 * 2**30  # bytes a process may have: 10**10**10 must not take the machine down


class WorkerPool:
    """`size` processes for one kind of scorer, started when first needed and replaced when they overrun.

    Requests go in pickled, answers come back as JSON lines. A worker runs this file without torch and ends when its
    input closes, that is when the trainer is gone, however it went.
    """

    def __init__(self, task: str, size: int | None = None, item_timeout: float = ITEM_TIMEOUT):
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.size = size or max(2, min(8, (os.cpu_count() or 1) // local_ranks))
        self.task, self.item_timeout = task, item_timeout
        self.slots: queue.SimpleQueue = queue.SimpleQueue()  # idle workers; None is one not started yet
        for _ in range(self.size):
            self.slots.put(None)

    def map(self, requests: list[tuple | None]) -> list[float | dict | None]:
        """One answer a request, None for None. Safe to call from several threads."""
        answers: list = [None] * len(requests)
        waiting: queue.SimpleQueue = queue.SimpleQueue()
        errors: list[BaseException] = []
        for index, request in enumerate(requests):
            if request:
                waiting.put(index)

        def work():
            try:
                while not errors:
                    index = waiting.get_nowait()
                    answers[index] = self.run(requests[index])
            except queue.Empty:
                return
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.size, waiting.qsize()))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return answers

    def run(self, request: tuple) -> float | dict | None:
        worker = self.slots.get()
        try:
            if worker is None or worker.poll() is not None:  # not started yet, or died while idle
                worker = None
                worker = self.start()
            answer = self.ask(worker, request)
            if answer is None:
                stop(worker)
                worker = None
                return {"reward": 0.0, "timeout": 1.0}
            return answer["value"]
        finally:
            self.slots.put(worker)

    def start(self) -> subprocess.Popen:
        command = [sys.executable, os.path.abspath(__file__), self.task, str(self.item_timeout)]
        # One thread each: they are many. A session of their own: Ctrl-C reaches them as the end of their input.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        worker = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
        if read_line(worker.stdout.fileno(), START_TIMEOUT) is None:
            stop(worker)
            raise RuntimeError(f"the process for {self.task!r} rewards did not start; its own message is above")
        return worker

    def ask(self, worker: subprocess.Popen, request: tuple) -> dict | None:
        """The worker's answer; None if it took too long or died of it."""
        try:
            pickle.dump(request, worker.stdin)
            worker.stdin.flush()
        except BrokenPipeError:
            return None
        line = read_line(worker.stdout.fileno(), self.item_timeout)
        return None if line is None else json.loads(line)


def stop(worker: subprocess.Popen) -> None:
    worker.kill()
    worker.communicate()  # closes the pipes and collects the process


def read_line(descriptor: int, seconds: float) -> bytes | None:
    """A line from a pipe; None at its end or after `seconds`. poll, since select stops at descriptor 1,023."""
    poll, line, deadline = select.poll(), b"", time.monotonic() + seconds
    poll.register(descriptor, select.POLLIN)
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        received = os.read(descriptor, 65536)
        if not received:
            return None
        line += received
    return line


def worker_main(task: str, item_timeout: float) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to stderr, not among the answers
    if sys.platform == "linux":  # elsewhere the limit is refused
        resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY, WORKER_MEMORY))
    scorer = SCORERS[task]()
    print("ready", file=answers)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        signal.alarm(int(item_timeout) + 2)  # ends this process even if the trainer is no longer there to do it
        try:
            value = scorer(*request)
        except Exception as error:  # of a scorer given text it did not foresee: seen as a component, and on stderr
            print(f"{task} scorer raised {error!r} on {shorten(request[0])}", file=sys.stderr)
            value = {"reward": 0.0, "scorer_error": 1.0}
        signal.alarm(0)
        print(json.dumps({"value": value}), file=answers)


def math_scorer() -> Callable:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off; ours is the process

    def parse(text: str) -> list:
        return math_verify.parse(text, parsing_timeout=None)

    def expression(text: str) -> list:
        """A text that is nothing but an expression: marked as LaTeX, or only a number in it would be found."""
        return parse(text) if "$" in text or "\\boxed" in text else parse(f"${text}$") or parse(text)

    def scorer(given: str, is_expression: bool, answer: str) -> float | None:
        gold = expression(answer)
        if not gold:
            return None
        found = expression(given) if is_expression else parse(given)
        return float(math_verify.verify(gold, found, timeout_seconds=None))

    return scorer


def gym_scorer() -> Callable:
    import reasoning_gym as gym

    @cache
    def dataset(task: str):
        name, parameters = parse_gym(task)
        return gym.create_dataset(name, **parameters)

    return lambda text, task, entry: float(dataset(task).score_answer(text, entry))


SCORERS = {"math": math_scorer, "reasoning_gym": gym_scorer}

if __name__ == "__main__":
    try:
        worker_main(sys.argv[1], float(sys.argv[2]))
    except BrokenPipeError:
        pass  # the trainer ended while this process worked for it
