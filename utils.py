"""What nobody edits to try an idea: process groups and what is computed over them, two checks of a run, how it ends."""

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


def raise_together(error: BaseException | None, what: str) -> None:
    """Collective: if any rank brings an error, every rank raises it, so that none waits for a rank that left."""
    texts = gather_objects(None if error is None else f"{type(error).__name__}: {error}")
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


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, from pinned memory: with any other copy the host waits for the GPU."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


# ---- 2 checks of a run ----------------------------------------------------------------------------------------------


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


# ---- 3 failures -----------------------------------------------------------------------------------------------------


def print_failure(error: BaseException, cfg: TrainConfig) -> int:
    """Traceback, cause and what to do, on stderr. A setting or a server that cannot work needs no traceback. Returns
    the exit status: 2 for a setting that another try would not change."""
    if getattr(error, "needs_traceback", True):  # frames only: the message follows
        # of a user's function its own frames
        others = type(error).__name__ in ("RewardError", "TrajectoryError")
        shown = error.__cause__ if others and error.__cause__ else error
        said = len(traceback.format_exception_only(shown))
        print("".join(traceback.format_exception(shown)[:-said]), file=sys.stderr)
    where = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
    causes = [each for each in dict.fromkeys((error, error.__cause__)) if each is not None]
    notes = [note for each in causes for note in getattr(each, "__notes__", ())]
    text = "\n  ".join([str(error), *notes])
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
        for each in (clean_up, *AT_END):
            each()
    except Exception:  # a report that cannot be written must not hide why the run failed, nor keep it alive
        traceback.print_exc()
        status = status or 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # a file on a disk that is full
                stream.flush()
        os._exit(status)
