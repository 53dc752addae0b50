"""Checkpoints: an ordinary `from_pretrained` folder each, with `trainer/` in it to resume from.

    checkpoints/step_N/
        model*.safetensors  config.json  tokenizer ...   the policy as it is served, LoRA folded in. Of a base in 4 bits
                                                         the adapter alone, as PEFT's: adapter_model.safetensors
        trainer/state/                                   sharded weights and optimizer, by torch.distributed.checkpoint
        trainer/rank_R.pt                                random state of rank R, and its `memory` (after_rollout)
        trainer/state.json                               step, counters, and what the run was trained with (resume.py)

What changes is copied, then written while training goes on. The folder is called incomplete_step_N until all of it is
there. To resume is to unpickle, which can run code: resume from what your own runs wrote.
"""

import copy
import datetime
import inspect
import io
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import utils
from config import ConfigError
from inputs.parameters import as_in_a_checkpoint
from runlog.storable import text_of

FORMAT = 2
LIMIT = 3600.0  # seconds that writing a checkpoint may take


def folder_of(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / "checkpoints" / f"step_{step}"


def steps_saved(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending. A half-written one still has its other name and is not seen."""
    folders = [path for path in Path(run_dir).glob("checkpoints/step_*") if path.is_dir()]
    return sorted(int(found[1]) for path in folders if (found := re.fullmatch(r"step_(\d+)", path.name)))


def last_step(run_dir: Path) -> int:
    """Step of the newest complete checkpoint; 0 without one."""
    return max(steps_saved(run_dir), default=0)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ---- saving ---------------------------------------------------------------------------------------------------------


def train_state(modules: dict, new: Iterable[str] = ()) -> dict:
    """Sharded state of {name: (module, optimizer)} for torch.distributed.checkpoint. Of a module with an optimizer what
    is trained; without one, all of it. new: names whose optimizer has made no update, and so has no state."""
    state = {}
    for name, (module, optimizer) in modules.items():
        if optimizer is None:
            state[name] = {"model": get_model_state_dict(module)}
            continue
        weights, moments = get_state_dict(module, optimizer, options=StateDictOptions(ignore_frozen_params=True))
        # Weights in 4 bits are left out, their scales are not.
        packed = [n.removeprefix("module.") for n, p in module.named_parameters() if not p.is_floating_point()]
        scales = tuple(f"{name}." for name in packed)
        weights = {key: weight for key, weight in weights.items() if not key.startswith(scales)}
        state[name] = {"model": weights} | ({} if name in new else {"optimizer": moments})
        if name in new:  # torch has made one to find out its shapes
            optimizer.state.clear()
    return state


def without_update(modules: dict) -> set[str]:
    """Names whose optimizer has made no update: on any rank, which may have no part of what has been updated."""
    new = [name for name, (_, optimizer) in modules.items() if optimizer is not None and not optimizer.state]
    return set.intersection(*map(set, utils.gather_objects(new)))


def save_checkpoint(
    run_dir: Path, step: int, modules: dict, hf_model, buckets, tokenizer, state: dict, memory: dict, keep: int
) -> Path:
    """Write checkpoints/step_N and wait for it; see `Saver`, which does not wait."""
    saver = Saver(run_dir, keep)
    saver.save(step, modules, hf_model, buckets, tokenizer, state, memory)
    saver.wait()
    return folder_of(run_dir, step)


class Saver:
    """Writes checkpoints of a run, one at a time, while it goes on. All ranks make one and call its methods, in the
    same order; an error on one rank is raised on all.

    run_dir: a folder that all ranks see. keep: this many checkpoints stay. A checkpoint is complete as soon as it is
    written, whether anybody asks or not; that a write failed is told by `poll`. What a process that ends was writing is
    cleared away by the next Saver.
    """

    def __init__(self, run_dir: Path, keep: int):
        self.run_dir, self.keep, self.tried = Path(run_dir), keep, False
        self.future: Future | None = None  # of this rank's part of trainer/state
        self.thread: threading.Thread | None = None  # rank 0's, for the rest
        self.error: BaseException | None = None
        # A group of its own: torch's thread and the training's would meet in one.
        limit = datetime.timedelta(seconds=LIMIT)
        self.group = dist.new_group(backend="gloo", timeout=limit) if dist.is_initialized() else None
        if utils.is_main():
            self._clear()

    def save(
        self, step: int, modules: dict, hf_model, buckets: Iterable, tokenizer, state: dict, memory: dict, adapter=None
    ) -> None:
        """Begin checkpoints/step_N when the one before is complete: modules["policy"] for `from_pretrained`, and the
        state of all {name: (module, its optimizer or None)} in `trainer/`. They may change as soon as it returns.

        buckets: lists of (name, full tensor) of the policy, an iterable that all ranks walk in step; rank 0 holds all
        of them in CPU memory until they are written. state: plain JSON values that come back from `load_checkpoint`;
        memory: what `after_rollout` fills. adapter: PEFT's config of the adapter that the buckets are, in place of all
        weights.
        """
        self.wait()
        self.begun = time.monotonic()
        self.final = folder_of(self.run_dir, step)
        self.partial = self.final.with_name(f"incomplete_{self.final.name}")
        self._together(self._begin, main=True)
        weights: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            weights |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket if utils.is_main()}

        def others() -> None:
            text = json.dumps(state | {"step": step, "format": FORMAT})
            (self.partial / "trainer/state.json").write_text(text, encoding="utf-8")
            tokenizer.save_pretrained(self.partial)
            if adapter is None:
                save_config(self.partial, hf_model, max(weights.values(), key=torch.Tensor.numel).dtype)
            else:
                adapter.save_pretrained(self.partial)

        self._together(lambda: torch.save(own_state(memory), self.partial / f"trainer/rank_{rank()}.pt"))
        self._together(others, main=True)
        if adapter is None:
            if utils.is_main():  # what from_pretrained has renamed and joined is known where the model is
                weights = dict(as_in_a_checkpoint(hf_model, list(weights.items())))
            self._together(lambda: check_names(hf_model, weights), main=True)
        state_folder = self.partial / "trainer" / "state"
        tensors = train_state(modules, without_update(modules))
        self.future = self._written(tensors, state_folder, modules)
        if utils.is_main():
            names = "adapter_model{suffix}.safetensors" if adapter else "model{suffix}.safetensors"
            self.thread = threading.Thread(target=self._complete, args=(weights, names, bool(adapter)), daemon=True)
            self.thread.start()

    def _written(self, tensors: dict, folder: Path, modules: dict) -> Future:
        """Of FSDP1 torch makes no copy of shards: they are written before the loop goes on."""
        how = dict(checkpoint_id=folder, process_group=self.group)
        if not any(isinstance(part, FSDP) for module, _ in modules.values() for part in module.modules()):
            return dcp.async_save(tensors, **how)
        future: Future = Future()
        try:
            future.set_result(dcp.save(tensors, **how))
        except (dcp.api.CheckpointException, RuntimeError, OSError) as error:  # the first is no Exception
            future.set_exception(error)
        return future

    def _begin(self) -> None:
        self._clear()  # before anything is written: where the disk was full, its room is needed
        (self.partial / "trainer").mkdir(parents=True)

    def _complete(self, weights: dict, names: str, alone: bool) -> None:
        """Rank 0's thread: the model's files, then, when all ranks have written theirs, the folder's name."""
        try:
            # Parts of what a layer holds joined share its memory, which safetensors refuses.
            whole = {name: t if t.nbytes == t.untyped_storage().nbytes() else t.clone() for name, t in weights.items()}
            size = 2**60 if alone else 5 * 10**9  # PEFT reads one file
            save_torch_state_dict(whole, self.partial, filename_pattern=names, max_shard_size=size)
            self.future.result(LIMIT)
            self._remove(self.final)
            os.replace(self.partial, self.final)
            for old in steps_saved(self.run_dir)[: -self.keep]:
                self._remove(folder_of(self.run_dir, old))
        except BaseException as error:  # torch's is no Exception; `poll` raises it on all ranks
            self.error = error

    def _remove(self, folder: Path) -> None:
        """By another name: what is half removed when the process is killed must not look like a checkpoint."""
        if folder.exists():
            os.replace(folder, away := folder.with_name(f"incomplete_removed_{folder.name}"))
            shutil.rmtree(away)

    def poll(self, memory: dict | None = None) -> bool:
        """Whether nothing is under way. RuntimeError if a rank failed.

        memory: what checkpoints will have to keep; ValueError if they cannot, in the first step that fills it.
        """
        if memory and not self.tried:
            self.tried = bool(kept(memory))
        if self.future is None:
            return True
        done = self.future.done() and not (self.thread and self.thread.is_alive())
        error = self.error or (self.future.exception() if done else None)
        if not done and time.monotonic() - self.begun > LIMIT:
            error = TimeoutError(f"it was not written in {LIMIT:.0f} s. Does its disk answer?")
        self._raise(error)
        if all(utils.gather_objects(done)):
            self.future = self.thread = None
        return self.future is None

    def wait(self) -> None:
        """Until no checkpoint is under way."""
        while not self.poll():
            time.sleep(0.1)

    def _clear(self) -> None:
        for half in self.run_dir.glob("checkpoints/incomplete_*"):
            shutil.rmtree(half, ignore_errors=True)

    def _together(self, action, main: bool = False) -> None:
        """Do it, on rank 0 only if `main`; an error is raised on every rank."""
        error = None
        try:
            if utils.is_main() or not main:
                action()
        except Exception as caught:  # of pickling, tokenizers, disks; raised right below
            error = caught
        self._raise(error)

    def _raise(self, error: BaseException | None) -> None:
        said = None if error is None else (text_of(error).strip() or type(error).__name__).splitlines()[-1]
        if any(faults := utils.gather_objects(said)):
            if utils.is_main():
                self._clear()
            raise RuntimeError(
                f"The checkpoint {self.final} could not be written; those before it are as they were. "
                f"{next(filter(None, faults))} {room(self.final.parent)}"
            ) from error


def check_names(hf_model, weights: dict[str, torch.Tensor]) -> None:
    """ValueError if transformers, given what is to be written, would lack weights of the model, find others, or other
    shapes: known before an older checkpoint goes."""
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
    how = dict(state_dict=empty, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True)
    config = copy.deepcopy(getattr(hf_model, "own_config", hf_model.config))
    _, found = type(hf_model).from_pretrained(None, config=config, **how)
    if wrong := [f"{len(names)} {what}, such as {min(map(str, names))}" for what, names in found.items() if names]:
        raise ValueError(f"what was to be written is not a whole {type(hf_model).__name__}: {'; '.join(wrong)}")


def kept(memory: dict) -> bytes:
    """after_rollout's dict as a file: the same bytes on all ranks where they have the same in it, which a plain pickle
    of tensors has not. ValueError now, and not at the end of a run, if it cannot be written."""
    file = io.BytesIO()
    try:
        torch.save(memory, file)
        return file.getvalue()
    except Exception as error:  # pickling runs code of whatever class it meets
        raise ValueError(
            f"`memory` of after_rollout holds what a checkpoint cannot keep ({text_of(error):.200}): give it tensors, "
            "numbers, texts, trajectories, and lists, sets and dicts of them."
        ) from error


def own_state(memory: dict) -> dict:
    """What a checkpoint has of this rank alone."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "memory": kept(memory)}


def room(folder: Path) -> str:
    free = shutil.disk_usage(folder).free / 2**30
    return f"There are {free:.1f} GiB free in {folder}; --save_total_limit keeps fewer checkpoints."


def save_config(path: Path, hf_model, dtype: torch.dtype) -> None:
    """What an ordinary `from_pretrained` folder says of the model, besides its weights, which are of `dtype`: what the
    model's own files say, not what this run has changed for itself, as dropout. Many published models have settings of
    generation that transformers reads with a warning and `save_pretrained` refuses; they are nobody's mistake here."""
    config = copy.deepcopy(getattr(hf_model, "own_config", hf_model.config))
    config.dtype = dtype
    config.to_json_file(path / "config.json")
    if hf_model.can_generate():
        hf_model.generation_config.to_json_file(path / "generation_config.json", keys_to_pop=["compile_config"])


def save_model(path: Path, hf_model, processor) -> None:
    """An ordinary `from_pretrained` folder of a model that is whole in this process."""
    from transformers import GenerationConfig

    own, hf_model.generation_config = hf_model.generation_config, GenerationConfig()  # see `save_config`
    hf_model.save_pretrained(path)
    hf_model.generation_config = own
    save_config(path, hf_model, hf_model.dtype)
    processor.save_pretrained(path)


# ---- loading --------------------------------------------------------------------------------------------------------


def read_state(run_dir: Path, step: int) -> dict:
    """What `Saver.save` was given as `state`, and the step."""
    folder = folder_of(run_dir, step)
    try:
        state = json.loads((folder / "trainer/state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume: {folder}/trainer/state.json cannot be read: {error}. {REMEDY}") from None
    if state.get("format") != FORMAT:
        raise ConfigError(
            f"--resume: an older version wrote {folder}. Resume it with that version, or begin a new run from its "
            f"weights: --model_id {folder} --run_name NEW."
        )
    return state


REMEDY = "Move it away to go on from the checkpoint before it, if there is one."


def load_checkpoint(run_dir: Path, step: int, modules: dict, memory: dict) -> dict:
    """Put weights, optimizers, random state and memory back where `Saver.save` took them; returns its `state`."""
    folder, counters = folder_of(run_dir, step), read_state(run_dir, step)
    settings = {name: own_settings(optimizer) for name, (_, optimizer) in modules.items() if optimizer is not None}
    try:
        reader = dcp.FileSystemReader(folder / "trainer/state")
        # Optimizers keep no state of what never had a gradient; torch makes one for each when it is asked for theirs.
        saved = {key.rpartition(".")[0] for key in reader.read_metadata().state_dict_metadata}
        state = train_state(modules)
        for name, parts in state.items():
            if "optimizer" in parts:
                moments = parts["optimizer"]
                there = {key: v for key, v in moments["state"].items() if f"{name}.optimizer.state.{key}" in saved}
                moments["state"] = there
                if not there:  # saved before its first update
                    del parts["optimizer"]
        dcp.load(state, storage_reader=reader)
    except (dcp.api.CheckpointException, RuntimeError, ValueError, OSError) as error:  # the first is no Exception
        raise ConfigError(
            f"--resume: {folder} does not fit this run, or is damaged. It needs the model, --use_peft, --lora_r, "
            f"--lora_targets and --optim it was saved with. {REMEDY} {str(error)[-600:]}"
        ) from None
    for name, (module, optimizer) in modules.items():
        options = StateDictOptions(ignore_frozen_params=optimizer is not None, strict=optimizer is None)
        set_model_state_dict(module, state[name]["model"], options=options)
        if optimizer is None:
            continue
        if "optimizer" in state[name]:
            set_optimizer_state_dict(module, optimizer, state[name]["optimizer"], options=options)
        else:
            optimizer.state.clear()
        for group, own in zip(optimizer.param_groups, settings[name], strict=True):
            group.update(own)
    load_own(folder, memory)
    return counters


def load_own(folder: Path, memory: dict) -> None:
    """Random state and memory of this rank. One that is new has a random state of its own, and the memory of rank 0 if
    all ranks had the same."""
    files = sorted(folder.glob("trainer/rank_*.pt"))
    mine = folder / f"trainer/rank_{rank()}.pt"
    if mine in files:
        own = torch.load(mine, weights_only=False)
        torch.set_rng_state(own["torch"])
        random.setstate(own["python"])
        if len(own["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(own["cuda"])
    else:
        memories = {torch.load(file, weights_only=False)["memory"] for file in files}
        if len(memories) > 1:
            raise ConfigError(
                f"--resume: the {len(files)} ranks that saved {folder} had different `memory` (after_rollout), so a "
                "new rank has none. Resume on as many, or fill it alike on all (utils.gather_objects) in a new run."
            )
        own = {"memory": memories.pop()}
    memory.update(torch.load(io.BytesIO(own["memory"]), weights_only=False))


def own_settings(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Of each group what the optimizer was made with, but for the learning rate, which each update sets: that of this
    run holds. What else is in a group may be the optimizer's state."""
    ours = {*inspect.signature(type(optimizer).__init__).parameters, "lr_scale"} - {"params", "lr"}
    return [{name: value for name, value in group.items() if name in ours} for group in optimizer.param_groups]
