"""Shared by both ends of a weight push: the process group of trainer and workers, and the layout of a bucket.

Names, dtypes and shapes of a bucket are announced over HTTP. The bucket travels in pieces of some megabytes, so that
one piece is packed, another is under way and a third is loaded at the same time. This file needs torch alone, as the
trainer has no vLLM, and the server has no trainer.
"""

import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

ALIGN = 16  # bytes: tensors begin at multiples, so that any dtype can be viewed in place
PIECE = 2**24  # bytes, plus the rest of a tensor: small enough for malloc to reuse the memory of the last piece


def join(store, rank: int, world_size: int, backend: str, address: str, seconds: float):
    """The process group of the trainer (rank 0) and all servers' workers, apart from torch's global one.

    gloo is bound to `address`, one of this machine, so that host names need not resolve. NCCL's watchdog would end the
    whole process, so its limit is a day, and `finish` keeps the time.
    """
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(hours=24)
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def gpu_of(device: torch.device) -> str | None:
    """A GPU's name, the same in every process; None for a CPU."""
    return None if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)


def backend_for(gpus: list[str | None]) -> str:
    """NCCL if each rank has a GPU (`gpu_of`) of its own, which it requires; else gloo."""
    return "nccl" if None not in gpus and len({*gpus}) == len(gpus) else "gloo"


def begin_broadcast(group, piece: Tensor) -> dist.Work:
    """Send rank 0's `piece` to all ranks."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([piece], options)


def finish(work: dist.Work, seconds: float, beside: Iterable[Future] = ()) -> None:
    """Wait for a broadcast. TimeoutError, or gloo's RuntimeError (the other end is gone), if it does not arrive; an
    error of a call that runs beside it is raised at once."""
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        for call in beside:
            if call.done():
                call.result()
        if time.monotonic() > deadline:
            raise TimeoutError(f"weights did not travel within {seconds:g} s")
        time.sleep(0.0005)
    work.wait()


def announcement(named: list[tuple[str, Tensor]], narrow: torch.dtype) -> dict:
    """Names, dtypes and shapes of a bucket. Matrices wider than `narrow`, the server's dtype, are rounded to it;
    vectors keep theirs, since some servers have wider norms and biases."""
    dtypes = []
    for _, tensor in named:
        wide = tensor.is_floating_point() and tensor.ndim > 1 and tensor.dtype.itemsize > narrow.itemsize
        dtypes.append(str(narrow if wide else tensor.dtype).removeprefix("torch."))
    return {"names": [name for name, _ in named], "dtype_names": dtypes, "shapes": [list(t.shape) for _, t in named]}


def pieces(dtype_names: list[str], shapes: list, device: torch.device) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """New memory for a bucket, piece by piece: a flat uint8 tensor, and views of it for the next tensors. Both ends cut
    a bucket in the same way."""
    entries, size = [], 0
    for number, (dtype_name, shape) in enumerate(zip(dtype_names, shapes, strict=True), start=1):
        dtype = getattr(torch, dtype_name)
        end = size + torch.Size(shape).numel() * dtype.itemsize
        entries.append((size, end, dtype, shape))
        size = -(-end // ALIGN) * ALIGN
        if size >= PIECE or number == len(shapes):
            piece = torch.empty(size, dtype=torch.uint8, device=device)
            yield piece, [piece[start:end].view(dtype).view(shape) for start, end, dtype, shape in entries]
            entries, size = [], 0


def local_address(host: str) -> str:
    """This machine's address on the route to `host`; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
