"""Memory that the trainer and the workers of a server on the same machine both have: buckets need no way to travel.

It is anonymous (memfd_create). A worker opens it as a file of the trainer's process, /proc/PID/fd/FD, which wants the
same user and the same process numbers: the same container, say. It has no name that could be left behind, and no limit
as /dev/shm has in containers; it goes with the last process that has it open, however that one ends.
"""

import mmap
import os
import stat

import torch

PROBE = 32  # bytes


class Shared:
    """`size` bytes of this process that others can open. OSError where there is no such memory, or not as much."""

    descriptor: int | None = None

    def __init__(self, size: int):
        self.descriptor = os.memfd_create("weights")
        try:
            os.posix_fallocate(self.descriptor, 0, size)  # else a full machine would be noticed by a bus error
            self.bytes = _mapped(self.descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            self.close()
            raise
        self.place = [os.getpid(), self.descriptor]  # for `opened`

    def close(self) -> None:
        """Nobody can open it any more; who has, keeps it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
        self.descriptor = None

    __del__ = close


def opened(place: list[int], size: int) -> torch.Tensor:
    """The first `size` bytes of another process's memory. What is written here stays here. OSError if it cannot be had:
    another machine, container or user, or that process has ended; ValueError if it is not such memory."""
    process, descriptor = map(int, place)
    file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_NONBLOCK)  # which may be anything there
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_size < size:
            raise ValueError(f"file {descriptor} of process {process} is no memory of {size} bytes")
        return _mapped(file, size, mmap.MAP_PRIVATE)
    finally:
        os.close(file)


def probe() -> Shared | None:
    """Random bytes: who can tell them does share memory with this process. None where there is no such memory."""
    try:
        memory = Shared(PROBE)
    except (OSError, AttributeError):  # of systems other than Linux
        return None
    memory.bytes.copy_(torch.frombuffer(bytearray(os.urandom(PROBE)), dtype=torch.uint8))
    return memory


def read(place: list[int]) -> torch.Tensor:
    """The bytes of another process's `probe`; zeros if they cannot be read."""
    try:
        return opened(place, PROBE).clone()
    except (OSError, ValueError):
        return torch.zeros(PROBE, dtype=torch.uint8)


def _mapped(file: int, size: int, flags: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size, flags=flags), dtype=torch.uint8)  # which keeps it mapped
