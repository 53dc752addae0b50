"""Parameters of a model: on which ranks and devices they lie, and what checkpoints call them."""

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
from modeling.model import folded, is_lora
from utils import gather_objects, is_main, raise_together, world_size

# ---- where they lie --------------------------------------------------------------------------------------------------


def device_mesh(device: torch.device, cfg: TrainConfig) -> DeviceMesh:
    """Copies x ranks that share each, or all ranks. To its groups torch would give limits of its own."""
    world = world_size()
    size = cfg.shard_size or world
    shape, names = ((size,), ("shard",)) if size == world else ((world // size, size), ("replicate", "shard"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        group.set_timeout(datetime.timedelta(seconds=cfg.dist_timeout))
    return mesh


@contextlib.contextmanager
def on_rank_0(what: str, everywhere: bool = False) -> Iterator[None]:
    """The models made inside have values on rank 0, elsewhere shapes alone (torch's meta device); see `emptied`.

    Collective. An error is raised on every rank. everywhere: they have values on all.
    """
    error = None
    try:
        with contextlib.nullcontext() if is_main() or everywhere else torch.device("meta"):
            yield
    except Exception as caught:  # carried to raise_together, which raises it on every rank
        error = caught
    raise_together(error, what)


def emptied(model: nn.Module, device: torch.device) -> Callable[..., None]:
    """Empty a model that has values on rank 0; returns fill(module, recurse=True), which gives a part of it memory on
    `device` and the values that rank 0 had, on every rank. All ranks call both.

    What is filled layer by layer, and cut into shards at once, is never whole on any device but rank 0's CPU. There it
    leaves as it is filled. Tied weights stay one.
    """
    stores = [store for module in model.modules() for store in (module._parameters, module._buffers)]
    tensors = {tensor: None for store in stores for tensor in store.values() if tensor is not None}  # each once
    dtypes = gather_objects([tensor.dtype for tensor in tensors])[0]  # from_pretrained keeps some of them wider
    empty = {t: _like(t, torch.empty(t.shape, dtype=d, device="meta")) for t, d in zip(tensors, dtypes, strict=True)}
    values = {empty[tensor]: tensor.detach() for tensor in tensors} if is_main() else {}
    for store in stores:
        store.update({key: empty[tensor] for key, tensor in store.items() if tensor is not None})
    filled = weakref.WeakValueDictionary()  # so that it holds no layer that was cut

    @torch.no_grad()
    def arrived(tensor: Tensor) -> Tensor:
        if (made := filled.get(tensor)) is None:
            whole = values.pop(tensor).to(device).contiguous() if is_main() else torch.empty_like(tensor, device=device)
            if world_size() > 1:
                dist.broadcast(whole, 0)
            filled[tensor] = made = _like(tensor, whole)
        return made

    def fill(module: nn.Module, recurse: bool = True) -> None:
        for part in module.modules() if recurse else [module]:
            for store in (part._parameters, part._buffers):
                store.update({k: arrived(t) for k, t in store.items() if t is not None and t.is_meta})

    return fill


def _like(tensor: Tensor, data: Tensor) -> Tensor:
    return nn.Parameter(data, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data


HOSTED = WeakTensorKeyDictionary()  # of a tensor that takes turns, its memory on the CPU


@torch.no_grad()
def move(run, device: torch.device) -> None:
    """All that `run` trains with to `device`: parameters, buffers, optimizer state. They stay the objects that the
    optimizer knows. What this process holds free on the GPU is given back.

    Shards of FSDP2 are in CPU memory (--offload) and stay there; what is gathered of them goes: after a forward pass
    alone a root module is still whole.
    """
    frozen = {"reference": (run.reference, None), "teacher": (run.teacher, None)}
    for module, optimizer in (run.modules | frozen).values():
        parts = module.modules() if module is not None else ()
        if sharded := [part for part in parts if isinstance(part, FSDPModule)]:
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
    """A copy in pinned memory that is the tensor's from now on, as copies to and from fresh memory take longer."""
    if tensor not in HOSTED:
        HOSTED[tensor] = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
    return HOSTED[tensor].copy_(tensor)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module in the wrapper of DDP or FSDP1; FSDP2 has none."""
    return model.module if isinstance(model, DistributedDataParallel | FullyShardedDataParallel) else model


# ---- names of weights -----------------------------------------------------------------------------------------------


# Some of transformers' conversions turn a tensor that has not the model's shape, such as experts of Qwen3-VL's
# mixtures. On the way back each has it, and none would be turned; vLLM always turns them.
Transpose.reverse_op = property(lambda self: Transpose(self.dim1, self.dim0))


def as_in_a_checkpoint(hf_model: nn.Module, named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Weights under the names, and in the pieces, that `save_pretrained` writes: transformers renames and fuses some
    when it loads a model (vision towers, experts), and a server's loader knows them as published."""
    return list(revert_weight_conversion(hf_model, dict(named)).items())


def layer_of(name: str) -> str:
    """The beginning of a parameter's name that all of its layer have, such as "model.layers.3."; "" for none."""
    return re.match(r".*?\.\d+\.|", name)[0]


# ---- one by one -----------------------------------------------------------------------------------------------------


def clean_name(name: str) -> str:
    """The name a parameter has in the transformers model, without what DDP, FSDP, PEFT and `Policy` put around it."""
    name = re.sub(r"(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.|\.base_layer", "", name)
    name = name.removeprefix("module.").removeprefix("model.")  # DDP, then Policy.model
    return name.removeprefix("base_model.model.")  # PeftModel -> LoraModel -> the model itself


def walk(name: str, module: nn.Module, stop: type | tuple) -> Iterator[tuple[str, nn.Module]]:
    """Modules below `module`, itself included, children first; neither past `stop` types nor into a LoRA layer."""
    if not is_lora(module):
        for key, child in module.named_children():
            if not isinstance(child, stop):
                yield from walk(f"{name}.{key}" if name else key, child, stop)
    yield name, module


def parameters_of(name: str, module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, tensor) pairs of the module's own parameters, not its children's. FSDP2's stay sharded, and
    are rounded to `dtype` before they are gathered, as half the bytes travel then."""
    if is_lora(module):
        yield clean_name(f"{name}.weight"), folded(module, dtype)
        if module.base_layer.bias is not None:
            yield clean_name(f"{name}.bias"), module.base_layer.bias.detach()
        return
    for key, parameter in module.named_parameters(recurse=False):
        tensor = parameter.detach()
        yield clean_name(f"{name}.{key}"), rounded(tensor, dtype) if isinstance(tensor, DTensor) else tensor


def rounded(tensor: Tensor, dtype: torch.dtype, copy: bool = False) -> Tensor:
    """A matrix in `dtype`; a vector as it is."""
    return tensor.to(dtype if tensor.ndim > 1 else tensor.dtype, copy=copy)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of an FSDP2 shard (a collective), any other tensor as it is. A shard that waits in CPU memory
    (--offload, --colocate) goes to the GPU first, and travels from there."""
    if isinstance(tensor, DTensor):
        return tensor.to(tensor.device_mesh.device_type).full_tensor()
    return tensor


def gathered(bucket: list[tuple[str, Tensor]], keep: bool) -> list[tuple[str, Tensor]]:
    """The tensors of a bucket made whole; all ranks call it. With keep=False this rank only takes part."""
    whole = [(name, full(tensor)) for name, tensor in bucket]
    return whole if keep else []


@torch.no_grad()
def move_towards(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """ref <- alpha * policy + (1 - alpha) * ref (--ref_sync_steps). Both have the same modules and shards."""
    for model in (reference, policy):
        if isinstance(model, FSDPModule):  # a root module stays gathered after a forward pass without a backward one,
            model.reshard()  # and what is written to the gathered weights is lost
    for old, new in zip(reference.parameters(), policy.parameters(), strict=True):
        old.lerp_(new.to(old.dtype), alpha)


def exchanging(policy: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """DDP sums gradients over ranks in the last backward pass of an update only. FSDP reduces in every pass; fsdp2 with
    --shard_size sums over the copies of the shards in the last pass only."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_all_reduce(last)
    return policy.no_sync() if isinstance(policy, DistributedDataParallel) and not last else contextlib.nullcontext()


def saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(checkpoint name, tensor) of what is not trained and part of a model all the same: what some routers add to their
    scores, for one."""
    parts = ((f"{name}.{key}", part, key) for name, part in model.named_modules() for key in part._buffers)
    saved = [(clean_name(n), part._buffers[k]) for n, part, k in parts if k not in part._non_persistent_buffers_set]
    return [(name, tensor) for name, tensor in saved if tensor is not None]
