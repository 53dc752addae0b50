"""Functions on gloo ranks, without a script of their own.

    first, second = on_ranks(2, gradient_of, "fsdp2")       # gradient_of is a function at the top of a test file

The ranks are forks of one process per pytest worker, which has imported torch and the scripts once (scripts/forks.py):
they start in a tenth of a second, and nothing that a function patches or leaves behind reaches the next test.
"""

import faulthandler
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "scripts"))

from forks import FORKS, get_ready, places  # noqa: E402


class RankError(RuntimeError):
    """A rank ended without an answer, or did not answer in time."""


def on_ranks(n: int, function: Callable, *args, limit: float = 240) -> list:
    """[function(*args) of rank 0, of rank 1, ...]; the ranks are in one process group, as after `init_distributed`.

    An exception of a rank is raised here, with the rank's traceback as its cause. RankError names the ranks that ended
    without an answer or had none after `limit` seconds, and holds what they printed, with the stacks of the late ones.
    """
    payload = pickle.dumps((function, args))
    get_ready()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ends, processes = [], []
        logs = [Path(folder, f"rank_{rank}") for rank in range(n)]
        try:
            for place, log in zip(places(n), logs, strict=True):
                ours, theirs = FORKS.Pipe(duplex=False)
                processes.append(FORKS.Process(target=_run, args=(payload, place, theirs, log, limit), daemon=True))
                processes[-1].start()
                theirs.close()
                ends.append(ours)
            return _answers(ends, logs, limit)
        finally:
            for process in processes:
                process.kill()
                process.join()
            print(_told(logs, range(n)))  # pytest shows it if the test fails


def _answers(ends: list, logs: list[Path], limit: float) -> list:
    deadline, found = time.monotonic() + limit, {}
    while len(found) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in found]
        ready = multiprocessing.connection.wait(waiting, max(deadline - time.monotonic(), 0))
        late = [rank for rank in range(len(ends)) if rank not in found]
        if not ready:
            raise RankError(f"no answer after {limit:g} s from rank {late}: {_told(logs, late)}")
        for end in ready:
            rank = ends.index(end)
            try:
                error, text, found[rank] = pickle.loads(end.recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} ended without an answer: {_told(logs, [rank])}") from None
            if error is not None:
                raise error from RankError(f"on rank {rank} of {len(ends)}\n{text}")
    return [found[rank] for rank in range(len(ends))]


def _told(logs: list[Path], ranks: Iterable[int]) -> str:
    return "\n".join(logs[rank].read_text(errors="replace")[-4000:] for rank in ranks if logs[rank].exists())


def _run(payload: bytes, place: dict[str, str], answer, log: Path, limit: float) -> None:
    """In the fork: join the group, run, answer (exception, its traceback, result)."""
    from orphans import end_with

    import utils

    end_with(os.getppid())
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(place)
    faulthandler.dump_traceback_later(0.9 * limit)  # in the log, for the RankError
    try:
        utils.init_distributed(limit)
        function, args = pickle.loads(payload)
        result = function(*args)
        utils.gather_objects(None)  # nobody leaves while another still computes
        said = pickle.dumps((None, "", result))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            said = pickle.dumps((error, text, None))
            pickle.loads(said)  # some exceptions can be sent and not be made again
        except Exception:
            said = pickle.dumps((RuntimeError(repr(error)), text, None))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    answer.send_bytes(said)
    os._exit(0)
