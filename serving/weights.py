"""The server's end of a weight push: a vLLM weight-transfer engine on torch process groups, gloo or NCCL.

vLLM imports this module in every worker, which registers the engine under the name "torch":

    vllm serve MODEL --worker-extension-cls serving.weights.Worker --weight-transfer-config '{"backend": "torch"}'

A push is vLLM's own: /start_weight_update, one /update_weights a bucket beside a broadcast, /finish_weight_update.
vLLM's layerwise reload puts the tensors in place and counts them; what it counted too little of is refused by name
before the push is finished. The other end is VLLMClient; nothing here knows of a trainer.
"""

import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel
from vllm.utils.nccl import unpinned_nccl_env

from serving import wire


@dataclass
class InitInfo(WeightTransferInitInfo):
    address: str  # of the trainer's TCPStore
    port: int
    rank_offset: int  # of this server's first worker in the group; the trainer is rank 0
    world_size: int  # the trainer and the workers of all servers
    backend: str  # "gloo" or "nccl"
    seconds: float  # for joining, and for one bucket


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class TorchEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        self.group = self.store = None
        self.over, self.seconds = torch.device("cpu"), 60.0
        self.loading = False  # between start and finish: layers may lie on torch's meta device

    def init_transfer_engine(self, info: InitInfo) -> None:
        """Join the trainer's group; an earlier trainer's is left."""
        self.shutdown()
        parallel = self.parallel_config
        rank = info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        limit = timedelta(seconds=info.seconds)
        self.store = dist.TCPStore(info.address, info.port, info.world_size, is_master=False, timeout=limit)
        mine = wire.local_address(info.address)
        with unpinned_nccl_env():  # VLLM_BATCH_INVARIANT sets NCCL up in a way that the trainer's end does not know
            self.group = wire.join(self.store, rank, info.world_size, info.backend, mine, info.seconds)
        self.over, self.seconds = self.device if info.backend == "nccl" else torch.device("cpu"), info.seconds

    def start_weight_update(self) -> None:
        self.abort()
        initialize_layerwise_reload(self.model)
        pack_experts_again(self.model)
        self.loading = True

    def update_weights(self, update_info: dict) -> None:
        """The base class synchronises an accelerator, which CPUs lack."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def receive_weights(self, info: UpdateInfo) -> None:
        """One bucket, into the model: what has come is loaded while the rest is under way. In new memory each time, as
        layers that wait for more of theirs keep views of it. ValueError names what has no place in the model."""
        parts = list(wire.pieces(info.dtype_names, info.shapes, self.over))
        under_way = [wire.begin_broadcast(self.group, piece) for piece, _ in parts]
        names, current = iter(info.names), ""

        def one_by_one() -> Iterator[tuple[str, Tensor]]:
            nonlocal current
            for work, (_, tensors) in zip(under_way, parts, strict=True):
                try:
                    wire.finish(work, self.seconds)
                except BaseException:
                    self.shutdown()  # NCCL's kernel waits on, and whatever synchronises the GPU would wait for it
                    raise
                for tensor in tensors:
                    current = next(names)
                    yield current, tensor.to(self.device)

        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(one_by_one())
        except Exception as error:
            if self.group is None:  # it did not come
                raise
            shape = info.shapes[info.names.index(current)]
            raise ValueError(f"the server's model has no place for {current} {shape}: {error!r:.300}") from error

    def finish_weight_update(self) -> None:
        """ValueError names layers that got less than they hold; the update stays open, and unfinished, then."""
        if missing := missing_weights(self.model):
            names = ", ".join(missing[:8]) + " ..." * (len(missing) > 8)
            raise ValueError(f"the push left out weights of {len(missing)} layers: {names}")
        keep_buffers(self.model)
        tied = tied_layers(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in tied:  # on CPUs it computes with a packed copy of the shared weight, which the reload leaves as is
            layer.quant_method.process_weights_after_loading(layer)
        self.loading = False

    def abort(self) -> None:
        """Forget an update that will not be finished. Layers that were complete keep the new weights, the others get
        their old ones back: the model is sound, but of no policy that ever was, until the next push."""
        if not self.loading:
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = info.load_numel_total = 0  # "nothing came": then the reload restores what was there
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)
        self.loading = False

    def shutdown(self) -> None:
        if self.group is not None and self.over.type == "cuda":
            self.group.abort()
        self.group = self.store = None


def tied_layers(model: nn.Module) -> list[nn.Module]:
    """Output layers that got nothing because their weight is the embedding's, which came under its own name."""
    came, waiting = set(), {}
    for layer in (layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)):
        info = get_layerwise_info(layer)
        held = (info.kernel_tensors or [vars(layer)["_parameters"]])[0].get("weight")  # where it lies when it is used
        if info.load_numel or not info.can_load():
            came.add(held.data_ptr())
        elif held is not None:
            waiting[layer] = held.data_ptr()
    return [layer for layer, place in waiting.items() if place in came]


def missing_weights(model: nn.Module) -> list[str]:
    """Layers that still wait for weights, by the reload's own counters. Of padded vocabularies the padding never comes,
    attention has only scales of its own."""
    missing, tied = [], tied_layers(model)
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        weights = [p for key, p in layer.named_parameters(recurse=False) if key not in SKIP_LOAD_TENSORS]
        wanted = sum(map(get_tensor_load_numel, weights))  # the reload's own total has buffers, which are not sent
        waits = info.can_load() and info.load_numel < wanted
        padded = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0
        if waits and not padded and not is_deferred_attention_layer(layer) and layer not in tied:
            missing.append(f"{name} ({info.load_numel} of {wanted} numbers came)")
    return missing


def copied(param: Tensor, loaded_weight: Tensor) -> None:
    """A weight loader; the reload wants the names of its arguments to be vLLM's."""
    param.data.copy_(loaded_weight)


def keep_buffers(model: nn.Module) -> None:
    """No checkpoint has buffers such as an activation's constants, and the reload would leave them to chance."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or not info.loaded_weights or is_deferred_attention_layer(layer):
            continue
        loaded = {name for name, _ in info.loaded_weights}
        for name, buffer in layer.named_buffers(recurse=False):
            kept = info.kernel_tensors[1].get(name)
            if name not in loaded and buffer.is_meta and kept is not None and kept.shape == buffer.shape:
                buffer.weight_loader = copied
                info.loaded_weights.append((name, inspect.signature(copied).bind(buffer, kept.clone())))


def pack_experts_again(model: nn.Module) -> None:
    """Some kernels of experts, those of CPUs among them, want their weights in another order. vLLM puts them into it
    when it loads a model, but not when it loads it again: what came would be read as if it were packed."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is not None and "process_weights_after_loading" not in vars(method):
            method.process_weights_after_loading = functools.partial(
                pack_once, method.process_weights_after_loading, experts
            )


def pack_once(process, experts, layer: nn.Module) -> None:
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


class Worker:
    """What vLLM mixes into its worker; called by name over POST /collective_rpc."""

    def describe(self) -> dict:
        """What a trainer has to know of this server. GET /server_info lacks the model's sizes, and takes 10 s."""
        config = self.vllm_config
        text = config.model_config.hf_text_config
        return {
            "model": config.model_config.model,
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "num_layers": text.num_hidden_layers,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "window": config.model_config.max_model_len,
            "gpu": wire.gpu_of(self.device),
            "engine": config.weight_transfer_config and config.weight_transfer_config.backend,
            "can_sleep": config.model_config.enable_sleep_mode,
            "tells_experts": config.aux_output_config.enable_return_routed_experts,
        }

    def abort_weight_update(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            self.weight_transfer_engine.abort()
        self._weight_update_active = False


WeightTransferEngineFactory.register_engine("torch", TorchEngine)
