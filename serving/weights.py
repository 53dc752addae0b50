"""The server's end of a weight push: a vLLM weight-transfer engine on torch process groups, gloo or NCCL.

vLLM imports this module in every worker, which registers the engine under the name "torch":

    vllm serve MODEL --worker-extension-cls serving.weights.Worker --weight-transfer-config '{"backend": "torch"}'

A push uses vLLM's routes: /start_weight_update, then for each bucket /update_weights and a broadcast at the same time,
then /finish_weight_update. vLLM's layerwise reload puts the tensors in place and counts them; a push that lacks weights
fails with their names before it is finished. VLLMClient is the other end; nothing here depends on the trainer.
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
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
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
        self.loading = False  # between start and finish: layers may be on torch's meta device

    def init_transfer_engine(self, info: InitInfo) -> None:
        """Join the trainer's group, and leave an earlier trainer's."""
        self.shutdown()
        parallel = self.parallel_config
        rank = info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        limit = timedelta(seconds=info.seconds)
        self.store = dist.TCPStore(info.address, info.port, info.world_size, is_master=False, timeout=limit)
        own_address = wire.local_address(info.address)
        with unpinned_nccl_env():  # VLLM_BATCH_INVARIANT changes NCCL's settings; the trainer's are the usual ones
            self.group = wire.join(self.store, rank, info.world_size, info.backend, own_address, info.seconds)
        self.over, self.seconds = self.device if info.backend == "nccl" else torch.device("cpu"), info.seconds

    def start_weight_update(self) -> None:
        self.abort()
        initialize_layerwise_reload(self.model)
        pack_experts_again(self.model)
        self.loading = True

    def update_weights(self, update_info: dict) -> None:
        """Overridden since the base class synchronises an accelerator, which CPUs lack."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def receive_weights(self, info: UpdateInfo) -> None:
        """Load one bucket into the model; pieces that have come are loaded while others are under way. Each bucket has
        new memory, since layers that still wait for weights keep views of it. ValueError names a weight that has no
        place in the model."""
        parts = list(wire.pieces(info.dtype_names, info.shapes, self.over))
        broadcasts = [wire.begin_broadcast(self.group, piece) for piece, _ in parts]
        names, current = iter(info.names), ""

        def one_by_one() -> Iterator[tuple[str, Tensor]]:
            nonlocal current
            for work, (_, tensors) in zip(broadcasts, parts, strict=True):
                try:
                    wire.finish(work, self.seconds)
                except BaseException:
                    self.shutdown()  # else NCCL's kernel, and with it every synchronisation, would wait on
                    raise
                for tensor in tensors:
                    current = next(names)
                    yield current, tensor.to(self.device)

        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(one_by_one())
        except Exception as error:
            if self.group is None:  # the piece did not come
                raise
            shape = info.shapes[info.names.index(current)]
            raise ValueError(f"the server's model has no place for {current} {shape}: {error!r:.300}") from error

    def finish_weight_update(self) -> None:
        """ValueError names layers that lack weights; the update then stays open."""
        if missing := missing_weights(self.model):
            names = ", ".join(missing[:8]) + " ..." * (len(missing) > 8)
            raise ValueError(f"the push left out weights of {len(missing)} layers: {names}")
        keep_buffers(self.model)
        tied = tied_layers(self.model)
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in tied:  # on CPUs it has a packed copy of the shared weight, which the reload does not renew
            layer.quant_method.process_weights_after_loading(layer)
        self.loading = False

    def abort(self) -> None:
        """Forget an update that will not be finished. Complete layers keep their new weights, other layers get the old
        ones back. Until the next push the model works, but is a mixture of two policies."""
        if not self.loading:
            return
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.load_numel = info.load_numel_total = 0  # as if nothing came: the reload restores the old weights
                info.loaded_weights.clear()
        finalize_layerwise_reload(self.model, self.model_config)
        self.loading = False

    def shutdown(self) -> None:
        if self.group is not None and self.over.type == "cuda":
            self.group.abort()
        self.group = self.store = None


def tied_layers(model: nn.Module) -> list[nn.Module]:
    """Output layers that got no weight because theirs is the embedding's, which came under the embedding's name."""
    loaded_places, waiting_layers = set(), {}
    for layer in (layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)):
        info = get_layerwise_info(layer)
        weight = (info.kernel_tensors or [vars(layer)["_parameters"]])[0].get("weight")  # the memory it is used from
        if info.load_numel or not info.can_load():
            loaded_places.add(weight.data_ptr())
        elif weight is not None:
            waiting_layers[layer] = weight.data_ptr()
    return [layer for layer, place in waiting_layers.items() if place in loaded_places]


def missing_weights(model: nn.Module) -> list[str]:
    """Layers that still wait for weights, by the reload's counters. Not those of padded vocabularies, whose padding is
    never sent, or of attention, which only has scales."""
    missing, tied = [], tied_layers(model)
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        weights = [p for key, p in layer.named_parameters(recurse=False) if key not in SKIP_LOAD_TENSORS]
        needed = sum(map(get_tensor_load_numel, weights))  # the reload's own total includes buffers
        is_incomplete = info.can_load() and info.load_numel < needed
        has_padding = isinstance(layer, VocabParallelEmbedding) and info.load_numel > 0
        if is_incomplete and not has_padding and not is_deferred_attention_layer(layer) and layer not in tied:
            missing.append(f"{name} ({info.load_numel} of {needed} numbers came)")
    return missing


def copied(param: Tensor, loaded_weight: Tensor) -> None:
    """A weight loader, with vLLM's names of arguments, which the reload requires."""
    param.data.copy_(loaded_weight)


def keep_buffers(model: nn.Module) -> None:
    """Have the reload keep buffers that no checkpoint has, such as an activation's constants: it would leave them
    uninitialised."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or not info.loaded_weights or is_deferred_attention_layer(layer):
            continue
        loaded = {name for name, _ in info.loaded_weights}
        for name, buffer in layer.named_buffers(recurse=False):
            old_buffer = info.kernel_tensors[1].get(name)
            if name not in loaded and buffer.is_meta and old_buffer is not None and old_buffer.shape == buffer.shape:
                buffer.weight_loader = copied
                info.loaded_weights.append((name, inspect.signature(copied).bind(buffer, old_buffer.clone())))


def pack_experts_again(model: nn.Module) -> None:
    """Repack experts' weights after each push. Some kernels, such as those for CPUs, need them in another order, which
    vLLM establishes when it loads a model but not when it reloads it: pushed weights would be read as if packed."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is not None and "process_weights_after_loading" not in vars(method):
            process = method.process_weights_after_loading
            method.process_weights_after_loading = functools.partial(pack_once, process, experts)


def pack_once(process, experts, layer: nn.Module) -> None:
    """`process(layer)`, and then the experts' processing if `process` left it out."""
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
    """Mixed into vLLM's worker; POST /collective_rpc calls its methods by name."""

    def describe(self) -> dict:
        """What a trainer needs to know about this server. GET /server_info lacks the model's sizes, and takes 10 s."""
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
