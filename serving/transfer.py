"""The server's end of a weight push: a vLLM weight-transfer engine on torch process groups alone, and its routes.

vLLM imports this module in every worker (`--worker-extension-cls serving.transfer.TransferWorker`), which registers the
engine under the name "torch"; vllm_server.py imports it for the routes. A push is start -> one update a bucket ->
report -> finish; vLLM's layerwise reload puts the tensors in place. The same code runs on GPUs (NCCL) and CPUs (gloo);
the trainer says which.

The report answers "was every parameter covered exactly once?". It is counted where vLLM's own weight loaders copy:
each loader call is traced back to the name that was sent by the place of its tensor in the bucket, so it holds for
merged (qkv, gate/up), renamed, sharded and expert parameters alike. A name that no loader took is unknown; a tensor
of which only a part was taken is misshapen; a parameter that got less than its size is missing.
"""

import asyncio
import bisect
import collections
import functools
import inspect
import logging
import multiprocessing
import os
import re
import sys
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from fastapi import APIRouter, HTTPException
from pydantic import BaseModel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, make_online_process_loader
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.utils.nccl import unpinned_nccl_env

from serving import kernels, shared  # noqa: F401 - kernels mends vLLM's where it is imported
from serving.receiver import Receiver
from serving.rendezvous import Joined
from serving.sleep import Sleep
from serving.wire import all_equal, fold, local_address, not_finite, open_group, some

# ---- in the workers: receiving and putting in place ------------------------------------------------------------------


@dataclass
class InitInfo(WeightTransferInitInfo):
    secret: str  # of this connection; whoever takes part in it proves that he knows it
    address: str  # of the trainer's rendezvous
    port: int
    backend: str  # "gloo" | "nccl"
    world_size: int  # trainer (rank 0) + all workers of this server
    timeout: float  # seconds for joining, and for one bucket
    keep: bool = False  # the buckets of a push, for a later one that sends only what has changed
    probe: list[int] | None = None  # of the trainer's memory (serving/shared.py); None: buckets travel in the group


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    checksums: list[int]  # of the whole tensors, also where only changes travel
    push: str = ""  # name of this push
    base: str | None = None  # the complete push that it changes
    changed: int | None = None  # so many 16-bit words of the kept bucket, which travel with their places; None: all
    memory: list[int] | None = None  # where the bucket lies, in a process of this machine; None: it is broadcast


@dataclass
class Push:
    """What has arrived so far. Parameters of the server are keyed by (module, name)."""

    sent: dict[str, int] = field(default_factory=dict)  # elements sent, by name
    taken: dict[str, int] = field(default_factory=dict)  # elements that loaders of this worker copied
    filled: dict[tuple, int] = field(default_factory=dict)
    sources: dict[tuple, set[str]] = field(default_factory=dict)  # the names each parameter was filled from
    storages: dict[int, tuple] = field(default_factory=dict)  # address -> parameter filled there (tied ones share it)
    checksums: list[int] = field(default_factory=list)
    bucket: torch.Tensor | None = None
    names: list[str] = field(default_factory=list)  # of the bucket, with the first byte of each
    starts: list[int] = field(default_factory=list)
    parameters: dict[int, tuple] = field(default_factory=dict)  # id -> (parameter, layer, its key)
    loading: int = 0  # loaders that are at work
    current: str = ""
    target: str = ""  # the server's parameter that was written last, for messages

    def source_of(self, tensor: torch.Tensor) -> str:
        """The sent name that `tensor`, a view into the bucket, belongs to."""
        if tensor.untyped_storage().data_ptr() != self.bucket.untyped_storage().data_ptr():
            return self.current  # the model code made a copy on the way (a transposition, a sum)
        return self.names[bisect.bisect_right(self.starts, tensor.storage_offset() * tensor.element_size()) - 1]


def address(info, name: str) -> int:
    """Where the storage behind a layer's parameter lies; 0 for none (kernels with a packed copy of their own)."""
    kernel = info.kernel_tensors[0].get(name) if info.kernel_tensors is not None else None
    return 0 if kernel is None else kernel.data_ptr()


def pack_experts_again(model: torch.nn.Module) -> None:
    """Some kernels of experts, those of CPUs among them, want their weights in another order. vLLM puts them into it
    when it loads a model, but not when it loads it again: what came would be read as if it were packed."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is not None and "process_weights_after_loading" not in vars(method):
            method.process_weights_after_loading = functools.partial(
                pack_once, method.process_weights_after_loading, experts
            )


def pack_once(process, experts, layer: torch.nn.Module) -> None:
    """`process(layer)`, and the experts' part of it if that has left it out."""
    packed = []
    experts.process_weights_after_loading = lambda layer: packed.append(
        type(experts).process_weights_after_loading(experts, layer)
    )
    try:
        process(layer)
        if not packed:
            experts.process_weights_after_loading(layer)
    finally:
        del experts.process_weights_after_loading


class Copies(TorchFunctionMode):
    """During a reload vLLM replaces parameters by shapes without memory (meta tensors) and notes the calls of their
    weight_loader. A model that writes `param.data.copy_(x)` itself would write into nothing: in this mode such a copy
    becomes a call of the loader."""

    def __init__(self, engine: "TorchTransferEngine"):
        super().__init__()
        self.engine, self.data = engine, {}  # of a `parameter.data`, by its id: itself, lest it goes, and the parameter

    def __torch_function__(self, function, types, args=(), kwargs=None):
        push = self.engine.push
        if function == torch.Tensor.data.__get__ and id(args[0]) in push.parameters:
            out = function(*args)
            self.data[id(out)] = (out, args[0])
            return out
        parameter = None
        if function is torch.Tensor.copy_ and not push.loading:
            _, parameter = self.data.get(id(args[0]), (None, args[0]))
        if id(parameter) not in push.parameters:
            return function(*args, **(kwargs or {}))
        _, layer, key = push.parameters[id(parameter)]
        if parameter.is_meta:
            parameter.weight_loader = copied
            parameter.weight_loader = self.engine._counting(make_online_process_loader(layer, key[1]), layer, key)
            parameter.weight_loader(parameter, args[1])
            return args[0]
        source = push.source_of(args[1])  # one that the reload lets be what it was
        push.taken[source] = push.taken.get(source, 0) + args[1].numel()
        return function(*args, **(kwargs or {}))


@dataclass
class Connection:
    """A trainer's process group, joined by this worker, and what receives buckets through it."""

    store: Joined
    backend: str
    receiver: Receiver

    @classmethod
    def open(cls, info: InitInfo, parallel, device: torch.device) -> "Connection":
        """parallel: vLLM's ParallelConfig. device: the worker's."""
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        limit, mine = info.timeout, local_address(info.address, info.port)
        store = Joined(info.secret, info.address, info.port, limit)
        with unpinned_nccl_env():  # VLLM_BATCH_INVARIANT sets NCCL up in a way that the trainer's end does not know
            group = open_group(store, info.secret, rank, info.world_size, info.backend, limit, mine)
        if info.probe is not None:
            all_equal(group, info.world_size, shared.read(info.probe), limit)  # the trainer draws conclusions
        over = device if info.backend == "nccl" else torch.device("cpu")
        return cls(store, info.backend, Receiver(group, limit, over, info.keep))

    def close(self) -> None:
        if self.backend == "nccl":
            self.receiver.group.abort()
        self.store.close()


def views(
    bucket: torch.Tensor, starts: list[int], sizes: list[int], info: UpdateInfo, before: Collection[str]
) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a bucket as `info` announces them, where they lie. ValueError for one that holds nan or inf, or
    that came before in this push."""
    counts = collections.Counter([*before, *info.names])
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise ValueError(f"sent twice in one push: {', '.join(repeated[:8])}; send every parameter once")
    dtypes = [getattr(torch, dtype) for dtype in info.dtypes]
    tensors = [
        (name, bucket[start : start + size].view(dtype).view(shape))
        for name, dtype, shape, start, size in zip(info.names, dtypes, info.shapes, starts, sizes, strict=True)
    ]
    if bad := not_finite(tensors):  # one would be enough to fill the KV cache with nan
        raise ValueError(f"nan or inf in {some(bad)}; the server keeps none of this bucket")
    return tensors


def copied(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
    """A loader; the reload wants the names of its arguments to be vLLM's."""
    if param.shape != loaded_weight.shape:
        raise ValueError(f"{list(loaded_weight.shape)} into {list(param.shape)}")
    param.data.copy_(loaded_weight)


class TorchTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        self.connection: Connection | None = None
        self.push: Push | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's group; whatever an earlier trainer left is dropped."""
        self.shutdown()
        self.connection = Connection.open(init_info, self.parallel_config, self.device)

    def start_weight_update(self) -> None:
        self.push = Push()
        self.connection.receiver.start()
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead) and layer.bias is not None:
                layer._register_bias = lambda: None  # it has one; another would have no loader that counts
        initialize_layerwise_reload(self.model)
        pack_experts_again(self.model)
        for module_name, layer in self.model.named_modules():
            for name, parameter in layer.named_parameters(recurse=False):
                self.push.parameters[id(parameter)] = (parameter, layer, (module_name, name))
                loader = getattr(parameter, "weight_loader", None)  # some parameters never come from a checkpoint
                if loader is None or name in SKIP_LOAD_TENSORS:  # these keep their memory, and `Copies` counts them
                    continue
                if "counts_pushes" not in vars(loader):  # the reload keeps wrappers it made
                    parameter.weight_loader = self._counting(loader, layer, (module_name, name))

    def _counting(self, loader, layer, key):
        """Wrap a loader of the layerwise reload so that it writes down what it copied, from where to where."""
        info = get_layerwise_info(layer)

        @functools.wraps(loader)  # also its name, by which the reload knows its own wrappers
        def counted(*args, **kwargs):
            push = self.push
            source = push.source_of(args[1] if len(args) > 1 else kwargs["loaded_weight"])
            push.target = ".".join(part for part in key if part)
            if not info.can_load():
                raise ValueError(f"{source} arrived although {push.target} was complete: sent twice?")
            place = address(info, key[1])
            if place and push.storages.setdefault(place, key) != key:
                first = ", ".join(push.sources[push.storages[place]])
                raise ValueError(f"{source} and {first} are one (tied) parameter of the server's; send it once")
            before, total = info.load_numel, info.load_numel_total
            push.loading += 1
            try:
                result = loader(*args, **kwargs)
            finally:
                push.loading -= 1
            count = (info.load_numel if info.can_load() else total) - before  # a complete layer is reset
            push.taken[source] = push.taken.get(source, 0) + count
            push.filled[key] = push.filled.get(key, 0) + count
            push.sources.setdefault(key, set()).add(source)
            return result

        counted.counts_pushes = True
        return counted

    def update_weights(self, update_info: dict) -> None:
        """The base class synchronises an accelerator, which CPUs lack."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive one bucket, compare its checksums and hand its tensors to the model."""
        push, names = self.push, update_info.names
        try:
            bucket, starts, sizes = self.connection.receiver.receive(update_info)
        except ValueError:  # damaged, but all of it came: the group is sound
            raise
        except BaseException:
            self.shutdown()  # NCCL's kernel waits on, and whatever synchronises the GPU from now on would wait for it
            raise
        began, bucket = time.perf_counter(), bucket.to(self.device)
        tensors = views(bucket, starts, sizes, update_info, push.sent)
        push.checksums += update_info.checksums
        push.bucket, push.names, push.starts = bucket, names, starts

        def one_by_one():
            for name, tensor in tensors:
                push.current, push.target, push.sent[name] = name, "", tensor.numel()
                yield name, tensor

        try:
            with disable_mtp_completeness_check(), Copies(self):
                self.model.load_weights(one_by_one())
        except Exception as error:
            shape = update_info.shapes[names.index(push.current)] if push.current in names else []
            where = f"does not fit the server's {push.target}" if push.target else "has no place in the server's model"
            raise ValueError(
                f"{push.current} of shape {shape} {where}: {type(error).__name__}: {str(error)[:200]}"
            ) from error
        self._copy_waiting(bucket)
        push.bucket = None
        self.connection.receiver.seconds["load"] += time.perf_counter() - began

    def _copy_waiting(self, bucket: torch.Tensor) -> None:
        """Layers that are still waiting for their other tensors hold on to those that came: in a copy from now on, as
        the bucket's memory is used again."""
        place = bucket.untyped_storage().data_ptr()

        def own(value):
            inside = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == place
            return value.clone() if inside else value

        for layer in self.model.modules():
            for _, call in get_layerwise_info(layer).loaded_weights:
                call.arguments.update(tree_map(own, dict(call.arguments)))

    def report(self) -> dict:
        """{"sent", "taken": elements by name; "missing": parameters that got less than their size; "checksum";
        "seconds" by phase; "sliced": whether engines hold slices of the experts}."""
        seen: set[int] = set()  # of a tied pair only the first is named
        parallel = self.parallel_config  # a dense model's engines each have a data_parallel_size of 1
        layers = self.model.named_modules()
        return {
            "sent": self.push.sent,
            "taken": self.push.taken,
            "missing": [text for name, layer in layers for text in self._missing(name, layer, seen)],
            "checksum": fold(self.push.checksums),
            "seconds": dict(self.connection.receiver.seconds),
            "sliced": parallel.data_parallel_size > 1 and not parallel.enable_expert_parallel,
        }

    def _missing(self, module_name: str, layer: torch.nn.Module, seen: set[int]) -> list[str]:
        info, push, texts = get_layerwise_info(layer), self.push, []
        if not info.can_load() or is_deferred_attention_layer(layer):  # complete; or has only scales of its own
            return texts
        for name, parameter in layer.named_parameters(recurse=False):
            filled, size = push.filled.get((module_name, name), 0), get_tensor_load_numel(parameter)
            place = address(info, name)
            if filled >= size or self._tied(info, name) or place in seen or name in SKIP_LOAD_TENSORS:
                continue  # of the last the reload lets be what it was
            seen.update({place} - {0})
            if filled and isinstance(layer, VocabParallelEmbedding):
                continue  # padded to a round number of rows; its loader checks the true number
            prefix, _, leaf = module_name.rpartition(".")
            pieces = getattr(self.model, "packed_modules_mapping", {}).get(leaf, [])
            sources = push.sources.get((module_name, name), set())
            absent = [piece for piece in pieces if not any(f".{piece}." in f".{source}" for source in sources)]
            if absent and len(pieces) > 1:
                texts += [f"{prefix}.{piece}.{name}" for piece in absent]
            else:
                texts.append(f"{module_name}.{name}" + (f" ({filled} of {size} elements)" if filled else ""))
        return texts

    def _tied(self, info, name: str) -> bool:
        """Whether a parameter was filled under another name: an output layer tied to the embedding, usually."""
        return info.load_numel == 0 and address(info, name) in self.push.storages

    def finish_weight_update(self) -> None:
        tied = [
            layer
            for layer in self.model.modules()
            if isinstance(layer, VocabParallelEmbedding) and self._tied(get_layerwise_info(layer), "weight")
        ]
        self._keep_buffers()
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in tied:  # on CPUs it computes with a packed copy of the shared weight, which the reload leaves as is
            layer.quant_method.process_weights_after_loading(layer)
        self.push = None
        self.connection.receiver.finish()

    def _keep_buffers(self) -> None:
        """No trainer sends buffers, as of an activation's constants, and the reload would leave them to chance."""
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if not info.can_load() or not info.loaded_weights or is_deferred_attention_layer(layer):
                continue
            loaded = {name for name, _ in info.loaded_weights}
            for name, buffer in layer.named_buffers(recurse=False):
                kept = info.kernel_tensors[1].get(name)
                if name not in loaded and buffer.is_meta and kept is not None and kept.shape == buffer.shape:
                    buffer.weight_loader = copied
                    info.loaded_weights.append((name, inspect.signature(copied).bind(buffer, kept.clone())))

    def abort(self) -> None:
        """Forget a push that will not be completed. Layers that were complete keep the new weights, the others get
        their old ones back: the model is sound, but of no policy that ever was."""
        if self.push is None:
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = info.load_numel_total = 0  # "nothing came": finalize then restores what was there
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)
        self.push = None

    def shutdown(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None


class TransferWorker:
    """Methods that vLLM mixes into its worker; vllm_server.py calls them by name in all workers at once."""

    def report_weight_update(self) -> dict:
        return self.weight_transfer_engine.report()

    def abort_weight_update(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.abort()
        self._weight_update_active = False

    def name_device(self) -> str:
        """The GPU's UUID, the same from any container (host names are not); "cpu" for a worker without."""
        return "cpu" if self.device.type != "cuda" else str(torch.cuda.get_device_properties(self.device).uuid)


def keep_last_error(path: str):
    """Copy this process's error log to `path`, from where the HTTP process tells clients why the engine died."""
    handler = logging.FileHandler(path, delay=True)
    handler.setLevel(logging.ERROR)
    logging.getLogger("vllm").addHandler(handler)


# ---- in the HTTP process: the routes of a push -----------------------------------------------------------------------
# They replace vLLM's of the same name, so that no push can pass them by.


class Session:
    """A trainer's pushes of one kind, and where they stand. One trainer at a time: the last that connected."""

    def __init__(self):
        self.session: str | None = None  # of the trainer that connected last
        self.instance = uuid.uuid4().hex  # another one whenever the server starts or a trainer connects
        self.timeout = 60.0
        self.active, self.since = False, 0.0  # between start and finish; since when, by time.monotonic()
        self.lock = asyncio.Lock()  # one step at a time
        self.alarm: asyncio.TimerHandle | None = None
        self.ringing: asyncio.Task | None = None  # kept, or it may be collected

    def check(self, session: str):
        if self.session != session:
            raise HTTPException(409, "another trainer has connected to this server since; only the last may push")

    async def break_off(self, engine, reason: str):
        """The push under way will not be completed."""
        raise NotImplementedError

    async def connecting(self, engine, session: str, init_info: dict):
        """A trainer is about to connect: what an earlier one left under way ends."""
        if self.active:
            await self.break_off(engine, "another trainer connected")
        if self.alarm:
            self.alarm.cancel()
        self.session, self.timeout = session, float(init_info.get("timeout", 60))
        self.instance = uuid.uuid4().hex


class Pushes(Session):
    """Pushes of whole weights."""

    def __init__(self):
        super().__init__()
        self.version = 0
        self.replaced = False  # the weights that --model has, by a push
        self.run: str | None = None  # the name of the run that connected last
        self.broken: str | None = None  # why the weights are of no policy; None when they are sound
        self.may_be_paused = False  # somebody's POST /pause came in, and no POST /resume since
        self.settled = asyncio.Event()  # set unless a push is under way
        self.settled.set()

    async def break_off(self, engine, reason: str):
        """The weights are of no policy now. Sequences under way are ended; their requests get the reason."""
        self.active, self.replaced = False, True
        self.broken = f"a weight push did not complete ({reason}); push all weights again to go on"
        self.session = None
        try:
            async with asyncio.timeout(self.timeout):
                # First: at a pause, engines of a mixture may compute a dummy batch, for which layers have to be whole.
                await engine.collective_rpc("abort_weight_update")
                await engine.pause_generation(mode="abort", clear_cache=False)
        except TimeoutError:
            self.broken += f", or start this server anew: its engine has not stopped within {self.timeout:g} s"
        except Exception as error:  # whatever vLLM raises: requests that wait must hear of it
            self.broken += f", or start this server anew: its engine could not be stopped ({bare_reason(error)})"
        finally:
            print(f"vllm_server: {self.broken}", file=sys.stderr, flush=True)
            self.settled.set()


def set_alarm(engine, pushes: Session):
    """A trainer that goes silent in mid-push is given up after its own time limit."""

    def ring():
        reason = f"the trainer was silent for {pushes.timeout:g} s"
        pushes.ringing = asyncio.ensure_future(pushes.break_off(engine, reason))

    pushes.alarm = asyncio.get_running_loop().call_later(pushes.timeout, ring)


class PushStep:
    """`async with`: one step at a time, by the trainer that connected last; an error breaks the push off."""

    def __init__(self, engine, pushes: Session, session: str, during_push: bool):
        self.engine, self.pushes, self.session, self.during_push = engine, pushes, session, during_push

    async def __aenter__(self):
        await self.pushes.lock.acquire()
        try:
            self.pushes.check(self.session)
            if self.pushes.active != self.during_push:
                raise HTTPException(409, f"a push is {'' if self.pushes.active else 'not '}under way")
        except HTTPException:
            self.pushes.lock.release()
            raise
        if self.pushes.alarm:
            self.pushes.alarm.cancel()

    async def __aexit__(self, kind, error, trace):
        try:
            if error is not None:
                reason = bare_reason(error)
                await self.pushes.break_off(self.engine, reason)
                if not isinstance(error, asyncio.CancelledError):
                    raise HTTPException(422, reason) from error
            elif self.pushes.active:
                set_alarm(self.engine, self.pushes)
        finally:
            self.pushes.lock.release()


def bare_reason(error: BaseException) -> str:
    """What a worker said, without what vLLM wraps around it on the way."""
    text = str(error) or type(error).__name__
    found = re.search(r"Worker failed with error [\"'](.*)[\"'], please check", text, re.DOTALL)
    return found.group(1) if found else text.removeprefix("Call to collective_rpc method failed: ")


def left_out(names: list[str], taken: dict[str, int]) -> set[str]:
    """Those of `names` that vLLM leaves out on purpose: it builds a vision tower up to the layer whose features are
    used, LLaVA's last but one, and then without the norm behind the last."""
    layers = re.compile(r"(.*vision.*\.layers\.)(\d+)\.")
    used: dict[str, int] = {}  # tower -> its last layer with a place in the server's model
    for name, count in taken.items():
        if count and (found := layers.match(name)):
            used[found[1]] = max(used.get(found[1], 0), int(found[2]))
    beyond = {name for name in names if (found := layers.match(name)) and int(found[2]) > used.get(found[1], 10**9)}
    norms = {name for name in names if beyond and "vision" in name and ".post_layernorm." in name}
    return beyond | norms


async def ask_workers(engine, method: str, *args) -> list[list]:
    """What `method(*args)` returns on every worker, by engine. vLLM's collective_rpc runs on all engines of a
    data-parallel server, too, but returns the answers of the first alone."""
    return await engine.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)


def check_coverage(engines: list[list[dict]]):
    """ValueError naming what a push lacked or had too much of. `engines`: of each engine its workers' reports.

    The workers of an engine share its parameters. Engines have copies, but for experts: each whole on one of them
    (expert parallel), or in slices on all.
    """
    reports = [report for workers in engines for report in workers]
    sent, merge = reports[0]["sent"], sum if reports[0]["sliced"] else max
    taken = {name: merge(sum(one["taken"].get(name, 0) for one in workers) for workers in engines) for name in sent}
    missing = sorted({name for report in reports for name in report["missing"]})
    unknown = [name for name in sent if taken[name] == 0 and sent[name]]
    unneeded = left_out(unknown, taken)
    problems = {
        "missing": missing,
        "unknown to the server's model": [name for name in unknown if name not in unneeded],
        "larger than the server's": [name for name in sent if 0 < taken[name] < sent[name]],
    }
    found = [f"{what}: {', '.join(names[:8])}" + " ..." * (len(names) > 8) for what, names in problems.items() if names]
    if found:
        raise ValueError("; ".join(found))


class SessionBody(BaseModel):
    session: str


class InitBody(SessionBody):
    init_info: dict
    run: str | None = None  # its name, for others to be told


class UpdateBody(SessionBody):
    update_info: dict


class FinishBody(SessionBody):
    weight_version: int


class AbortBody(SessionBody):
    reason: str = "the trainer gave up"


def push_routes(engine, pushes: Pushes, sleep: Sleep, adapters) -> APIRouter:
    """adapters: those of serving/adapters.py, which belong to the weights that are replaced."""
    router = APIRouter()

    @router.post("/init_weight_transfer_engine")
    async def init(body: InitBody):
        adapters.check_whole()
        async with pushes.lock:
            await pushes.connecting(engine, body.session, body.init_info)
            pushes.run = body.run
            await engine.collective_rpc("abort_weight_update")  # whatever an earlier trainer left unfinished
            await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=body.init_info))
        return {"policy_version": pushes.version, "instance": pushes.instance}

    @router.post("/start_weight_update")
    async def start(body: SessionBody):
        adapters.check_whole()  # a run may have come since this one connected
        async with PushStep(engine, pushes, body.session, during_push=False):
            pushes.active, pushes.since = True, time.monotonic()
            pushes.settled.clear()
            # Keeps sequences under way, and empties the caches: nothing is computed until the push is finished.
            await engine.pause_generation(mode="abort" if adapters.versions else "keep", clear_cache=True)
            await adapters.clear()
            await sleep.wake(["weights"])
            await engine.start_weight_update()
        return {}

    @router.post("/update_weights")
    async def update(body: UpdateBody):
        async with PushStep(engine, pushes, body.session, during_push=True):
            await engine.update_weights(WeightTransferUpdateRequest(update_info=body.update_info))
        return {}

    @router.post("/finish_weight_update")
    async def finish(body: FinishBody):
        async with PushStep(engine, pushes, body.session, during_push=True):
            reports = await ask_workers(engine, "report_weight_update")
            check_coverage(reports)
            await engine.finish_weight_update(str(body.weight_version))
            await sleep.wake(["weights", "kv_cache"])
            pushes.version, pushes.broken, pushes.active = body.weight_version, None, False
            pushes.replaced = True
            await engine.resume_generation()
            pushes.settled.set()
        first = reports[0][0]
        return {"policy_version": pushes.version, "checksum": first["checksum"], "seconds": first["seconds"]}

    @router.post("/abort_weight_update")
    async def abort(body: AbortBody):
        async with pushes.lock:
            if pushes.session == body.session and pushes.active:
                pushes.alarm.cancel()
                await pushes.break_off(engine, body.reason)
        return {}

    return router


# Rounding a tensor to the parameter's dtype is what a push means to do; vLLM would warn at each.
logging.getLogger("vllm.model_executor.models.utils").setLevel(logging.ERROR)
WeightTransferEngineFactory.register_engine("torch", TorchTransferEngine)
if "RL_SERVER_ERROR_FILE" in os.environ and multiprocessing.parent_process() is not None:  # a worker
    keep_last_error(os.environ["RL_SERVER_ERROR_FILE"])
