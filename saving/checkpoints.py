"""Checkpoints: each is an ordinary `from_pretrained` folder, with `trainer/` in it to resume from.

    checkpoints/step_N/
        model*.safetensors  config.json  tokenizer ...   the policy, LoRA folded in; with a base in 4 bits the adapter
                                                         alone, in PEFT's format: adapter_model.safetensors
        trainer/state/                                   sharded weights and optimizer, by torch.distributed.checkpoint
        trainer/rank_R.pt                                random state of rank R, and its `memory` (after_rollout)
        trainer/state.json                               step, counters, and the run's settings (resume.py)

Training waits while one is written. The folder is called incomplete_step_N until it is complete. Resuming unpickles
files, which can run code: resume only from checkpoints of your own runs.
"""

import copy
import inspect
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict
from transformers import GenerationConfig

import utils
from config import ConfigError
from runfiles.storable import text_of

FORMAT = 2


def folder_of(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / "checkpoints" / f"step_{step}"


def steps_saved(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    folders = [path for path in Path(run_dir).glob("checkpoints/step_*") if path.is_dir()]
    return sorted(int(match[1]) for path in folders if (match := re.fullmatch(r"step_(\d+)", path.name)))


def last_step(run_dir: Path) -> int:
    """Step of the newest complete checkpoint; 0 without one."""
    return max(steps_saved(run_dir), default=0)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ---- saving ---------------------------------------------------------------------------------------------------------


def train_state(modules: dict, new: Iterable[str] = ()) -> dict:
    """Sharded state of {name: (module, optimizer)} for torch.distributed.checkpoint: the trained weights of a module,
    or all its weights if it has no optimizer. new: names whose optimizer has made no update, and so has no state."""
    state = {}
    for name, (module, optimizer) in modules.items():
        options = state_dict.StateDictOptions(ignore_frozen_params=optimizer is not None)
        # Weights in 4 bits are frozen and so left out; their scales have to be left out here.
        packed = [n.removeprefix("module.") for n, p in module.named_parameters() if not p.is_floating_point()]
        scales = tuple(f"{name}." for name in packed)
        weights = state_dict.get_model_state_dict(module, options=options)
        state[name] = {"model": {key: weight for key, weight in weights.items() if not key.startswith(scales)}}
        if optimizer is not None and name not in new:
            state[name]["optimizer"] = state_dict.get_optimizer_state_dict(module, optimizer, options=options)
    return state


def without_update(modules: dict) -> set[str]:
    """Names whose optimizer has made no update on any rank; on some ranks it may have no part of the weights."""
    without_state = [name for name, (_, optimizer) in modules.items() if optimizer is not None and not optimizer.state]
    return set.intersection(*map(set, utils.gather_objects(without_state)))


def save_checkpoint(
    run_dir: Path, step: int, modules: dict, hf_model, buckets: Iterable, tokenizer, state: dict, memory: dict,
    keep: int, adapter=None,
) -> Path:  # fmt: skip
    """Write checkpoints/step_N: the policy for `from_pretrained`, and in `trainer/` the state of all modules, {name:
    (module, its optimizer or None)}. Collective; an error on one rank is raised on all.

    run_dir: a folder that all ranks see. buckets: lists of (name, full tensor) of the policy; all ranks iterate over
    them together, and rank 0 collects all tensors in CPU memory. state: JSON values, which `load_checkpoint` returns.
    memory: the dict that `after_rollout` fills. keep: number of checkpoints to keep. adapter: PEFT's config, if the
    buckets have an adapter rather than all weights.
    """
    final = folder_of(run_dir, step)
    partial = final.with_name(f"incomplete_{final.name}")
    weights: dict[str, torch.Tensor] = {}

    def begin() -> None:
        clear(run_dir)  # first, since its space is needed if the disk was full
        (partial / "trainer").mkdir(parents=True)

    def complete() -> None:
        text = json.dumps(state | {"step": step, "format": FORMAT})
        (partial / "trainer/state.json").write_text(text, encoding="utf-8")
        if adapter is None:
            save_model(partial, hf_model, tokenizer, weights)
        else:  # PEFT reads one file
            tokenizer.save_pretrained(partial)
            adapter.save_pretrained(partial)
            save_file({n: t.contiguous() for n, t in weights.items()}, partial / "adapter_model.safetensors")
        remove(final)
        os.replace(partial, final)
        for old in steps_saved(run_dir)[:-keep]:
            remove(folder_of(run_dir, old))

    together(begin, final, main=True)
    for bucket in buckets:
        weights |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket if utils.is_main()}
    together(lambda: torch.save(rank_state(memory), partial / f"trainer/rank_{rank()}.pt"), final)
    tensors = train_state(modules, without_update(modules))
    together(lambda: dcp.save(tensors, checkpoint_id=partial / "trainer/state"), final)
    together(complete, final, main=True)
    return final


def together(action: Callable[[], None], final: Path, main: bool = False) -> None:
    """Call `action` on all ranks, or with `main` on rank 0 alone; an error is raised on every rank, and names the
    checkpoint `final`."""
    error = None
    try:
        if utils.is_main() or not main:
            action()
    except (Exception, dcp.api.CheckpointException) as caught:  # the latter is a BaseException
        clear(final.parent.parent)
        free = shutil.disk_usage(final.parent).free / 2**30
        error = RuntimeError(
            f"The checkpoint {final} could not be written; those before it are as they were. "
            f"{(text_of(caught).strip() or type(caught).__name__).splitlines()[-1]} There are {free:.1f} GiB free in "
            f"{final.parent}; --save_total_limit keeps fewer checkpoints."
        )
        error.__cause__ = caught
    utils.raise_together(error, "Saving a checkpoint")


def clear(run_dir: Path) -> None:
    """Remove the incomplete checkpoints of processes that have ended."""
    for folder in Path(run_dir).glob("checkpoints/incomplete_*"):
        shutil.rmtree(folder, ignore_errors=True)


def remove(folder: Path) -> None:
    """Rename the folder, then remove it, so that it never looks like a checkpoint, even if the process is killed."""
    if folder.exists():
        os.replace(folder, renamed := folder.with_name(f"incomplete_removed_{folder.name}"))
        shutil.rmtree(renamed)


def memory_bytes(memory: dict) -> bytes:
    """The dict of after_rollout as bytes, which unlike those of a plain pickle of tensors are equal for equal dicts.
    ValueError, here rather than at the end of a run, if it cannot be written."""
    file = io.BytesIO()
    try:
        torch.save(memory, file)
        return file.getvalue()
    except Exception as error:  # pickling runs the code of any class
        fault = f"`memory` of after_rollout holds what a checkpoint cannot keep ({text_of(error):.200})"
        allowed = "tensors, numbers, texts, trajectories, and lists, sets and dicts of them"
        raise ValueError(f"{fault}; give it {allowed}") from error


def rank_state(memory: dict) -> dict:
    """The part of a checkpoint that belongs to this rank."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "memory": memory_bytes(memory)}


def save_model(path: Path, hf_model, processor, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write an ordinary `from_pretrained` folder. weights: full tensors; None: those of the model in this process.

    Its config is that of the model's own files, without this run's changes, such as dropout. Generation settings are
    written past `save_pretrained`, which refuses those of many published models.
    """
    dtype = max(weights.values(), key=torch.Tensor.numel).dtype if weights else hf_model.dtype
    generation, hf_model.generation_config = hf_model.generation_config, GenerationConfig()
    hf_model.save_pretrained(path, state_dict=weights, max_shard_size="5GB")
    hf_model.generation_config = generation
    config = copy.deepcopy(getattr(hf_model, "own_config", hf_model.config))
    config.dtype = dtype
    config.to_json_file(path / "config.json")
    if hf_model.can_generate():
        generation.to_json_file(path / "generation_config.json", keys_to_pop=["compile_config"])
    processor.save_pretrained(path)


# ---- loading --------------------------------------------------------------------------------------------------------


def read_state(run_dir: Path, step: int) -> dict:
    """The `state` of `save_checkpoint`, and the step."""
    folder = folder_of(run_dir, step)
    try:
        state = json.loads((folder / "trainer/state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume: {folder}/trainer/state.json cannot be read: {error}. {REMEDY}") from None
    if state.get("format") != FORMAT:
        remedy = f"Resume with that version, or begin anew from its weights: --model_id {folder} --run_name NEW."
        raise ConfigError(f"--resume: an older version wrote {folder}. {remedy}")
    return state


REMEDY = "Move it away to go on from the checkpoint before it, if there is one."


def load_checkpoint(run_dir: Path, step: int, modules: dict, memory: dict) -> dict:
    """Restore weights, optimizers, random state and memory from `save_checkpoint`; returns its `state`."""
    folder, counters = folder_of(run_dir, step), read_state(run_dir, step)
    settings = {name: group_settings(optimizer) for name, (_, optimizer) in modules.items() if optimizer is not None}
    try:
        reader = dcp.FileSystemReader(folder / "trainer/state")
        # Optimizers have no state for weights that never had a gradient, but torch makes one for each.
        saved = {key.rpartition(".")[0] for key in reader.read_metadata().state_dict_metadata}
        state = train_state(modules)
        for name, parts in state.items():
            if "optimizer" in parts:
                moments = parts["optimizer"]
                known = {key: v for key, v in moments["state"].items() if f"{name}.optimizer.state.{key}" in saved}
                moments["state"] = known
                if not known:  # saved before its first update
                    del parts["optimizer"]
        dcp.load(state, storage_reader=reader)
    except (dcp.api.CheckpointException, RuntimeError, ValueError, OSError) as error:  # the first is a BaseException
        raise ConfigError(
            f"--resume: {folder} does not fit this run, or is damaged. It needs the model, --use_peft, --lora_r, "
            f"--lora_targets and --optim it was saved with. {REMEDY} {str(error)[-600:]}"
        ) from None
    for name, (module, optimizer) in modules.items():
        options = state_dict.StateDictOptions(ignore_frozen_params=optimizer is not None, strict=optimizer is None)
        state_dict.set_model_state_dict(module, state[name]["model"], options=options)
        if optimizer is None:
            continue
        if "optimizer" in state[name]:
            state_dict.set_optimizer_state_dict(module, optimizer, state[name]["optimizer"], options=options)
        else:
            optimizer.state.clear()
        for group, group_setting in zip(optimizer.param_groups, settings[name], strict=True):
            group.update(group_setting)
    load_rank_state(folder, memory)
    return counters


def load_rank_state(folder: Path, memory: dict) -> None:
    """Restore random state and memory of this rank. A rank that the saved run did not have keeps its random state, and
    gets the common memory if all ranks had the same."""
    files = sorted(folder.glob("trainer/rank_*.pt"))
    own_file = folder / f"trainer/rank_{rank()}.pt"
    if own_file in files:
        state = torch.load(own_file, weights_only=False)
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        if len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
    else:
        memories = {torch.load(file, weights_only=False)["memory"] for file in files}
        if len(memories) > 1:
            fault = f"the {len(files)} ranks that saved {folder} had different `memory` (after_rollout)"
            raise ConfigError(f"--resume: {fault}, so a new rank has none; resume on as many.")
        state = {"memory": memories.pop()}
    memory.update(torch.load(io.BytesIO(state["memory"]), weights_only=False))


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict]:
    """The arguments of the optimizer in each of its groups, which this run's settings decide and not the checkpoint's;
    without the learning rate, which each update sets. Other entries of a group may be the optimizer's state."""
    arguments = {*inspect.signature(type(optimizer).__init__).parameters, "lr_scale"} - {"params", "lr"}
    return [{name: value for name, value in group.items() if name in arguments} for group in optimizer.param_groups]
