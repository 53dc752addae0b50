"""What nobody edits to try an idea: process groups, how weights lie, what a run refuses, how it ends.

Four sections: 1 ranks, 2 weights, 3 checks of a run, 4 failures. Checkpoints are in
runlog/checkpoints.py.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import math
import os
import re
import resource
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter, revert_weight_conversion

from config import ConfigError, TrainConfig
from safety import calls
from safety.storable import text_of, visible
from vllm_client import ServerError

# ---- 1 ranks --------------------------------------------------------------------------------------------------------


def init_distributed(timeout: float) -> tuple[int, int, torch.device]:
    """Join the process group that torchrun describes, or make one of size 1. Returns (rank, world size, device).

    timeout: seconds that ranks wait for each other.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        let_segments_grow(device)
        calls.NEW_THREADS.append(functools.partial(torch.cuda.set_device, device))  # for rewards that call .cuda()
    if not dist.is_initialized():
        store = dist.HashStore() if "RANK" not in os.environ else None
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout),
        )
    return rank, world, device


def slow_in_bfloat16(device: torch.device) -> bool:
    """Whether torch has no kernels for products in bfloat16 here: CPUs without AVX512, where it takes a plain loop."""
    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def computable(cfg: TrainConfig, device: torch.device) -> TrainConfig:
    """With --compute_dtype float32 where a rank's products in bfloat16 take tens of times as long; that is said. All
    ranks call it."""
    if cfg.compute_dtype == "float32" or not any(gather_objects(slow_in_bfloat16(device))):
        return cfg
    if is_main():
        kept = cfg.strategy == "ddp" and cfg.dtype == "bfloat16"  # the other strategies cast weights, too
        weights = " Weights in bfloat16 are slow all the same: --dtype float32." if kept else ""
        print(f"This CPU has no instructions for bfloat16: the run computes in float32.{weights}", flush=True)
    return dataclasses.replace(cfg, compute_dtype="float32")


def let_segments_grow(device: torch.device) -> None:
    """Passes differ in length, and what one has left free often does not fit the next: a segment that can grow takes
    both. Not where the user has set up torch's allocator, or where the first allocation fails so (WSL: pytorch#192330).

    Of this process alone, not in its environment: what it starts may share GPU memory in ways that cannot have it.
    """
    if any(os.environ.get(f"PYTORCH_{kind}ALLOC_CONF") for kind in ("", "CUDA_", "HIP_")):
        return
    try:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.empty(1, device=device)
    except RuntimeError:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def device_mesh(device: torch.device, cfg: TrainConfig) -> DeviceMesh:
    """Copies x ranks that share each, or all ranks. To its groups torch would give limits of its own."""
    world = world_size()
    size = cfg.shard_size or world
    shape, names = ((size,), ("shard",)) if size == world else ((world // size, size), ("replicate", "shard"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        group.set_timeout(datetime.timedelta(seconds=cfg.dist_timeout))
    return mesh


def free_memory(device: torch.device) -> int | None:
    """Bytes free on the GPU of the rank that has least; None without GPUs. Collective."""
    return -all_max(-torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@functools.cache
def gloo_group() -> dist.ProcessGroup:
    """All ranks, also on GPUs: NCCL knows no monitored barrier. Collective."""
    return dist.new_group(backend="gloo")


def wait_for_ranks(seconds: float) -> None:
    """Return when all ranks have come here; RuntimeError naming those that have not within `seconds`. Collective."""
    if world_size() > 1:
        dist.monitored_barrier(gloo_group(), datetime.timedelta(seconds=seconds), wait_all_ranks=True)


def is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


_COUNTED = True


@contextlib.contextmanager
def counted(counts: bool) -> Iterator[None]:
    """Whether this rank's values count in what is taken over ranks under this block. One that has no part in what is
    computed there makes the same collective calls, or the others would wait for it."""
    global _COUNTED
    before, _COUNTED = _COUNTED, counts
    try:
        yield
    finally:
        _COUNTED = before


_PART = threading.local()  # rewards and rollouts may compute on other threads meanwhile (train_async.py)


@contextlib.contextmanager
def in_part() -> Iterator[None]:
    """Below this block a loss sees a part of the update's rows: statistics of groups and of the batch are refused."""
    _PART.inside = True
    try:
        yield
    finally:
        _PART.inside = False


def must_be_whole(what: str) -> None:
    """RuntimeError in a loss, for what would depend there on how the update is cut into micro-batches."""
    if getattr(_PART, "inside", False):
        raise RuntimeError(
            f"{what} was asked for inside a loss, which sees one micro-batch: it would change with "
            "--tokens_per_microbatch. Compute it once a step: NAME.prepare = function, (batch, cfg) -> {name: tensor "
            "[B] or [B, T], or a number}, below the loss; the loss then finds it in batch.extras[name] (docs/ideas.md)."
        )


def all_sum(values: Tensor) -> Tensor:
    """Sum over ranks (float64 in, float64 out); without a process group the values themselves."""
    must_be_whole("a statistic of the batch")
    values = values.detach().double()
    if not _COUNTED:
        values = torch.zeros_like(values)
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def all_max(value: int | float) -> int | float:
    """Largest value over all ranks; within `counted`, of those that count."""
    if world_size() == 1:
        return value
    box = torch.tensor(value if _COUNTED else -math.inf, dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return type(value)(box)


def gather_objects(value) -> list:
    """[value of rank 0, value of rank 1, ...] on every rank; within `counted`, of those that count."""
    out = [None] * world_size()
    if world_size() == 1:
        return [value]
    dist.all_gather_object(out, (_COUNTED, value))
    return [of_rank for counts, of_rank in out if counts]


def gather_lists(values: list) -> list:
    """All ranks' values behind one another, on rank 0; an empty list on the others. Collective."""
    if world_size() == 1:
        return values
    out = [None] * world_size() if is_main() else None
    dist.gather_object(values, out)
    return sum(out, []) if out else []


def balanced(groups: list[list]) -> tuple[list[list], dict]:
    """This rank's groups of trajectories after an exchange that evens out tokens over ranks, which would wait for the
    one that has most; and that one's tokens over the mean, before and after. Collective.

    Whole groups move, one after another, each from the fullest rank to the emptiest, while that narrows the gap between
    them: what is even stays where it is. A gradient does not depend on where a group is computed.
    """
    if world_size() == 1:
        return groups, {}
    sizes = gather_objects([sum(len(t.prompt_ids) + len(t.token_ids) for t in group) for group in groups])
    loads, rank = [sum(own) for own in sizes], dist.get_rank()
    mean, before = sum(loads) / len(loads) or 1, max(loads)
    held = [dict(enumerate(own)) for own in sizes]  # by rank: {place: tokens} of the groups that have not moved
    leaving: dict[int, int] = {}  # of this rank's groups: {place: the rank that gets it}
    while True:
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[full] - loads[empty]
        narrowing = [(abs(2 * tokens - gap), place) for place, tokens in held[full].items() if 0 < tokens < gap]
        if not narrowing:
            break
        place = min(narrowing)[1]
        tokens = held[full].pop(place)
        loads[full], loads[empty] = loads[full] - tokens, loads[empty] + tokens
        if full == rank:
            leaving[place] = empty
    sent = gather_objects([(to, groups[place]) for place, to in leaving.items()])
    arrived = [group for others in sent for to, group in others if to == rank]
    kept = [group for place, group in enumerate(groups) if place not in leaving]
    return kept + arrived, {"ranks/tokens_before": before / mean, "ranks/tokens_after": max(loads) / mean}


def raise_together(error: BaseException | None, what: str) -> None:
    """Collective: if any rank brings an error, every rank raises it, so that none waits for a rank that left."""
    texts = gather_objects(None if error is None else f"{type(error).__name__}: {text_of(error)}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {text}")


@contextlib.contextmanager
def on_rank_0(what: str, everywhere: bool = False) -> Iterator[None]:
    """The models made inside have values on rank 0, elsewhere shapes alone (torch's meta device); see `handed_out`.

    Collective. An error is raised on every rank. everywhere: they have values on all.
    """
    error = None
    try:
        with contextlib.nullcontext() if is_main() or everywhere else torch.device("meta"):
            yield
    except Exception as caught:  # carried to raise_together, which raises it on every rank
        error = caught
    raise_together(error, what)


def handed_out(model: nn.Module, device: torch.device) -> Callable[..., None]:
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


def global_moments(values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and unbiased standard deviation of `values` where `mask` is set, over all ranks.

    A statistic of one rank's share would silently change the algorithm with the number of ranks.
    """
    weight = torch.ones_like(values) if mask is None else mask.to(values.dtype)
    kept = torch.where(weight > 0, values, torch.zeros_like(values)).double()
    count, total, squares = all_sum(torch.stack([weight.double().sum(), kept.sum(), (kept**2).sum()]))
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean**2).clamp(min=0) / (count - 1).clamp(min=1)
    return count, mean.to(values.dtype), variance.sqrt().to(values.dtype)


def global_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    return global_moments(values, mask)[1]


def over_ranks(numbers: dict[str, tuple[float, float]]) -> dict[str, float]:
    """This rank's {name: (sum, count)} -> {name: mean over all ranks}, without names of which nothing was counted. Of a
    name that ends in _sum it is the sum, of one in _max the largest. Ranks may have different names. Collective.

    The one rule for numbers that are logged: a mean of means would change with how rows are dealt to ranks.
    """
    everyone, out = gather_objects(numbers), {}
    for name in sorted(set().union(*everyone)):
        sums, counts = zip(*(of_rank[name] for of_rank in everyone if name in of_rank), strict=True)
        if name.endswith("_max"):
            out |= {name: max(sums)} if max(sums) > -math.inf else {}
        elif name.endswith("_sum"):
            out[name] = math.fsum(sums)
        elif sum(counts):
            out[name] = math.fsum(sums) / sum(counts)
    return out


def running_moments(values: Tensor, moments: list[float]) -> tuple[float, float]:
    """Mean and standard deviation of all values so far, on all ranks; adds to moments = [count, sum, squares' sum]."""
    values = values.double()
    added = all_sum(torch.stack([torch.ones_like(values).sum(), values.sum(), (values**2).sum()])).tolist()
    moments[:] = count, total, squares = [a + b for a, b in zip(moments, added, strict=True)]
    return total / count, (max(squares - total**2 / count, 0) / max(count - 1, 1)) ** 0.5


# ---- 2 weights ------------------------------------------------------------------------------------------------------


def window_of(config) -> int | None:
    """How many tokens a model's positions are made for; None where it has no bound."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def check_window(config, cfg: TrainConfig) -> None:
    """Says if the model itself, which is to sample in this process, has no room for the longest prompt and completion:
    a completion of one turn ends there. ConfigError with several turns, as the next one would have no room at all."""
    window, needed = window_of(config), cfg.max_prompt_length + cfg.max_completion_length
    if not window or needed <= window:
        return
    said = (
        f"--model_id={cfg.model_id} has a window of {window} tokens (max_position_embeddings); prompts and completions "
        f"need up to {needed}: lower --max_prompt_length={cfg.max_prompt_length} or "
        f"--max_completion_length={cfg.max_completion_length}"
    )
    if any(own.rollout != "single_turn" for own in cfg.by_domain()):
        raise ConfigError(f"{said}.")
    calls.say_once(f"{said}, or some completions end at the window.")


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


def joined_in_a_checkpoint(model: nn.Module) -> bool:
    """Whether published checkpoints hold some tensors of a layer joined that transformers' model has apart. It is known
    from the model's class alone, so on every rank."""
    known = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    conversions = [] if known is None else get_model_conversion_mapping(known, add_legacy=False)
    into = [one.target_patterns for one in conversions if isinstance(one, WeightConverter)]
    return any(len(patterns) > 1 or "*" in patterns[0] for patterns in into)


HOSTED = WeakTensorKeyDictionary()  # of a tensor that takes turns, its memory on the CPU


@torch.no_grad()
def move(run, device: torch.device) -> None:
    """All that `run` trains with to `device`: parameters, buffers, optimizer state. They stay the objects that the
    optimizer knows. What this process holds free on the GPU is given back.

    Shards of FSDP2 are in CPU memory (--offload) and stay there; what is gathered of them goes: after a forward pass
    alone a root module is still whole.
    """
    frozen = {"reference": (run.reference, None), "teacher": ((run.teacher or (None,))[0], None)}
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


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, from pinned memory: with any other copy the host waits for the GPU."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def on_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory that is the tensor's from now on, as copies to and from fresh memory take longer."""
    if tensor not in HOSTED:
        HOSTED[tensor] = torch.empty_like(tensor, device="cpu", pin_memory=torch.cuda.is_available())
    return HOSTED[tensor].copy_(tensor)


# ---- 3 checks of a run ----------------------------------------------------------------------------------------------


def check_fresh(trajectories: list, versions: range, generator: str = "vllm") -> None:
    """RuntimeError unless weights of these versions sampled every token: from the first one on and to the last."""
    spans = [(t.policy_version, t.policy_version_last or t.policy_version) for t in trajectories]
    stale = [span for span in spans if not {*span} <= {*versions}]
    if stale:
        why = "Was the server started anew, or does another trainer push to it? Give each run its own."
        why = why if generator == "vllm" else "Is push_weights called with another version?"
        raise RuntimeError(
            f"{len(stale)} of {len(spans)} completions come from weights {stale[0][0]} to {stale[0][1]}, not "
            f"{versions[0]} to {versions[-1]}. {why} A rollout of your own copies policy_version and "
            "policy_version_last from what `generate` returned."
        )


@torch.no_grad()
def not_finite(module: torch.nn.Module) -> list[str]:
    """Names of this rank's parameters, or shards of them, that hold nan, infinity or numbers beyond 1e19.

    By their norms: a tenth of the time of isfinite(), which makes a copy (0.05 s for 135 M parameters on two cores).
    """
    own = {name: p for name, p in module.named_parameters() if p.is_floating_point()}  # not what is in 4 bits
    local = [p.to_local() if hasattr(p, "to_local") else p for p in own.values()]
    kinds = [torch.float32 if p.dtype.itemsize < 4 else None for p in local]
    norms = [torch.linalg.vector_norm(p, dtype=kind).float() for p, kind in zip(local, kinds, strict=True)]
    return [name for name, good in zip(own, torch.stack(norms).isfinite().tolist(), strict=True) if not good]


def check_finite(model: torch.nn.Module, model_id: str) -> None:
    """ConfigError for weights that came as nan or infinity: what is sampled from them would be blamed instead."""
    if bad := not_finite(model):
        raise ConfigError(
            f"--model_id={model_id}: {len(bad)} of its weights hold nan, infinity or numbers beyond 1e19, first "
            f"{bad[0]}. Its training failed, or the file is damaged: take an earlier checkpoint, or download it again."
        )


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """ConfigError for a group without parameters, and for what is trained and would never change or, unknown to DDP or
    FSDP, differ by rank. At start and in each update: what is trained may change."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    if empty := [group.get("name", n) for n, group in enumerate(optimizer.param_groups) if not group["params"]]:
        raise ConfigError(
            f"make_optimizer: the group {empty[0]!r} has no parameters. Names differ with what wraps the model: "
            "compare clean_name(name), which does not; or leave the group out."
        )
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    if lost := [name for name, p in module.named_parameters() if p.requires_grad and p not in held]:
        raise ConfigError(
            f"make_optimizer: {len(lost)} of {len(trained)} trained parameters are in no group, first {lost[0]!r}: "
            "they would never change. Put them into one, also what is trained later on; or freeze them: "
            "requires_grad_(False) in load_hf_model."
        )
    wrapped = isinstance(module, DistributedDataParallel | FSDP | FSDPModule)
    at_start = module.__dict__.setdefault("trained_at_start", {*trained})
    if late := [name for name in trained if wrapped and name not in at_start]:
        raise ConfigError(
            f"{len(late)} parameters are trained that were frozen at start, first {late[0]!r}: DDP and FSDP add up "
            "over ranks gradients of what was trained then. Have them require gradients in to_train, and leave it so."
        )


def check_agreement(difference: float, cfg: TrainConfig, share: float = 1, images: bool = False) -> None:
    """share: of the limit, which allows for bfloat16. images: whether they stand in the prompt."""
    if not difference <= (limit := share * cfg.logprob_diff_limit):
        where = " of a prompt with images" if images else ""
        raise RuntimeError(
            f"Trainer and generator disagree on the sampled tokens{where}: mean |log-prob difference| "
            f"{difference:.3f}, limit {limit:g}. Usual causes: another model on the server, a quantised server, top-k "
            "/ top-p sampling, a modified model class. --logprob_diff_limit raises the limit."
            + " With --load_in 4bit: the server has to have the weights that the 4 bits stand for, which "
            "scripts/unpacked.py writes; else raise the limit and watch sampling/ess." * bool(cfg.load_in)
        )


# ---- 4 failures -----------------------------------------------------------------------------------------------------


def print_failure(error: BaseException, cfg: TrainConfig) -> int:
    """Traceback, cause and what to do, on stderr. A setting or a server that cannot work needs no traceback. Returns
    the exit status: 2 for a setting that another try would not change."""
    if not isinstance(error, ConfigError | ServerError):  # frames only: the message follows
        # of a user's function its own frames
        others = type(error).__name__ in ("RewardError", "TrajectoryError")
        shown = error.__cause__ if others and error.__cause__ else error
        said = len(traceback.format_exception_only(shown))
        print(visible("".join(traceback.format_exception(shown)[:-said])), file=sys.stderr)
    where = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    causes = [each for each in dict.fromkeys((error, error.__cause__)) if each is not None]
    notes = [note for each in causes for note in getattr(each, "__notes__", ())]
    text = visible("\n  ".join([text_of(error), *notes]))  # a completion may stand in it
    print(f"\n{where}{type(error).__name__}: {text}", file=sys.stderr)
    if isinstance(error, dist.DistError) or re.search("gloo|NCCL", text):
        print(
            f"{where}The ranks lost each other: one ended, or was silent for --dist_timeout={cfg.dist_timeout:g} s. "
            f"The first that failed says why. {RANK_KILLED}",
            file=sys.stderr,
        )
    return error.status if isinstance(error, ConfigError) else 1


RANK_KILLED = (
    "One that was killed (signal 9) without a word usually ran out of memory: lower --tokens_per_microbatch. Continue "
    "with --resume --run_name NAME from the last checkpoint, if there is one (--save_steps)."
)


def run_and_exit(
    work: Callable[[], object], cfg: TrainConfig, at_end: Callable[[BaseException | None], None] = lambda error: None
):
    """Do the work, and end the process for good: no rank, thread or process group keeps a failed run alive.

    What ended the work is explained on stderr, and given to `at_end`, which closes what is open. The exit status is 0,
    130 after Ctrl-C, 2 for a setting that another try would not change, else 1.
    """
    prepare_process()
    status, ended_by = 1, None
    try:
        work()
        status = 0
    except KeyboardInterrupt as error:
        print(
            "\ninterrupted; what was not saved (--save_steps) is lost, and what was being saved, too.", file=sys.stderr
        )
        ended_by, status = error, 130
    except BaseException as error:  # some errors of torch do not derive from Exception
        ended_by, status = error, print_failure(error, cfg)
    finally:
        end_process(status, lambda: at_end(ended_by))


def prepare_process() -> None:
    """Of a training process, before anything else."""
    sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: what a terminal cannot show must not end the run
    faulthandler.enable(all_threads=False)  # a crash in C says where it was
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # often 1,024; each request under way is an open file
    with contextlib.suppress(ValueError, OSError):  # macOS allows fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


def end_process(status: int, clean_up: Callable[[], None] = lambda: None) -> NoReturn:
    """Clean up as far as that goes, and end with `status` at once: threads would hold up an exit.

    Process groups are left to the operating system. To take one down is to wait for gloo's threads while holding the
    GIL, which such a thread may want too: it lets go of Python objects of the backward pass whose all-reduce it ran.
    """
    try:
        for each in (clean_up, *calls.AT_END):
            each()
    except Exception:  # a report that cannot be written must not hide why the run failed, nor keep it alive
        traceback.print_exc()
        status = status or 1
    finally:
        calls.leave(status)
