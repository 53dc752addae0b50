"""Tensors that claim to be on a GPU: each is a CPU tensor inside; mixing it with CPU tensors is refused as CUDA does.

On a machine without a GPU this finds tensors made on the wrong device. What it cannot show is what CUDA's kernels
compute.

    with claimed_gpu():
        x = torch.ones(2, device=GPU)
        x + torch.ones(2)               # Refused, as on a GPU

The device is called "gpu": a build of torch without CUDA takes no tensors that claim "cuda".
"""

import contextlib
import functools
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

GPU = torch.device("privateuseone", 0)  # which `register` calls "gpu"
aten = torch.ops.aten

COPIES = {aten.copy_, aten._to_copy, aten.to, aten._foreach_copy_}  # between devices
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# These take CPU scalars, as pointwise ops of two tensors do.
SCALARS = {aten.where, aten.masked_fill, aten.masked_fill_}


class Refused(RuntimeError):
    """What CUDA would have refused."""


class Claimed(torch.Tensor):
    """A CPU tensor, `inner`, that says it is on the GPU."""

    @staticmethod
    def __new__(cls, inner):
        layout = dict(strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype)
        return torch.Tensor._make_wrapper_subclass(cls, inner.size(), device=GPU, **layout)

    def __init__(self, inner):
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("claimed tensors are for use inside claimed_gpu()")

    def tolist(self):  # torch refuses it to subclasses
        return self.cpu().tolist()


def check_devices(func, args, tensors: list) -> None:
    """Raises Refused where CUDA does not mix devices. tensors: all in the arguments."""
    packet, claimed = func.overloadpacket, [isinstance(x, Claimed) for x in tensors]
    if all(claimed) or not any(claimed) or packet in COPIES:
        return
    if packet in INDEXING:  # indices may lie on the CPU, and a single number that is put
        fine = claimed[0] and not (len(args) > 2 and not isinstance(args[2], Claimed) and args[2].ndim)
    else:
        takes_scalars = packet in SCALARS or (torch.Tag.pointwise in func.tags and len(tensors) == 2)
        writes_to_cpu = func._schema.is_mutable and not claimed[0]
        fine = takes_scalars and not writes_to_cpu and not any(x.ndim for x in tensors if not isinstance(x, Claimed))
    if not fine:
        shapes = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
        raise Refused(f"{func}: expected all tensors to be on the same device, but found {shapes}")


class ClaimedGPU(TorchDispatchMode):
    """Runs everything on the CPU, and claims what belongs on the GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat, structure = tree_flatten((args, kwargs or {}))
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        check_devices(func, args, tensors)
        packet = func.overloadpacket
        source = target = any(isinstance(x, Claimed) for x in tensors)
        devices = [x for x in flat if isinstance(x, torch.device)]
        if devices:
            target = devices[0].type == GPU.type
        if packet in (aten._pin_memory, aten.is_pinned):
            if packet is aten._pin_memory and isinstance(args[0], Claimed):
                raise Refused("expected a CPU tensor to pin")
            return args[0].clone() if packet is aten._pin_memory else False
        cpu_args, cpu_kwargs = tree_unflatten([on_cpu(x) for x in flat], structure)
        out = func(*cpu_args, **cpu_kwargs)
        if packet is aten.copy_:
            return args[0]
        if not target:
            return out
        out = tree_map_only(torch.Tensor, Claimed, out)
        return return_and_correct_aliasing(func, args, kwargs or {}, out) if source else out


def on_cpu(value):
    """What the CPU is given in place of an argument."""
    if isinstance(value, torch.device):
        return value if value.type == "meta" else torch.device("cpu")
    return value.inner if isinstance(value, Claimed) else value


class ClaimedGenerator(torch.Generator):
    """A source of random numbers that remembers for which device it was made."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls)
        made.made_for = torch.device(device).type
        return made


class CheckGenerators(TorchFunctionMode):
    """Refuses a generator of another device than the random numbers'."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made_for = getattr((kwargs or {}).get("generator"), "made_for", None)
        on = torch.device(kwargs.get("device") or getattr(args[0], "device", "cpu")).type if made_for else None
        if made_for != on:
            raise Refused(f"expected a {on!r} device type for generator but found {made_for!r}")
        return func(*args, **(kwargs or {}))


@functools.cache
def register() -> None:
    """Make torch know the device. Once a process, and only where it is used: other tests must not see it."""

    class Module(backend_registration._DummyBackendModule):
        def is_available(self):
            return False  # has no streams, and other tests should not take it for a GPU

        def get_amp_supported_dtype(self):
            return [torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend("gpu", Module())
    library = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")  # autocast changes nothing but products
    library.fallback(torch.library.fallthrough_kernel)
    products = torch.library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"):
        products.impl(name, functools.partial(in_autocast_dtype, getattr(torch.ops.aten, name)))
    register.libraries = library, products  # kept, or they would be taken back


def in_autocast_dtype(product, *args, **kwargs):
    """As autocast has it on CUDA: arguments in float32 are rounded first."""
    dtype = torch.get_autocast_dtype("gpu")

    def cast(x):
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x

    off = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(off):
        return product(*map(cast, args), **kwargs)


@contextlib.contextmanager
def claimed_gpu():
    """Inside, there is a device "gpu", and what is made on it or sent to it is Claimed."""
    register()
    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # module.to() keeps tied weights tied
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor() makes its tensor on the CPU and sends it
    try:
        with (
            mock.patch("torch.Generator", ClaimedGenerator),
            torch.autograd.set_multithreading_enabled(False),  # the backward pass stays in this thread
            CheckGenerators(),
            ClaimedGPU(),
        ):
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_swap_module_params_on_conversion(swap)
