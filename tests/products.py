"""Products in bfloat16 as fast as in float32, on CPUs that have no instructions for them. For tests of what lies around
the products: bytes, order, kinds. Of their values these are the more exact ones."""

import warnings

import torch

from inputs.precision import slow_in_bfloat16

LIBRARY = torch.library.Library("aten", "IMPL")


def wide(product, shape):
    """An operator that casts, multiplies in float32 and casts back. That with `out=` is another one: torch's own."""

    def narrow(*tensors, **options):
        dtype = tensors[-1].dtype
        wider = torch.promote_types(dtype, torch.float32)
        out = torch.empty(shape(*tensors), dtype=wider)
        return product(*(tensor.to(wider) for tensor in tensors), **options, out=out).to(dtype)

    return narrow


def multiply_in_float32() -> None:
    if not slow_in_bfloat16(torch.device("cpu")):
        return
    with warnings.catch_warnings(action="ignore"):  # that these are replaced
        LIBRARY.impl("mm", wide(torch.mm, lambda a, b: (len(a), b.shape[1])), "CPU")
        LIBRARY.impl("addmm", wide(torch.addmm, lambda c, a, b: (len(a), b.shape[1])), "CPU")
        LIBRARY.impl("bmm", wide(torch.bmm, lambda a, b: (*a.shape[:2], b.shape[2])), "CPU")
