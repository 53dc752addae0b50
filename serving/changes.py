"""What has changed since the last push, found where the weights are: each rank compares its own shards with what it
pushed of them last, and only what differs is gathered. `VLLMClient.send_changes` sends it."""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from serving import wire

MOST = 1 / 8  # of the words of a rank's part: with more changes (of four words each) the whole bucket travels


class Changes:
    """Of each bucket, this rank's part as it was pushed last, in the dtypes in which it travels.

    Of an FSDP2 tensor the part is the shard, of any other tensor all of it: those are given to the rank that sends, and
    the others bring empty buckets.
    """

    def __init__(self):
        self.kept: list[tuple[list, Tensor]] = []  # dtypes and shapes, and the bytes
        self.scratch = torch.empty(0, dtype=torch.uint8)

    def find(self, number: int, named: list[tuple[str, Tensor]], dtype: torch.dtype, possible: bool) -> Tensor | None:
        """How bucket `number` differs from what it was at the last call: on rank 0 int64 [n], of each 16-bit word that
        changed its place in the bucket, 16 bits of what it is and 16 of what it was; elsewhere this rank's part of it.
        None on every rank if the whole bucket is to be sent: a rank has nothing to compare with, finds nan or inf or
        too many changes, or says that it is not `possible`.

        named: tensors, those of FSDP2 as shards. dtype: of the server. Collective.
        """
        places, new, old = self._compare(number, named, dtype)
        count = len(places) if possible and places is not None else None
        counts = [count]
        if dist.is_initialized() and dist.get_world_size() > 1:
            counts = [None] * dist.get_world_size()
            dist.all_gather_object(counts, count)
        if None in counts:
            return None
        found = places << 32 | (new.long() & 0xFFFF) << 16 | old.long() & 0xFFFF
        if not any(counts[1:]):  # all are rank 0's
            return found
        padded = torch.cat([found, found.new_zeros(max(counts) - len(found))])
        if dist.get_rank() != 0:
            dist.gather(padded)
            return found
        arrived = [torch.empty_like(padded) for _ in counts]
        dist.gather(padded, arrived)
        return torch.cat([part[:count] for part, count in zip(arrived, counts, strict=True)])

    def _compare(self, number: int, named: list[tuple[str, Tensor]], dtype: torch.dtype) -> tuple:
        """(places in the bucket, words as they are, as they were) of what changed in this rank's part; Nones if it
        cannot be told, or is not worth it. `kept` follows."""
        parts = [(name, *own_part(tensor)) for name, tensor in named]
        dtypes = [wire.travels_as(part, dtype) for _, part, _ in parts]
        what = [dtypes, [list(part.shape) for _, part, _ in parts]]
        starts, _, total = wire.layout(*what)
        bucket = self._room(total, parts[0][1].device if parts else torch.device("cpu"))
        packed = wire.pack([(name, part) for name, part, _ in parts], dtypes, bucket, starts)
        if number >= len(self.kept) or self.kept[number][0] != what:
            self.kept[number:] = [(what, bucket.clone())]
            return None, None, None
        kept = self.kept[number][1]
        places, new, old = wire.changes(bucket, kept)
        if wire.not_finite(packed) or len(places) > MOST * total / 2:
            kept.copy_(bucket)
            return None, None, None
        wire.change(kept, places, new)
        whole, _, _ = wire.layout(dtypes, [list(tensor.shape) for _, tensor in named])
        to = [start + first * d.itemsize for start, (_, _, first), d in zip(whole, parts, dtypes, strict=True)]
        here, there = (torch.tensor(each, dtype=torch.int64, device=places.device) // 2 for each in (starts, to))
        return wire.moved(places, here, there), new, old

    def _room(self, size: int, device: torch.device) -> Tensor:
        if len(self.scratch) < size or self.scratch.device != device:
            self.scratch = torch.empty(size, dtype=torch.uint8, device=device)
        return self.scratch[:size]


def own_part(tensor: Tensor) -> tuple[Tensor, int]:
    """What this rank answers for of a tensor, and the number of elements before it. FSDP2 cuts rows as torch.chunk
    does; of several copies (--shard_size) the first counts."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    rows, (*copy, rank) = tensor.to_local(), tensor.device_mesh.get_coordinate()
    height, *row = tensor.shape
    first = min(-(-height // tensor.device_mesh.size(-1)) * rank, height)
    return (rows[:0] if any(copy) else rows), first * math.prod(row)
