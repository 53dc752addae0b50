"""What both ends of a weight push do alike: the process group of trainer and workers, and how tensors lie in a bucket.

A bucket is one flat uint8 tensor; names, dtypes and shapes are announced over HTTP. torch alone: the trainer has no
vLLM, and a server none of the trainer.
"""

import socket
import time
from collections.abc import Iterable
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

ALIGN = 16  # bytes: tensors begin at multiples, so that any dtype can be viewed in place


def join(store, rank: int, world_size: int, backend: str, address: str, seconds: float):
    """The process group of the trainer (rank 0) and all servers' workers, outside torch's global one.

    gloo is bound to `address`, of this machine: host names that do not resolve are no obstacle. NCCL's own watchdog
    would end the whole process, so it is put far off and `broadcast` keeps the time.
    """
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(hours=24)
        return dist.ProcessGroupNCCL(store, rank, world_size, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def broadcast(group, bucket: Tensor, seconds: float, beside: Iterable[Future] = ()) -> None:
    """`bucket` of rank 0 to all. TimeoutError or RuntimeError (gloo's: another end is gone) if it does not arrive; an
    error of a call that runs beside it is raised at once."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    work, deadline = group.broadcast([bucket], options), time.monotonic() + seconds
    while not work.is_completed():
        for call in beside:
            if call.done():
                call.result()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{bucket.numel() / 1e6:.1f} MB of weights did not travel within {seconds:g} s")
        time.sleep(0.0005)
    work.wait()


def pack(named: list[tuple[str, Tensor]], narrow: torch.dtype, device: torch.device) -> tuple[Tensor, dict]:
    """A new bucket on `device`, and its announcement. Matrices wider than `narrow`, the server's dtype, are rounded to
    it; vectors keep theirs, since some servers keep norms and biases wider."""
    starts, dtypes, end = [], [], 0
    for _, tensor in named:
        wide = tensor.is_floating_point() and tensor.ndim > 1 and tensor.dtype.itemsize > narrow.itemsize
        dtypes.append(narrow if wide else tensor.dtype)
        starts.append(end)
        end += -(-tensor.numel() * dtypes[-1].itemsize // ALIGN) * ALIGN
    bucket = torch.empty(end, dtype=torch.uint8, device=device)
    for (_, tensor), dtype, start in zip(named, dtypes, starts, strict=True):
        place = bucket[start : start + tensor.numel() * dtype.itemsize]
        place.view(dtype).view(tensor.shape).copy_(tensor.detach())
    what = {"names": [name for name, _ in named], "shapes": [list(tensor.shape) for _, tensor in named]}
    return bucket, what | {"dtype_names": [str(dtype).removeprefix("torch.") for dtype in dtypes], "size": end}


def unpack(bucket: Tensor, names: list[str], dtype_names: list[str], shapes: list) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket, where they lie."""
    tensors, start = [], 0
    for name, dtype_name, shape in zip(names, dtype_names, shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        tensors.append((name, bucket[start : start + size].view(dtype).view(shape)))
        start += -(-size // ALIGN) * ALIGN
    return tensors


def local_address(host: str) -> str:
    """The address of this machine that faces `host`; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]
