"""The collectives of an update or a push, each with its bytes."""

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Collectives(TorchDispatchMode):
    """(operation, bytes that this rank puts in, kind of device) of each collective."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, int, str]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        operation = func.name().partition("::")[2].partition(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in operation:
            sent = args[1] if operation.startswith(("_allgather", "allgather", "_reduce_scatter")) else args[0]
            sent = [leaf for leaf in tree_leaves(sent) if isinstance(leaf, torch.Tensor)]
            self.seen.append((operation, sum(t.nbytes for t in sent), sent[0].device.type))
        return func(*args, **(kwargs or {}))
