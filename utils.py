"""What no idea needs to change: process groups and statistics over ranks, two checks of a run, and how a run ends."""

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
from collections.abc import Callable, Iterator
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from config import ConfigError, TrainConfig
from safety.calls import NEW_THREADS
from safety.results import AT_END

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
        NEW_THREADS.append(functools.partial(torch.cuda.set_device, device))  # for rewards that call .cuda()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore() if "RANK" not in os.environ else None
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    return rank, world, device


def slow_in_bfloat16(device: torch.device) -> bool:
    """Whether torch has no fast bfloat16 matrix product here: CPUs without AVX512, where it runs a plain loop."""
    return device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def computable(cfg: TrainConfig, device: torch.device) -> TrainConfig:
    """The config, with --compute_dtype float32 if bfloat16 products are tens of times slower on any rank; prints that.
    Collective."""
    if cfg.compute_dtype == "float32" or not any(gather_objects(slow_in_bfloat16(device))):
        return cfg
    if is_main():
        keeps_bfloat16 = cfg.strategy == "ddp" and cfg.dtype == "bfloat16"  # the other strategies also cast the weights
        weights = " Weights in bfloat16 are still slow: use --dtype float32." if keeps_bfloat16 else ""
        print(f"This CPU has no instructions for bfloat16: the run computes in float32.{weights}", flush=True)
    return dataclasses.replace(cfg, compute_dtype="float32")


def let_segments_grow(device: torch.device) -> None:
    """Lets torch's memory segments grow: passes differ in length, and memory that one has freed often does not fit the
    next. Left alone if the user has set up torch's allocator, or if the first allocation then fails (WSL:
    pytorch#192330).

    Set for this process, not in its environment: its child processes may share GPU memory in ways that exclude it.
    """
    if any(os.environ.get(f"PYTORCH_{kind}ALLOC_CONF") for kind in ("", "CUDA_", "HIP_")):
        return
    try:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.empty(1, device=device)
    except RuntimeError:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def free_memory(device: torch.device) -> int | None:
    """Free bytes on the GPU with the least, over all ranks; None without GPUs. Collective."""
    return -all_max(-torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@functools.cache
def gloo_group() -> dist.ProcessGroup:
    """All ranks, also on GPUs, since NCCL has no monitored barrier. Collective."""
    return dist.new_group(backend="gloo")


def wait_for_ranks(seconds: float) -> None:
    """Wait until all ranks are here; RuntimeError naming those that are not within `seconds`. Collective."""
    if world_size() > 1:
        dist.monitored_barrier(gloo_group(), datetime.timedelta(seconds=seconds), wait_all_ranks=True)


def is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


_COUNTED = True


@contextlib.contextmanager
def counted(counts: bool) -> Iterator[None]:
    """Sets whether this rank's values count in statistics over ranks within this block. A rank that has no part in them
    still makes the collective calls, or the others would wait for it."""
    global _COUNTED
    previous, _COUNTED = _COUNTED, counts
    try:
        yield
    finally:
        _COUNTED = previous


_PART = threading.local()  # per thread: rewards and rollouts may compute on others (train_async.py)


@contextlib.contextmanager
def in_part() -> Iterator[None]:
    """Marks a block in which a loss sees only a part of the update's rows: statistics of groups and of the batch raise
    there."""
    _PART.inside = True
    try:
        yield
    finally:
        _PART.inside = False


def must_be_whole(statistic: str) -> None:
    """RuntimeError within `in_part`, where `statistic` would depend on how the update is cut into micro-batches."""
    if getattr(_PART, "inside", False):
        raise RuntimeError(
            f"{statistic} was asked for inside a loss, which sees one micro-batch: it would change with "
            "--tokens_per_microbatch. Compute it once per step: NAME.prepare = function, (batch, cfg) -> {name: tensor "
            "[B] or [B, T], or a number}, below the loss; the loss then finds it in batch.extras[name] (docs/ideas.md)."
        )


def all_sum(values: Tensor) -> Tensor:
    """Sum over ranks, in float64; without a process group the values themselves."""
    must_be_whole("a statistic of the batch")
    values = values.detach().double()
    if not _COUNTED:
        values = torch.zeros_like(values)
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def all_max(value: int | float) -> int | float:
    """Largest value over all ranks; within `counted`, over those that count."""
    if world_size() == 1:
        return value
    box = torch.tensor(value if _COUNTED else -math.inf, dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return type(value)(box)


def gather_objects(value) -> list:
    """[value of rank 0, value of rank 1, ...] on every rank; within `counted`, only of those that count."""
    out = [None] * world_size()
    if world_size() == 1:
        return [value]
    dist.all_gather_object(out, (_COUNTED, value))
    return [of_rank for counts, of_rank in out if counts]


def gather_lists(values: list) -> list:
    """All ranks' lists joined, on rank 0; an empty list on the others. Collective."""
    if world_size() == 1:
        return values
    out = [None] * world_size() if is_main() else None
    dist.gather_object(values, out)
    return sum(out, []) if out else []


def raise_together(error: BaseException | None, action: str) -> None:
    """If any rank passes an error, every rank raises it, so that none waits for a rank that left. Collective."""
    texts = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise RuntimeError(f"{action} failed on rank {rank}: {text}")


def global_moments(values: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and unbiased standard deviation of `values` where `mask` is set, over all ranks.

    If they were taken on each rank alone, the number of ranks would silently change the algorithm.
    """
    weight = torch.ones_like(values) if mask is None else mask.to(values.dtype)
    masked = torch.where(weight > 0, values, torch.zeros_like(values)).double()
    count, total, squares = all_sum(torch.stack([weight.double().sum(), masked.sum(), (masked**2).sum()]))
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean**2).clamp(min=0) / (count - 1).clamp(min=1)
    return count, mean.to(values.dtype), variance.sqrt().to(values.dtype)


def global_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    return global_moments(values, mask)[1]


def over_ranks(numbers: dict[str, tuple[float, float]]) -> dict[str, float]:
    """This rank's {name: (sum, count)} -> {name: mean over all ranks}; names with a count of 0 are left out. Names that
    end in _sum give the sum, those in _max the largest value. Ranks may have different names. Collective.

    All logged numbers follow this rule, since a mean of means would depend on how rows are dealt to ranks.
    """
    all_numbers, out = gather_objects(numbers), {}
    for name in sorted(set().union(*all_numbers)):
        sums, counts = zip(*(of_rank[name] for of_rank in all_numbers if name in of_rank), strict=True)
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
    step_sums = all_sum(torch.stack([torch.ones_like(values).sum(), values.sum(), (values**2).sum()])).tolist()
    moments[:] = count, total, squares = [a + b for a, b in zip(moments, step_sums, strict=True)]
    return total / count, (max(squares - total**2 / count, 0) / max(count - 1, 1)) ** 0.5


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a CPU tensor to a device through pinned memory: any other copy makes the host wait for the GPU."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


# ---- 2 checks of a run ----------------------------------------------------------------------------------------------


def check_fresh(trajectories: list, versions: range, generator: str = "vllm") -> None:
    """RuntimeError unless weights of these versions sampled every token, from the first to the last."""
    spans = [(t.policy_version, t.policy_version_last or t.policy_version) for t in trajectories]
    stale = [span for span in spans if not {*span} <= {*versions}]
    if stale:
        why = "Was the server restarted, or does another trainer push to it? Give each run its own server."
        why = why if generator == "vllm" else "Is push_weights called with another version?"
        raise RuntimeError(
            f"{len(stale)} of {len(spans)} completions come from weights {stale[0][0]} to {stale[0][1]}, not "
            f"{versions[0]} to {versions[-1]}. {why} A rollout of your own has to copy policy_version and "
            "policy_version_last from the results of `generate`."
        )


def check_agreement(difference: float, cfg: TrainConfig, share: float = 1, images: bool = False) -> None:
    """RuntimeError if trainer and generator differ too much. share: of the limit, which allows for bfloat16. images:
    whether the prompt holds images."""
    if not difference <= (limit := share * cfg.logprob_diff_limit):
        of_images = " of a prompt with images" if images else ""
        in_4_bits = " With --load_in 4bit the server needs what scripts/unpacked.py writes." * bool(cfg.load_in)
        raise RuntimeError(
            f"Trainer and generator disagree on the sampled tokens{of_images}: mean |log-prob difference| "
            f"{difference:.3f}, limit {limit:g}. Usual causes: another model on the server, a quantised server, top-k "
            f"/ top-p sampling, a modified model class.{in_4_bits} --logprob_diff_limit raises the limit; then watch "
            "sampling/ess."
        )


# ---- 3 failures -----------------------------------------------------------------------------------------------------


def print_failure(error: BaseException, cfg: TrainConfig) -> int:
    """Prints traceback, cause and remedy on stderr; no traceback for a setting or a server that cannot work. Returns
    the exit status: 2 for a setting that another try would not change."""
    # Frames alone, since the message follows: of a user's function its own, none where only what it returned is wrong.
    of_user = type(error).__name__ in ("RewardError", "TrajectoryError")
    printed = error.__cause__ if of_user else error
    if getattr(error, "needs_traceback", True) and printed is not None:
        message_lines = len(traceback.format_exception_only(printed))
        print("".join(traceback.format_exception(printed)[:-message_lines]), file=sys.stderr)
    rank_prefix = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    causes = [cause for cause in dict.fromkeys((error, error.__cause__)) if cause is not None]
    notes = [note for cause in causes for note in getattr(cause, "__notes__", ())]
    text = "\n  ".join([str(error), *notes])
    print(f"\n{rank_prefix}{type(error).__name__}: {text}", file=sys.stderr)
    if isinstance(error, dist.DistError) or re.search("gloo|NCCL", text):
        print(
            f"{rank_prefix}The ranks lost contact: one ended, or was silent for {cfg.dist_timeout:g} s (dist_timeout). "
            "The first that failed says why. A rank killed without a message (signal 9) usually ran out of memory: "
            "take smaller micro-batches." + " Continue with --resume --run_name NAME." * bool(cfg.save_steps),
            file=sys.stderr,
        )
    return error.status if isinstance(error, ConfigError) else 1


def run_and_exit(
    work: Callable[[], object], cfg: TrainConfig, at_end: Callable[[BaseException | None], None] = lambda error: None
):
    """Do the work, then end the process for good: no rank, thread or process group keeps a failed run alive.

    The error that ended the work is explained on stderr and passed to `at_end`, which closes what is open. The exit
    status is 0, 130 after Ctrl-C, 2 for a setting that another try would not change, else 1.
    """
    prepare_process()
    status, ended_by = 1, None
    try:
        work()
        status = 0
    except KeyboardInterrupt as error:
        print("\ninterrupted; what is not in a checkpoint is lost.", file=sys.stderr)
        ended_by, status = error, 130
    except BaseException as error:  # some errors of torch do not derive from Exception
        ended_by, status = error, print_failure(error, cfg)
    finally:
        end_process(status, lambda: at_end(ended_by))


def prepare_process() -> None:
    """Sets up a training process, before anything else."""
    sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: undisplayable text must not end the run
    faulthandler.enable(all_threads=False)  # after a crash in C, prints where it was
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # often 1,024; each request in flight is an open file
    with contextlib.suppress(ValueError, OSError):  # macOS allows fewer than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))


def end_process(status: int, clean_up: Callable[[], None] = lambda: None) -> NoReturn:
    """Clean up as far as possible, and end with `status` at once: running threads would delay a normal exit.

    Process groups are left to the operating system. Destroying one means waiting for gloo's threads while holding the
    GIL. Such a thread may want the GIL, too: it releases Python objects of the backward pass whose all-reduce it ran.
    """
    try:
        for step in (clean_up, *AT_END):
            step()
    except Exception:  # a report that cannot be written must not hide why the run failed, nor keep it alive
        traceback.print_exc()
        status = status or 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # a file on a disk that is full
                stream.flush()
        os._exit(status)
