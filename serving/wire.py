"""What travels in a weight push, and through what: layout, checksums, process group. Both ends import this, so they
cannot disagree.

A bucket is one flat uint8 tensor. Its tensors lie one behind the other, each from a multiple of ALIGN bytes on; names,
dtypes, shapes and checksums are announced over HTTP. No part of vLLM is imported.
"""

import concurrent.futures
import itertools
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from serving.rendezvous import proof

MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd 64-bit constant (the golden ratio)
CHUNK = 1 << 11  # words of a row of the checksum: sums of a row stay below 2^53, so float64 holds them exactly
ALIGN = 4 * CHUNK  # bytes; a tensor starts on a row, so that any dtype can be viewed in place
PIECES = 1 << 14  # of a converted bucket, at most; a layer of experts makes some hundreds
PIECE = {"cpu": 4 << 20, "cuda": 64 << 20}  # bytes that are checksummed at a time: on CPUs, what fits the caches


def layout(dtypes: list[torch.dtype], shapes: list[list[int]]) -> tuple[list[int], list[int], int]:
    """Where tensors lie in a bucket: (first byte of each, bytes of each, bytes of the bucket, padding included)."""
    starts, sizes, end = [], [], 0
    for dtype, shape in zip(dtypes, shapes, strict=True):
        starts.append(end)
        sizes.append(torch.Size(shape).numel() * dtype.itemsize)
        end += -(-sizes[-1] // ALIGN) * ALIGN
    return starts, sizes, end


def checksums(bucket: torch.Tensor, starts: list[int]) -> list[int]:
    """64-bit checksum of each tensor in a bucket: its 32-bit words, each times its position in the bucket, summed.

    Exact, and the same wherever the bucket lies. Words differ by less than 2^32, positions by less than 2^31 (8 GiB):
    no changed word and no exchanged pair can cancel modulo 2^64; of other damage one in 2^64 goes unseen. One product
    gives each row's plain sum S and its sum T weighted by 1 ... CHUNK; word j of row i counts i * CHUNK + j + 1 times,
    which is i * CHUNK * S + T.
    """
    rows = bucket.view(torch.int32).view(len(bucket) // ALIGN, CHUNK)
    weights = torch.arange(1, CHUNK + 1, dtype=torch.float64, device=bucket.device)
    weights = torch.stack([torch.ones_like(weights), weights])  # [2, CHUNK]
    pieces = rows.split(PIECE.get(bucket.device.type, ALIGN) // ALIGN)
    wide = torch.empty(len(pieces[0]), CHUNK, dtype=torch.float64, device=bucket.device)  # of one piece at a time
    sums = torch.cat([weights @ wide[: len(piece)].copy_(piece).T for piece in pieces], 1).long()  # [2, rows]
    values = torch.arange(len(rows), device=bucket.device) * CHUNK * sums[0] + sums[1]  # int64, wraps
    ends = torch.nn.functional.pad(values.cumsum(0), (1, 0)).cpu()  # the one transfer to the host
    edges = ends[[start // ALIGN for start in [*starts, len(bucket)]]]
    return [value % (1 << 64) for value in edges.diff().tolist()]


def checksum(data: torch.Tensor) -> int:
    """That of a single uint8 tensor, of any length: zeros fill up its last row."""
    return checksums(torch.nn.functional.pad(data, (0, -len(data) % ALIGN)), [0])[0] if len(data) else 0


def fold(values: list[int]) -> int:
    """Checksums in order -> one checksum."""
    total = 0
    for value in values:
        total = (total * MIX + value + 1) % (1 << 64)
    return total


def local_address(host: str, port: int) -> str:
    """The address of this machine that faces `host`; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def not_finite(tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
    """Names of those that hold nan or inf. One pass over each tensor where it lies, one transfer to the host in all."""
    named = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    # torch has no aminmax of float8, of which every value fits bfloat16. aminmax keeps a nan.
    wide = (tensor if tensor.dtype.itemsize > 1 else tensor.to(torch.bfloat16) for _, tensor in named)
    extremes = [torch.stack(torch.aminmax(tensor)).double() for tensor in wide]
    sound = torch.stack(extremes).isfinite().all(-1).tolist() if extremes else []
    return [name for (name, _), good in zip(named, sound, strict=True) if not good]


def pack(named: list[tuple[str, torch.Tensor]], dtypes: list[torch.dtype], bucket: torch.Tensor, starts: list[int]):
    """Copy tensors into a bucket, in these dtypes and from these bytes on; (name, flat tensor) pairs of what lies there
    then. Padding becomes 0."""
    packed = []
    for (name, tensor), dtype, start, end in zip(named, dtypes, starts, [*starts, len(bucket)][1:], strict=True):
        size = tensor.numel() * dtype.itemsize
        packed.append((name, bucket[start : start + size].view(dtype)))
        packed[-1][1].view(tensor.shape).copy_(tensor.detach())
        bucket[start + size : end] = 0
    return packed


def travels_as(tensor: torch.Tensor, narrow: torch.dtype) -> torch.dtype:
    """The dtype in which a tensor is sent to a server that computes in `narrow`. Wider matrices are rounded on the way,
    as the server would; vectors stay as they are, since some (norms, biases, router corrections) are kept wider."""
    wide = tensor.is_floating_point() and tensor.ndim > 1 and tensor.dtype.itemsize > narrow.itemsize
    return narrow if wide else tensor.dtype


def changes(new: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The 16-bit words in which two buckets differ: their places [n] int64, what they are in the new one and in the old
    one [n] int16.

    Of bfloat16 weights a word is one; of wider ones it is a part. Eight bytes are compared at a time, then the words of
    those that differ.
    """
    wide, kept, found = new.view(torch.int64), old.view(torch.int64), []
    size = PIECE.get(new.device.type, ALIGN) // 8
    for start in range(0, len(wide), size):
        found.append((wide[start : start + size] != kept[start : start + size]).nonzero()[:, 0] + start)
    hits = torch.cat(found) if found else wide.long()
    words, before = (flat[hits].view(torch.int16).view(-1, 4) for flat in (wide, kept))
    row, lane = (words != before).nonzero(as_tuple=True)
    return hits[row] * 4 + lane, words[row, lane], before[row, lane]


def moved(places: torch.Tensor, starts: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Places of one layout in another: what begins at starts[i] there (ascending) begins at to[i] here."""
    return places + (to - starts)[torch.bucketize(places, starts, right=True) - 1]


def rearranged(given, named, convert, narrow: torch.dtype, bucket: torch.Tensor) -> list[torch.Tensor] | None:
    """Where the words of a bucket of the trainer's tensors `given` lie in `bucket`, which holds what `convert` has made
    of them, `named`: renamed, put in another order, joined, split. As `moved` takes it, starts and to. None if weights
    were not only moved but changed, or if they were moved in more than PIECES pieces.

    `convert` is given numbers in place of the weights, the place of each. Where they are then says what came from
    where, and places in a row that have stayed together are one piece.
    """
    if all(a is b for (_, a), (_, b) in itertools.zip_longest(given, named, fillvalue=(None, None))):
        return [torch.zeros(1, dtype=torch.int64, device=bucket.device)] * 2
    dtypes = [travels_as(tensor, narrow) for _, tensor in given]
    starts, _, total = layout(dtypes, [list(tensor.shape) for _, tensor in given])
    before = torch.empty(total, dtype=torch.uint8, device=bucket.device)
    pack(given, dtypes, before, starts)
    numbers = [
        (name, (torch.arange(t.numel(), dtype=torch.int32) * (d.itemsize // 2) + start // 2).view(t.shape))
        for (name, t), d, start in zip(given, dtypes, starts, strict=True)
    ]
    pieces, dtypes = [], [travels_as(tensor, narrow) for _, tensor in named]
    ends, _, _ = layout(dtypes, [list(tensor.shape) for _, tensor in named])
    for (_, places), dtype, to in zip(convert(numbers), dtypes, ends, strict=True):
        places, step = places.flatten(), dtype.itemsize // 2
        breaks = torch.cat([places.new_zeros(1), (places.diff() != step).nonzero()[:, 0] + 1])
        for first, end in zip(breaks.tolist(), [*breaks[1:].tolist(), len(places)], strict=True):
            source, size = int(places[first]) * 2, (end - first) * dtype.itemsize
            target = to + first * dtype.itemsize
            if len(pieces) == PIECES or not torch.equal(before[source : source + size], bucket[target : target + size]):
                return None
            pieces.append((source // 2, target // 2))
    return list(torch.tensor(sorted(pieces), device=bucket.device).T.contiguous())


def changed_checksums(
    sums: list[int], starts: list[int], places: torch.Tensor, new: torch.Tensor, old: torch.Tensor
) -> list[int]:
    """Checksums of a bucket's tensors after these words of it have changed, from those before: a checksum is a sum, so
    each change adds its own part. Of a 32-bit word the first 16-bit word is the low half (little-endian)."""
    new, old = new.long(), old.long()
    parts = torch.where(places % 2 == 0, (new & 0xFFFF) - (old & 0xFFFF), (new - old) << 16) * (places // 2 + 1)
    edges = torch.tensor(starts, device=places.device) // 2
    added = torch.zeros_like(edges).index_add_(0, torch.bucketize(places, edges, right=True) - 1, parts)  # wraps
    return [(before + more) % (1 << 64) for before, more in zip(sums, added.tolist(), strict=True)]


def layout_changes(count: int) -> tuple[list[int], list[int], int]:
    return layout([torch.int32, torch.int16], [[count], [count]])


def pack_changes(positions: torch.Tensor, values: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
    """As they travel, in a bucket of their own, which has `layout_changes`'s size."""
    starts, _, _ = layout_changes(len(positions))
    pack([("positions", positions), ("values", values)], [torch.int32, torch.int16], bucket, starts)
    return bucket


def unpack_changes(bucket: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    (first, second), (long, short), _ = layout_changes(count)
    return bucket[first : first + long].view(torch.int32), bucket[second : second + short].view(torch.int16)


def change(bucket: torch.Tensor, positions: torch.Tensor, values: torch.Tensor):
    """Make the bucket what `changes` found the new one to be; ValueError for a position outside it."""
    words = bucket.view(torch.int16)
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(words):
        raise ValueError(f"changes at {int(positions.min())} to {int(positions.max())} of {len(words)} words: damaged")
    words[positions.long()] = values


def some(names: list[str]) -> str:
    """The first eight, for a message."""
    return ", ".join(names[:8]) + " ..." * (len(names) > 8)


def in_thread(function, *args) -> concurrent.futures.Future:
    """Run in a daemon thread: unlike a pool's, it cannot keep the interpreter from ending while a server hangs."""
    future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # who no longer waits for it cannot cancel it: the thread sets it in any case

    def run():
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def open_group(store, secret: str, rank: int, world_size: int, backend: str, timeout: float, address: str):
    """Process group of the trainer (rank 0) and a server's workers, outside torch's global one. Before any weights
    flow, every member has proved to every other that it knows `secret`; PermissionError otherwise. TimeoutError if the
    group does not stand in time; what is left of it is aborted.

    gloo is bound to `address`, so that a host name that does not resolve is no obstacle. NCCL's own watchdog ends the
    whole process when it fires; it is put far off, and `wait_for` keeps the time instead. The set-up runs in a thread:
    NCCL's own waits for the other members without a limit.
    """
    made = []
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    future = in_thread(_open_group, made, store, secret, rank, world_size, device, timeout, address)
    if not concurrent.futures.wait([future], timeout + 5).done:  # what waits within has spoken before
        in_thread(lambda: [group.abort() for group in made])
        raise TimeoutError(f"waited {timeout + 5:g} s for the {backend} group of {world_size} members to be set up")
    return future.result()


def _open_group(made: list, store, secret: str, rank: int, world_size: int, device: torch.device, timeout, address):
    """`made` gets the group before anything is waited for."""
    if device.type == "cpu":
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=timeout + 2)  # `wait_for` speaks first
        group = dist.ProcessGroupGloo(store, rank, world_size, options)
    else:
        torch.cuda.set_device(device)  # of this thread
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(hours=24)
        group = dist.ProcessGroupNCCL(store, rank, world_size, options)
    made.append(group)
    expected = [list(proof(secret, f"rank {member}")) for member in range(world_size)]
    mine = torch.tensor(expected[rank], dtype=torch.uint8, device=device)
    given = [torch.empty_like(mine) for _ in expected]
    wait_for(group.allgather([given], [mine]), timeout, "the first message through the new process group")
    if strangers := [rank for rank, one in enumerate(given) if one.tolist() != expected[rank]]:
        raise PermissionError(f"ranks {strangers} of the group do not know the secret of this session")
    return group


def all_equal(group, world_size: int, mine: torch.Tensor, timeout: float) -> bool:
    """Whether all members of a group brought the same; all get the same answer."""
    given = [torch.empty_like(mine) for _ in range(world_size)]
    wait_for(group.allgather([given], [mine]), timeout, "the other members of the process group")
    return all(torch.equal(one, given[0]) for one in given)


def broadcast(group, tensor):
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([tensor], options)


def wait_for(work, timeout: float, what: str, poll: Callable[[], None] | None = None):
    """Wait until `work` is done; TimeoutError after `timeout` seconds. `poll` is called meanwhile and may raise."""
    deadline = time.monotonic() + timeout
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        if poll is not None:
            poll()
        time.sleep(0.0005)
    work.wait()
