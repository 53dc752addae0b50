"""What nobody edits to try an idea: process groups, gathering sharded weights, how a run that failed ends.

Three sections: 1 ranks, 2 weights, 3 failures. Heavy imports (FSDP, PEFT) happen where they are used, so that a mistake
on the command line is answered before they load. Checkpoints have a file of their own, checkpoints.py.
"""

import contextlib
import datetime
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

import limits
from config import ConfigError, TrainConfig
from storable import text_of

# ---- 1 ranks --------------------------------------------------------------------------------------------------------


def init_distributed(timeout: float) -> tuple[int, int, torch.device]:
    """Join the process group that torchrun describes, or make one of size 1. Returns (rank, world size, device).

    timeout: seconds a collective waits for the other ranks before it raises.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
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


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def all_sum(values: Tensor) -> Tensor:
    """Sum over ranks (float64 in, float64 out); without a process group the values themselves."""
    values = values.detach().double()
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def all_max(value: int | float) -> int | float:
    """Largest value over all ranks."""
    if world_size() == 1:
        return value
    box = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return type(value)(box)


def gather_objects(value) -> list:
    """[value of rank 0, value of rank 1, ...] on every rank."""
    out = [None] * world_size()
    if world_size() == 1:
        return [value]
    dist.all_gather_object(out, value)
    return out


def raise_together(error: BaseException | None, what: str) -> None:
    """Collective: if any rank brings an error, every rank raises it, so that none waits for a rank that left."""
    texts = gather_objects(None if error is None else f"{type(error).__name__}: {text_of(error)}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"{what} failed on rank {rank}: {text}")


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


def lr_at(update: int, cfg: TrainConfig) -> float:
    """Learning rate of an optimizer update: linear warm-up, then --lr_schedule to 0 at the end.

    A function of the update's number, so that resuming needs no scheduler state.
    """
    total = cfg.max_steps * cfg.num_iterations * cfg.num_minibatches
    warmup = math.ceil(cfg.warmup_ratio * total)
    if update < warmup:
        return cfg.learning_rate * (update + 1) / warmup
    done = (update - warmup) / max(total - warmup, 1)
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
    return cfg.learning_rate * decay[cfg.lr_schedule]


def adapt(cfg: TrainConfig, metrics: dict) -> TrainConfig:
    """beta and entropy_coef for the next step, from this one's KL and entropy."""
    if cfg.kl_target is not None:  # Ziegler et al., 1909.08593 sec. 2.2
        error = min(max(metrics["kl"] / cfg.kl_target - 1, -0.2), 0.2)
        cfg = replace(cfg, beta=cfg.beta * (1 + error * cfg.sequences_per_step / cfg.kl_horizon))
    if cfg.entropy_target is not None:
        change = cfg.entropy_coef_step if metrics["entropy"] < cfg.entropy_target else -cfg.entropy_coef_step
        cfg = replace(cfg, entropy_coef=max(cfg.entropy_coef + change, 0.0))
    return cfg


def running_moments(values: Tensor, moments: list[float]) -> tuple[float, float]:
    """Mean and standard deviation of all values so far, on all ranks; adds to moments = [count, sum, squares' sum]."""
    values = values.double()
    added = all_sum(torch.stack([torch.ones_like(values).sum(), values.sum(), (values**2).sum()])).tolist()
    moments[:] = count, total, squares = [a + b for a, b in zip(moments, added, strict=True)]
    return total / count, (max(squares - total**2 / count, 0) / max(count - 1, 1)) ** 0.5


# ---- 2 weights ------------------------------------------------------------------------------------------------------

_WRAPPERS = re.compile(r"(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.|\.base_layer")


def clean_name(name: str) -> str:
    """The name a parameter has in its checkpoint, without what DDP, FSDP, PEFT and `Policy` put around it."""
    name = _WRAPPERS.sub("", name)
    name = name.removeprefix("module.").removeprefix("model.")  # DDP, then Policy.model
    return name.removeprefix("base_model.model.")  # PeftModel -> LoraModel -> the model itself


def _is_lora(module: nn.Module) -> bool:
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and len(module.lora_A) > 0


def _full(tensor: Tensor) -> Tensor:
    """The whole tensor of an FSDP2 shard (a collective), any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, _dtensor()) else tensor


def _dtensor():
    from torch.distributed.tensor import DTensor

    return DTensor


def _folded(layer: nn.Module) -> Tensor:
    """W + scale * B A of one LoRA layer, in a new tensor: the live weights are never merged and unmerged."""
    weight = _full(layer.base_layer.weight.detach()).float()
    for name in layer.active_adapters:
        delta = _full(layer.lora_B[name].weight.detach()).float() @ _full(layer.lora_A[name].weight.detach()).float()
        weight = weight + layer.scaling[name] * (delta.T if layer.fan_in_fan_out else delta)
    return weight


def _own_weights(name: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Full (checkpoint name, tensor) pairs of the parameters that belong to this module itself."""
    if _is_lora(module):
        yield clean_name(f"{name}.weight"), _folded(module)
        if module.base_layer.bias is not None:
            yield clean_name(f"{name}.bias"), _full(module.base_layer.bias.detach())
        return
    for key, parameter in module.named_parameters(recurse=False):
        yield clean_name(f"{name}.{key}"), _full(parameter.detach())


def _walk(name: str, module: nn.Module, stop: type | tuple) -> Iterator[tuple[str, nn.Module]]:
    """Modules below `module`, itself included, children first; neither past `stop` types nor into a LoRA layer."""
    if not _is_lora(module):
        for key, child in module.named_children():
            if not isinstance(child, stop):
                yield from _walk(f"{name}.{key}" if name else key, child, stop)
    yield name, module


def weight_buckets(model: nn.Module, max_bytes: int, dtype: torch.dtype, keep: bool = True):
    """Yield lists of (checkpoint name, full tensor in `dtype`) of about `max_bytes`: all ranks call it in step.

    A bucket is gathered by all ranks before it is yielded, so that sending it never holds up a collective. FSDP1
    gathers one wrapped module at a time, FSDP2 one parameter at a time; the extra memory is a bucket and one module.
    LoRA is folded in. Read the tensors before the next step: some are the live weights. Vectors keep their dtype, as
    some servers keep norms and biases wider. With keep=False a rank takes part in the gathering, its lists are empty.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    wrapped = [(name, m) for name, m in model.named_modules() if isinstance(m, FSDP)]
    units = wrapped or list(_walk("", model, ()))  # the root comes first: FSDP1 learns from it which unit is the root
    names = {clean_name(name) for name, _ in model.named_parameters()}  # tied weights appear once, as in a checkpoint
    bucket, size = [], 0
    for name, unit in units:
        gather, members = contextlib.nullcontext(), [(name, unit)]
        if wrapped:
            gather = FSDP.summon_full_params(unit, recurse=False, writeback=False)
            members = list(_walk(name, unit.module, FSDP))
        with gather:
            for member_name, member in members:
                for key, tensor in _own_weights(member_name, member):
                    size += tensor.numel() * dtype.itemsize * (key in names)
                    if keep and key in names:
                        bucket.append((key, tensor.to(dtype if tensor.ndim > 1 else tensor.dtype, copy=bool(wrapped))))
        if size >= max_bytes:
            yield bucket
            bucket, size = [], 0
    if size:
        yield bucket


def push_weights(policy: nn.Module, generator, version: int, bucket_mb: int) -> None:
    """Send the policy's weights to the generator: begin -> one call per bucket -> finish. All ranks call it.

    `generator.receives_weights` tells whether this rank talks to the generator: every rank for the in-process one,
    rank 0 for servers. After each bucket the ranks agree that it arrived; an error on one is raised on all.
    """
    error, active = None, generator.receives_weights

    def attempt(call, *args):
        try:
            if active:
                call(*args)
        except Exception as caught:  # carried to raise_together, which raises it on every rank
            generator.abort_push()
            return caught

    raise_together(attempt(generator.begin_push), "Starting the weight push")
    for bucket in weight_buckets(policy, bucket_mb * 2**20, generator.weight_dtype, keep=active):
        error = attempt(lambda bucket: generator.send_bucket(generator.convert(bucket)), bucket)
        raise_together(error, "Sending weights")
    raise_together(attempt(generator.finish_push, version), "Finishing the weight push")


@torch.no_grad()
def move_towards(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """ref <- alpha * policy + (1 - alpha) * ref, shard by shard: both are wrapped alike."""
    for old, new in zip(reference.parameters(), policy.parameters(), strict=True):
        old.lerp_(new.to(old.dtype), alpha)


def as_in_a_checkpoint(hf_model: nn.Module, named: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Weights under the names, and in the pieces, that `save_pretrained` writes: transformers renames and fuses some
    when it loads a model (vision towers, experts), and a server's loader knows them as published."""
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(hf_model, dict(named)).items())


# ---- 3 failures -----------------------------------------------------------------------------------------------------


def print_failure(error: BaseException, cfg: TrainConfig) -> None:
    """Traceback, cause and what to do, on stderr. A setting that cannot work needs no traceback."""
    if not isinstance(error, ConfigError):  # frames only, the message follows; of a user's function its own alone
        others = type(error).__name__ in ("RewardError", "TrajectoryError")
        shown = error.__cause__ if others and error.__cause__ else error
        print("".join(traceback.format_exception(shown)[:-1]), file=sys.stderr)
    where = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    text = text_of(error)
    print(f"\n{where}{type(error).__name__}: {text}", file=sys.stderr)
    if "EADDRINUSE" in text:
        hint = "Another run holds the port: torchrun --standalone or --master_port takes another."
        print(f"{where}{hint}", file=sys.stderr)
    elif isinstance(error, dist.DistError) or re.search("gloo|NCCL", text):
        print(
            f"{where}The ranks lost each other: one ended, or was silent for --dist_timeout={cfg.dist_timeout:g} s. "
            f"The first that failed says why. {RANK_KILLED}",
            file=sys.stderr,
        )


RANK_KILLED = (
    "One that was killed (signal 9) without a word usually ran out of memory: lower --tokens_per_microbatch. Continue "
    "with --resume --run_name NAME from the last checkpoint."
)


def explain_interrupt() -> int:
    """The exit status of a run that Ctrl-C ended."""
    print("\ninterrupted; what was not saved (--save_steps) is lost.", file=sys.stderr)
    return 130


def watch_process() -> None:
    """Limits, Ctrl-C and SIGTERM hold for this process from now on, whatever it does. torchrun sends a SIGTERM to all
    ranks when one has ended, and the system does when torchrun was killed."""
    sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: what a terminal cannot show must not end the run
    why = f"torchrun does so when another rank has ended, which its report names, or it was killed. {RANK_KILLED}"
    limits.watch_process(why if "RANK" in os.environ else "")


def end_process(status: int, clean_up: Callable[[], None] = lambda: None) -> NoReturn:
    """Clean up as far as that goes, and end with `status` at once: threads would hold up an exit.

    Process groups are left to the operating system. To take one down is to wait for gloo's threads while holding the
    GIL, which such a thread may want too: it lets go of Python objects of the backward pass whose all-reduce it ran.
    """
    try:
        for each in (clean_up, *limits.AT_END):
            each()
    except Exception:  # a report that cannot be written must not hide why the run failed, nor keep it alive
        traceback.print_exc()
        status = status or 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        limits.leave(status)
