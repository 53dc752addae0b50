"""The server's end of the wire, without vLLM: receives the buckets of a push, whole or as changes, and checks them."""

import collections
import time

import torch

from serving import shared, wire


class Receiver:
    """Takes part in one transfer group, rank 0 of which is the trainer.

    With `keep`, the buckets of a complete push stay, and a bucket of the next push may be announced as changes of the
    one that was kept. `complete` names the push that the kept buckets are of: none while another is under way or after
    one that broke off. An announcement (UpdateInfo of serving/transfer.py) says which push it changes, and its
    checksums are those of the whole tensors, so a change that went wrong, now or at any time before, is seen.
    """

    def __init__(self, group, timeout: float, device: torch.device, keep: bool):
        """device: where buckets arrive. timeout: seconds for one bucket."""
        self.group, self.timeout, self.device, self.keep = group, timeout, device, keep
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self.kept: list[tuple[tuple, torch.Tensor]] = []  # (names, dtypes, shapes) and bytes of each bucket
        self.complete: str | None = None
        self.start()

    def start(self) -> None:
        self.base, self.complete, self.push, self.number = self.complete, None, None, 0
        self.seconds = collections.Counter()  # of this push, by phase

    def finish(self) -> None:
        self.complete = self.push if self.keep else None

    def receive(self, info) -> tuple[torch.Tensor, list[int], list[int]]:
        """The bucket that `info` announces; first byte and bytes of each tensor in it. Its memory is used again for the
        next one, if only by the trainer. ValueError for a damaged one."""
        starts, sizes, total = wire.layout([getattr(torch, dtype) for dtype in info.dtypes], info.shapes)
        began = time.perf_counter()
        bucket = self._bucket(info, total)
        arrived = time.perf_counter()
        for name, got, expected in zip(info.names, wire.checksums(bucket, starts), info.checksums, strict=True):
            if got != expected:
                raise ValueError(f"{name} arrived damaged: checksum {got:016x}, the trainer's is {expected:016x}")
        self.seconds.update(receive=arrived - began, check=time.perf_counter() - arrived)
        return bucket, starts, sizes

    def _bucket(self, info, total: int) -> torch.Tensor:
        what, number, self.push = (info.names, info.dtypes, info.shapes), self.number, info.push
        self.number += 1
        kept = next((bucket for known, bucket in self.kept[number : number + 1] if known == what), None)
        if info.changed is None:
            if self.keep and kept is None:
                kept = torch.empty(total, dtype=torch.uint8, device=self.device)
                self.kept[number:] = [(what, kept)]
            return self._arrive(info.memory, total, kept)
        if kept is None or info.base is None or info.base != self.base:
            raise ValueError(f"this server does not hold push {info.base}, which was to be changed; push all weights")
        arrived = self._arrive(info.memory, wire.layout_changes(info.changed)[2])
        wire.change(kept, *wire.unpack_changes(arrived, info.changed))
        return kept

    def _arrive(self, memory: list[int] | None, size: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """What was announced, in the trainer's memory, in this end's buffer or in `into`."""
        if memory is not None:
            try:
                arrived = shared.opened(memory, size)
            except OSError as error:
                raise ConnectionError(f"the trainer's process {memory[0]} is gone ({error.strerror})") from error
            return arrived if into is None else into.copy_(arrived)
        if into is None:
            if len(self.buffer) < size:
                self.buffer = None  # goes before the larger one comes
                self.buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            into = self.buffer[:size]
        wire.wait_for(wire.broadcast(self.group, into), self.timeout, f"the trainer to send {size / 1e6:.1f} MB")
        return into
