"""What both ends of a weight push do alike: the process group of trainer and workers, and how tensors lie in a bucket.

Names, dtypes and shapes of a bucket are announced over HTTP. It travels in pieces of some megabytes: while one is
packed another is under way, and one that came is loaded. torch alone: the trainer has no vLLM, and a server none of the
trainer.
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
PIECE = 2**24  # bytes, or one tensor more: so small that malloc has the memory from the last one


def join(store, rank: int, world_size: int, backend: str, address: str, seconds: float):
    """The process group of the trainer (rank 0) and all servers' workers, outside torch's global one.

    gloo is bound to `address`, of this machine: host names that do not resolve are no obstacle. NCCL's own watchdog
    would end the whole process, so it is put far off and `finish` keeps the time.
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
    """Which GPU this is, by a name that it has in every process; None: it is none."""
    return None if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)


def backend_for(gpus: list[str | None]) -> str:
    """Of a group whose ranks have these (`gpu_of`): NCCL wants one for each. Trainer and server may share one."""
    return "nccl" if None not in gpus and len({*gpus}) == len(gpus) else "gloo"


def begin_broadcast(group, piece: Tensor) -> dist.Work:
    """`piece` of rank 0 to all."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([piece], options)


def finish(work: dist.Work, seconds: float, beside: Iterable[Future] = ()) -> None:
    """TimeoutError or RuntimeError (gloo's: another end is gone) if it does not arrive; an error of a call that runs
    beside it is raised at once."""
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        for call in beside:
            if call.done():
                call.result()
        if time.monotonic() > deadline:
            raise TimeoutError(f"weights did not travel within {seconds:g} s")
        time.sleep(0.0005)
    work.wait()


def announced(named: list[tuple[str, Tensor]], narrow: torch.dtype) -> dict:
    """A bucket's announcement. Matrices wider than `narrow`, the server's dtype, are rounded to it; vectors keep
    theirs, since some servers keep norms and biases wider."""
    dtypes = []
    for _, tensor in named:
        wide = tensor.is_floating_point() and tensor.ndim > 1 and tensor.dtype.itemsize > narrow.itemsize
        dtypes.append(str(narrow if wide else tensor.dtype).removeprefix("torch."))
    return {"names": [name for name, _ in named], "dtype_names": dtypes, "shapes": [list(t.shape) for _, t in named]}


def pieces(dtype_names: list[str], shapes: list, device: torch.device) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """New memory for a bucket, piece by piece: a flat uint8 tensor, and the next tensors of the bucket as they lie in
    it. Both ends cut alike."""
    begun, size = [], 0
    for number, (dtype_name, shape) in enumerate(zip(dtype_names, shapes, strict=True), start=1):
        dtype = getattr(torch, dtype_name)
        end = size + torch.Size(shape).numel() * dtype.itemsize
        begun.append((size, end, dtype, shape))
        size = -(-end // ALIGN) * ALIGN
        if size >= PIECE or number == len(shapes):
            piece = torch.empty(size, dtype=torch.uint8, device=device)
            yield piece, [piece[start:end].view(dtype).view(shape) for start, end, dtype, shape in begun]
            begun, size = [], 0


def local_address(host: str) -> str:
    """The address of this machine that faces `host`; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
