"""Parameters of a model: the ranks and devices they are on, and their names in checkpoints."""

import contextlib
import datetime
import re
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.core_model_loading import Transpose, revert_weight_conversion

from config import TrainConfig
from modeling.model import folded_weight, is_lora
from utils import gather_objects, is_main, raise_together, world_size

# ---- where they lie --------------------------------------------------------------------------------------------------


def device_mesh(device: torch.device, cfg: TrainConfig) -> DeviceMesh:
    """(copies, ranks that share one), or all ranks on one axis. Its groups get --dist_timeout: torch would give them
    its own limit."""
    world = world_size()
    size = cfg.shard_size or world
    shape, names = ((size,), ("shard",)) if size == world else ((world // size, size), ("replicate", "shard"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        group.set_timeout(datetime.timedelta(seconds=cfg.dist_timeout))
    return mesh


@contextlib.contextmanager
def on_rank_0(what: str, everywhere: bool = False) -> Iterator[None]:
    """Models built within this context have values on rank 0, and shapes alone (torch's meta device) on other ranks;
    see `emptied`. everywhere: values on all ranks. An error is raised on every rank. Collective."""
    error = None
    try:
        with contextlib.nullcontext() if is_main() or everywhere else torch.device("meta"):
            yield
    except Exception as caught:  # carried to raise_together, which raises it on every rank
        error = caught
    raise_together(error, what)


def emptied(model: nn.Module, device: torch.device) -> Callable[..., None]:
    """Empty a model that has values on rank 0. Returns fill(module, recurse=True), which gives a part of the model
    memory on `device` and rank 0's values, on every rank. Both are collective.

    A model that is filled layer by layer, each layer cut into shards at once, is never whole on any device but rank 0's
    CPU, where each value is dropped as soon as it is filled in. Tied weights stay tied.
    """
    stores = [store for module in model.modules() for store in (module._parameters, module._buffers)]
    tensors = {tensor: None for store in stores for tensor in store.values() if tensor is not None}  # each once
    dtypes = gather_objects([tensor.dtype for tensor in tensors])[0]  # from_pretrained keeps some of them wider
    empty = {t: _like(t, torch.empty(t.shape, dtype=d, device="meta")) for t, d in zip(tensors, dtypes, strict=True)}
    values = {empty[tensor]: tensor.detach() for tensor in tensors} if is_main() else {}
    for store in stores:
        store.update({key: empty[tensor] for key, tensor in store.items() if tensor is not None})
    filled = weakref.WeakValueDictionary()  # weak, so that layers that were cut into shards can go

    @torch.no_grad()
    def arrived(tensor: Tensor) -> Tensor:
        if (local := filled.get(tensor)) is None:
            value = values.pop(tensor).to(device).contiguous() if is_main() else torch.empty_like(tensor, device=device)
            if world_size() > 1:
                dist.broadcast(value, 0)
            filled[tensor] = local = _like(tensor, value)
        return local

    def fill(module: nn.Module, recurse: bool = True) -> None:
        for part in module.modules() if recurse else [module]:
            for store in (part._parameters, part._buffers):
                store.update({k: arrived(t) for k, t in store.items() if t is not None and t.is_meta})

    return fill


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


HOSTED = WeakTensorKeyDictionary()  # tensor that moves to and fro: its memory on the CPU


@torch.no_grad()
def move(run, device: torch.device) -> None:
    """Move the parameters, buffers and optimizer states of `run` to `device`. They stay the same objects, which the
    optimizer refers to. GPU memory that this process holds without using it is freed.

    Shards of FSDP2 are in CPU memory (--offload) and stay there. Of these only gathered weights are freed: after a
    forward pass without a backward pass the root module is still gathered.
    """
    frozen = {"reference": (run.reference, None), "teacher": (run.teacher, None)}
    for module, optimizer in (run.modules | frozen).values():
        modules = module.modules() if module is not None else ()
        if sharded := [part for part in modules if isinstance(part, FSDPModule)]:
            for part in sharded:
                part.reshard()
        elif module is not None:
            states = optimizer.state.values() if optimizer else ()
            state = [value for each in states for value in each.values() if isinstance(value, Tensor)]
            for tensor in [*module.parameters(), *module.buffers(), *state]:
                tensor.data = on_host(tensor) if device.type == "cpu" else tensor.to(device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def on_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, kept for the tensor's next turn: copies to and from fresh memory take longer."""
    if tensor not in HOSTED:
        HOSTED[tensor] = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
    return HOSTED[tensor].copy_(tensor)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DDP's or FSDP1's wrapper; FSDP2 has none."""
    return model.module if isinstance(model, DistributedDataParallel | FullyShardedDataParallel) else model


# ---- names of weights -----------------------------------------------------------------------------------------------


# Some of transformers' conversions transpose a tensor if its shape is not that of the model, such as experts of
# Qwen3-VL's mixtures. On the way back each tensor has that shape, so none would be transposed; vLLM always does it.
Transpose.reverse_op = property(lambda self: Transpose(self.dim1, self.dim0))


def as_in_a_checkpoint(hf_model: nn.Module, weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Weights under the names, and in the pieces, of `save_pretrained`: transformers renames and fuses some when it
    loads a model (vision towers, experts), and a server's loader expects them as they were published."""
    return list(revert_weight_conversion(hf_model, dict(weights)).items())


def layer_of(named: tuple[str, nn.Module]) -> str:
    """The beginning of the name that all modules of a layer have, such as "model.layers.3"; "" for others."""
    return re.match(r".*?\.\d+(?=\.|$)|", named[0])[0]


# ---- one by one -----------------------------------------------------------------------------------------------------


def clean_name(name: str) -> str:
    """A parameter's name in the transformers model, without the prefixes of DDP, FSDP, PEFT and `Policy`."""
    name = re.sub(r"(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.|\.base_layer", "", name)
    name = name.removeprefix("module.").removeprefix("model.")  # DDP, then Policy.model
    return name.removeprefix("base_model.model.")  # PeftModel -> LoraModel -> the model itself


def walk(name: str, module: nn.Module, stop: type | tuple) -> Iterator[tuple[str, nn.Module]]:
    """Modules below `module`, itself included, children first; stops at `stop` types and at LoRA layers."""
    if not is_lora(module):
        for key, child in module.named_children():
            if not isinstance(child, stop):
                yield from walk(f"{name}.{key}" if name else key, child, stop)
    yield name, module


def parameters_of(name: str, module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of the module's own parameters, not its children's. Those of FSDP2 stay sharded, and
    are rounded to `dtype` here, before they are gathered, so that half the bytes travel."""
    if is_lora(module):
        yield clean_name(f"{name}.weight"), folded_weight(module, dtype)
        if module.base_layer.bias is not None:
            yield clean_name(f"{name}.bias"), module.base_layer.bias.detach()
        return
    for key, parameter in module.named_parameters(recurse=False):
        tensor = parameter.detach()
        yield clean_name(f"{name}.{key}"), rounded(tensor, dtype) if isinstance(tensor, DTensor) else tensor


def rounded(tensor: Tensor, dtype: torch.dtype, copy: bool = False) -> Tensor:
    """A matrix in `dtype`; a vector in its own."""
    return tensor.to(dtype if tensor.ndim > 1 else tensor.dtype, copy=copy)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of an FSDP2 shard (collective); any other tensor unchanged. A shard in CPU memory (--offload,
    --colocate) is copied to the GPU first, and gathered there."""
    if isinstance(tensor, DTensor):
        return tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor


def gathered(bucket: list[tuple[str, Tensor]], keep: bool) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket, gathered from their shards. Collective; keep=False: this rank only takes part."""
    tensors = [(name, full(tensor)) for name, tensor in bucket]
    return tensors if keep else []


@torch.no_grad()
def move_towards(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """ref <- alpha * policy + (1 - alpha) * ref (--ref_sync_steps). Both have the same modules and shards."""
    for model in (reference, policy):
        if isinstance(model, FSDPModule):  # after a forward pass without a backward one a root module is still
            model.reshard()  # gathered, and what is written to gathered weights is lost
    for old, new in zip(reference.parameters(), policy.parameters(), strict=True):
        old.lerp_(new.to(old.dtype), alpha)


def exchanging(policy: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """A context for one backward pass of an update. DDP sums gradients over ranks in the last pass only. FSDP reduces
    them in every pass, but fsdp2 with --shard_size sums over the copies of the shards in the last pass only."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_all_reduce(last)
    return policy.no_sync() if isinstance(policy, DistributedDataParallel) and not last else contextlib.nullcontext()


def saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of the buffers that belong in a checkpoint, such as the bias that some routers add to
    their scores."""
    parts = ((f"{name}.{key}", part, key) for name, part in model.named_modules() for key in part._buffers)
    saved = [(clean_name(n), part._buffers[k]) for n, part, k in parts if k not in part._non_persistent_buffers_set]
    return [(name, tensor) for name, tensor in saved if tensor is not None]
