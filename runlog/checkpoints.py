"""Checkpoints: an ordinary `from_pretrained` folder each, with `trainer/` in it to resume from.

    checkpoints/step_N/
        model*.safetensors  config.json  tokenizer ...   the policy as it is served, LoRA folded in; several files have
                                                         an index. Of a base in 4 bits the adapter alone, as PEFT's:
                                                         adapter_model.safetensors  adapter_config.json
        trainer/state/                                   sharded weights and optimizer, by torch.distributed.checkpoint
        trainer/rng_R.pt                                 random state of rank R
        trainer/state.json                               step, counters, and what the run was trained with (resume.py)
        SHA256SUMS                                       of every file above; `sha256sum -c SHA256SUMS` checks them, too

The ranks make a checkpoint together, each its part of the files in its own memory. Then each writes its files in a
thread while training goes on. The folder is called incomplete_step_N_XXXX until all have; rank 0's thread renames it.
What is read back is tensors, numbers and text: nothing in a folder that was tampered with can run.
"""

import contextlib
import copy
import ctypes
import hashlib
import inspect
import io
import json
import os
import pickle
import random
import re
import secrets
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import HfApi
from safetensors import SafetensorError
from safetensors.torch import save as as_safetensors
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import utils
from config import ConfigError
from inputs.trajectory import Trajectory
from safety.storable import text_of

SUMS = "SHA256SUMS"
CHUNK = 2**26  # bytes written at a time
FILE = 2**30  # bytes of weights in a file, and the rest of a layer
Buffer = bytes | memoryview
# What `memory` may hold beside what torch reads back by itself: arrays and numbers of numpy, and the states of an
# environment. None of these runs a command.
KEPT = (Trajectory, frozenset, bytes, type(Path()), np.ndarray, np.dtype)
KEPT += (np.zeros(0).__reduce__()[0], np.float64().__reduce__()[0])
KEPT += tuple(getattr(np.dtypes, name) for name in {*np.dtypes.__all__} - {"ObjectDType", "VoidDType", "StringDType"})


def folder_of(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / "checkpoints" / f"step_{step}"


def steps_saved(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending. A half-written one still has its other name and is not seen."""
    folders = [path for path in Path(run_dir).glob("checkpoints/step_*") if path.is_dir()]
    return sorted(int(found[1]) for path in folders if (found := re.fullmatch(r"step_(\d+)", path.name)))


def last_step(run_dir: Path, or_none: bool = False) -> int:
    """Step of the newest complete checkpoint; 0 where there is none and that is allowed."""
    if (steps := steps_saved(run_dir)) or or_none:
        return steps[-1] if steps else 0
    raise ConfigError(
        f"--resume: no complete checkpoint in {run_dir}/checkpoints. Is it the right --output_dir and --run_name? "
        "--save_steps N makes one every N steps; without it there is only the last. A run that ended before its "
        "first starts anew without --resume, or with --keep_going."
    )


def remedy(path: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    others = [step for step in steps_saved(path.parent.parent) if step < int(path.name.removeprefix("step_"))]
    if others:
        return f"Restore it from a copy, or move it away to go on from the earlier checkpoint of step {others[-1]}."
    return (
        "Restore it from a copy; there is no earlier checkpoint in this run, so otherwise begin anew: --run_name NEW."
    )


# ---- checksums ------------------------------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shared_sums(folder: Path, names: list[str]) -> dict[str, str]:
    """SHA-256 of files in a folder that all ranks see, on every rank. Each takes its share of them; collective.

    "" for one that cannot be read: it has no checksum.
    """
    mine = names[dist.get_rank() :: utils.world_size()] if dist.is_initialized() else names

    def attempt(name: str) -> str:
        try:
            return sha256(folder / name)
        except OSError:
            return ""

    with ThreadPoolExecutor(4) as pool:  # hashing lets go of the GIL
        sums = dict(zip(mine, pool.map(attempt, mine), strict=True))
    return {name: value for part in utils.gather_objects(sums) for name, value in part.items()}


def check_sums(run_dir: Path, step: int) -> bool:
    """Whether the checkpoint has checksums, on every rank; ConfigError naming the files that do not match theirs.

    Collective. One made before there were checksums has none.
    """
    folder = folder_of(run_dir, step)
    text = None
    if utils.is_main() and (folder / SUMS).is_file():
        text = (folder / SUMS).read_text(errors="replace", encoding="utf-8")
    text = utils.gather_objects(text)[0]
    if text is None:
        return False
    lines = [line.partition("  ") for line in text.splitlines()]
    expected = {name: value for value, _, name in lines}
    found = shared_sums(folder, list(expected))
    if changed := [name for name, value in expected.items() if found[name] != value]:
        what = ", ".join(name if found[name] else f"{name or SUMS} (missing or unreadable)" for name in changed[:5])
        raise ConfigError(
            f"--resume: {folder} is damaged: {len(changed)} of {len(expected)} files are not what was saved, by "
            f"{SUMS}: {what}. {remedy(folder)}"
        )
    return True


# ---- saving ---------------------------------------------------------------------------------------------------------


def _train_state(modules: dict) -> dict:
    """Sharded state of {name: (module, optimizer)}, in place for torch.distributed.checkpoint; DDP and FSDP alike. Of a
    module with an optimizer what is trained; without one, all of it. An optimizer that has none yet gets the empty one
    of a first step."""
    state = {}
    for name, (module, optimizer) in modules.items():
        if optimizer is None:
            state[name] = {"model": get_model_state_dict(module)}
        else:
            options = StateDictOptions(ignore_frozen_params=True)
            weights, moments = get_state_dict(module, optimizer, options=options)
            # Weights in 4 bits are left out, their scales are not.
            packed = [n.removeprefix("module.") for n, p in module.named_parameters() if not p.is_floating_point()]
            scales = tuple(f"{name}." for name in packed)
            weights = {key: weight for key, weight in weights.items() if not key.startswith(scales)}
            state[name] = {"model": weights, "optimizer": moments}
    return state


def _saved_state(modules: dict) -> dict:
    """`_train_state`, without that of optimizers that have made no update: they go on as they are now."""
    new = [name for name, (_, optimizer) in modules.items() if optimizer is not None and not optimizer.state]
    new = set.intersection(*map(set, utils.gather_objects(new)))  # a rank may have no part of what has been updated
    state = _train_state(modules)
    for name in new:
        del state[name]["optimizer"]
        modules[name][1].state.clear()
    return state


def _rng_state() -> dict:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def save_checkpoint(
    run_dir: Path, step: int, modules: dict, hf_model, buckets, tokenizer, state: dict, memory: dict, keep: int
) -> Path:
    """Write checkpoints/step_N and wait for it; see `Saver`, which does not wait."""
    saver = Saver(run_dir, keep)
    saver.save(step, modules, hf_model, buckets, tokenizer, state, memory)
    saver.wait()
    return folder_of(run_dir, step)


def give_back() -> None:
    """What malloc holds free between pieces in use goes back to the system. By itself glibc gives back the end of a
    heap alone: with several threads, and steps that differ in size, a process grows that needs no more than before."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


class Saver:
    """Writes checkpoints of a run, one at a time, while it goes on. All ranks call its methods, in the same order; an
    error on one rank is raised on all.

    run_dir: a folder that all ranks see. keep: this many checkpoints stay. stalled: seconds without progress of a
    rank's writing after which the run ends. They are no time limit of a collective: `wait` asks all the time.
    A checkpoint is complete as soon as it is written, whether anybody asks or not; that a write failed is told by
    `poll`. A process that ends drops what it was writing or removing; the next Saver clears it away.
    """

    def __init__(self, run_dir: Path, keep: int, stalled: float = 600.0):
        self.run_dir, self.keep, self.stalled = Path(run_dir), keep, stalled
        self.thread: threading.Thread | None = None
        self.tried = False  # whether `memory`, once there was something in it, could be kept
        if utils.is_main():
            self._clear()

    def save(
        self, step: int, modules: dict, hf_model, buckets: Iterable, tokenizer, state: dict, memory: dict, adapter=None
    ) -> None:
        """Begin checkpoints/step_N when the one before is complete: modules["policy"] for `from_pretrained`, and the
        state of all {name: (module, its optimizer or None)} in `trainer/`. They may change as soon as it returns.

        buckets: lists of (name, full tensor) of the policy, an iterable that all ranks walk in step.
        state: plain JSON values that come back from `load_checkpoint`; memory: what `after_rollout` fills.
        adapter: PEFT's config of the adapter that the buckets are, in place of all weights.
        Takes memory for this rank's share of the files, until they are written.
        """
        self.wait()
        self.final = folder_of(self.run_dir, step)
        # A name of its own: whatever a killed run left under another is in nobody's way.
        name = f"incomplete_step_{step}_{secrets.token_hex(4)}"
        self.partial = self.final.with_name(utils.gather_objects(name)[0])
        self.rank, self.world = dist.get_rank() if dist.is_initialized() else 0, utils.world_size()
        self.sums: dict[str, str] = {}  # of the files that this rank has written
        self.error: BaseException | None = None
        files: dict[str, Buffer] = {}

        def begin() -> None:
            self._clear()  # before anything is written: where the disk was full, its room is needed
            (self.partial / "trainer" / "state").mkdir(parents=True)

        def own() -> None:
            files[f"trainer/rng_{self.rank}.pt"] = _saved(_rng_state())
            if memory:
                files[f"trainer/memory_{self.rank}.pt"] = _kept(memory)

        def others() -> None:
            files["trainer/state.json"] = json.dumps(state | {"step": step}).encode()
            if adapter is None:
                save_config(self.partial, hf_model, dtype)
            else:
                adapter.save_pretrained(self.partial)
            tokenizer.save_pretrained(self.partial)
            self.sums |= {path.name: sha256(path) for path in self.partial.iterdir() if path.is_file()}

        with self._explained():
            _together(begin, main=True)
            dcp.save(_saved_state(modules), storage_writer=_writer(files, "trainer/state"))
            _together(own)
            dtype = model_files(buckets, hf_model, files, alone=adapter is not None)
            _together(others, main=True)
        self.progress = time.monotonic()
        self.thread = threading.Thread(target=self._write, args=(files,), daemon=True)
        self.thread.start()

    def _write(self, files: dict[str, Buffer]) -> None:
        """In the thread: no collectives, and no Python object for long, so that the trainer's thread is not held up."""
        try:
            for name in list(files):
                digest, data = hashlib.sha256(), memoryview(files.pop(name))  # its memory is free when it is written
                with open(self.partial / name, "wb") as file:
                    for start in range(0, len(data), CHUNK):
                        file.write(part := data[start : start + CHUNK])
                        file.flush()
                        os.fsync(file.fileno())  # so that a full or broken disk is noticed here
                        digest.update(part)
                        self.progress = time.monotonic()
                self.sums[name] = digest.hexdigest()
            said = self._said(self.rank)
            said.with_suffix(".half").write_text(json.dumps(self.sums), encoding="utf-8")
            said.with_suffix(".half").rename(said)
            if self.rank == 0:
                self._complete()
            give_back()
        except Exception as error:  # whatever it is, `poll` raises it on all ranks
            self.error = error

    def _said(self, rank: int) -> Path:
        """Where a rank says that it has written its files, with their checksums."""
        return self.partial / f"written_{rank}.json"

    def _complete(self) -> None:
        """Rank 0's thread: wait for the others' files, and give the folder its name."""
        everyone = [self._said(rank) for rank in range(self.world)]
        while set(everyone) - set(self.partial.iterdir()):  # network file systems remember that a name was not there
            time.sleep(0.05)
            self.progress = time.monotonic()
        lines = sorted(line for said in everyone for line in json.loads(said.read_text(encoding="utf-8")).items())
        (self.partial / SUMS).write_text("".join(f"{value}  {name}\n" for name, value in lines), encoding="utf-8")
        for said in everyone:
            said.unlink()
        if self.final.exists():
            self._remove(self.final)
        os.replace(self.partial, self.final)
        for old in steps_saved(self.run_dir)[: -self.keep]:
            self._remove(folder_of(self.run_dir, old))

    def _remove(self, folder: Path) -> None:
        """By another name: what is half removed when the process is killed must not look like a checkpoint."""
        away = folder.with_name(f"incomplete_{folder.name}_{secrets.token_hex(4)}")
        os.replace(folder, away)
        shutil.rmtree(away)

    def poll(self, memory: dict | None = None) -> bool:
        """Whether nothing is under way. RuntimeError if a rank failed.

        memory: what checkpoints will have to keep; ValueError if they cannot, in the first step that fills it.
        """
        if memory and not self.tried:
            _kept(memory)
            self.tried = True
        if self.thread is None:
            return True
        writing, silence = self.thread.is_alive(), time.monotonic() - self.progress
        if writing and silence > self.stalled:
            self.error = TimeoutError(f"nothing could be written for {silence:.0f} s")
        with self._explained():
            utils.raise_together(self.error, "Writing the checkpoint")
            if any(utils.gather_objects(writing)):
                return False
        self.thread = None
        return True

    def wait(self) -> None:
        """Until no checkpoint is under way."""
        while not self.poll():
            self.thread.join(0.2)  # ranks that have written come back, too: no collective waits longer for another

    def _clear(self) -> None:
        for half in self.run_dir.glob("checkpoints/incomplete_step_*"):
            shutil.rmtree(half, ignore_errors=True)

    @contextlib.contextmanager
    def _explained(self):
        several = (dcp.api.CheckpointException, RuntimeError, ValueError, OSError, MemoryError, SafetensorError)
        try:
            yield
        except several as error:  # the first is no Exception
            if utils.is_main():
                self._clear()
            wrapped = getattr(error, "failures", {}).values()
            if any(isinstance(caught, KeyboardInterrupt) for caught, _ in wrapped):  # Ctrl-C in the middle of it
                raise KeyboardInterrupt from None
            said = str(error)[-600:]
            if not isinstance(error, ValueError) and "ValueError: " not in said:  # of this rank, of another
                said = f"{room(self.final.parent)} {said}"
            raise RuntimeError(
                f"The checkpoint {self.final} could not be written; those before it are as they were. {said}"
            ) from None


def _saved(value) -> Buffer:
    torch.save(value, stream := io.BytesIO())
    return stream.getbuffer()


def _kept(memory: dict) -> Buffer:
    """What comes back of `after_rollout`'s dict. ValueError now, and not when a run is to go on, if nothing would."""
    try:
        data = _saved(memory)
        with torch.serialization.safe_globals(list(KEPT)):
            torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:  # pickling runs code of whatever class it meets
        said = " ".join(text_of(error).split())
        said = said.partition("WeightsUnpickler error: ")[2] or said  # torch says more
        raise ValueError(
            f"`memory` of after_rollout holds what a checkpoint cannot bring back ({said:.200}). It may hold tensors, "
            "numbers and their numpy arrays, texts, trajectories without images, and lists, sets and dicts of them."
        ) from error
    return data


def _writer(files: dict[str, Buffer], folder: str):
    """torch.distributed.checkpoint's writer, into memory: all it does there is to agree and to copy."""

    class Stream(io.BytesIO):
        def close(self):  # the writer does; its bytes would be gone
            pass

    class Memory(FileSystem):
        @contextlib.contextmanager
        def create_stream(self, path, mode):
            yield (stream := Stream())
            files[str(path)] = stream.getbuffer()

        def rename(self, path, new_path):
            files[str(new_path)] = files.pop(str(path))

        def exists(self, path):
            return str(path) in files

        def mkdir(self, path):
            pass

    writer = FileSystemWriter(folder, sync_files=False)
    writer.fs = Memory()
    return writer


def model_files(buckets: Iterable, hf_model, files: dict[str, Buffer], alone: bool = False) -> torch.dtype:
    """Put the policy's weights into `files` as safetensors, the first GiB on one rank, the next on the next, and the
    index on rank 0; returns their dtype. Collective. RuntimeError for weights that are not finite.

    A layer is not divided: published checkpoints hold some of its tensors joined. alone: they are an adapter's, which
    PEFT reads from one file.
    """
    world, rank = utils.world_size(), dist.get_rank() if dist.is_initialized() else 0
    number, size, last, mine = 0, 0, "", defaultdict(list)
    for bucket in buckets:
        for name, tensor in bucket:
            layer = utils.layer_of(name)
            if size >= FILE and layer != last and not alone:
                number, size = number + 1, 0
            last, size = layer, size + tensor.nbytes
            if number % world == rank:
                mine[number].append((name, tensor.to("cpu", copy=True)))
    # What from_pretrained has renamed and joined is known where it was called.
    hf_model._weight_conversions = utils.gather_objects(getattr(hf_model, "_weight_conversions", None))[0]
    total, held, bad = number + 1, {}, []
    for number in list(mine):
        named = mine.pop(number)
        weights = dict(named if alone else utils.as_in_a_checkpoint(hf_model, named))
        path = f"model-{number + 1:05}-of-{total:05}.safetensors" if total > 1 else "model.safetensors"
        path = "adapter_model.safetensors" if alone else path
        held |= {name: (path, tensor.nbytes, tensor.dtype, tensor.shape) for name, tensor in weights.items()}
        numbers = [(name, tensor) for name, tensor in weights.items() if tensor.is_floating_point()]
        bad += [name for name, tensor in numbers if not torch.linalg.vector_norm(tensor.float()).isfinite()]
        weights = {name: tensor.contiguous() for name, tensor in weights.items()}
        files[path] = as_safetensors(weights, metadata={"format": "pt"})
    fault = ValueError(f"{len(bad)} of {len(held)} tensors hold nan or infinity, first {bad[0]}") if bad else None
    utils.raise_together(fault, "Writing the checkpoint")
    held = {name: place for part in utils.gather_objects(held) for name, place in part.items()}
    if not alone:
        _together(check_names, main=True, hf_model=hf_model, held=held)
    if total > 1 and utils.is_main():
        index = {"metadata": {"total_size": sum(nbytes for _, nbytes, *_ in held.values())}}
        index["weight_map"] = {name: path for name, (path, *_) in sorted(held.items())}
        files["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    return max(held.values(), key=lambda place: place[1])[2]  # of the largest: vectors may be wider


def check_names(hf_model, held: dict[str, tuple]) -> None:
    """ValueError if transformers, given what is to be written, would lack weights of the model, find others, or other
    shapes. held: by name (path, bytes, dtype, shape)."""
    weights = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (_, _, dtype, shape) in held.items()}
    how = dict(state_dict=weights, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True)
    config = copy.deepcopy(getattr(hf_model, "own_config", hf_model.config))
    _, found = type(hf_model).from_pretrained(None, config=config, **how)
    if wrong := [f"{len(names)} {what}, such as {min(map(str, names))}" for what, names in found.items() if names]:
        raise ValueError(f"what was to be written is not a whole {type(hf_model).__name__}: {'; '.join(wrong)}")


def _together(action, main: bool = False, **options) -> None:
    """Do it, on rank 0 only if `main`; an error is raised on every rank."""
    error = None
    try:
        if utils.is_main() or not main:
            action(**options)
    except (OSError, RuntimeError, ValueError, SafetensorError) as caught:
        error = caught
    utils.raise_together(error, "Writing the checkpoint")


def room(folder: Path) -> str:
    """How much room there is: torch and safetensors tell of a full disk in words of their own."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"{folder} cannot be reached: {error}."
    return f"There are {free / 2**30:.1f} GiB free in {folder}; --save_total_limit keeps fewer checkpoints."


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


class _PlainUnpickler(pickle.Unpickler):
    """For the index of torch.distributed.checkpoint, which is a pickle: its own dataclasses, sizes, dtypes and paths,
    and nothing that could run a command."""

    ALLOWED = {
        "torch": ("Size",),
        "torch.serialization": ("_get_layout",),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.distributed.checkpoint.metadata": (
            "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
            "TensorStorageMetadata _MEM_FORMAT_ENCODING"
        ).split(),
        "pathlib": ("PosixPath",),
    }

    def find_class(self, module: str, name: str):
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint holds")
        return super().find_class(module, name)


def _reader_and_planner(path: Path) -> dict:
    """How torch.distributed.checkpoint reads here: as it does by itself, but without unpickling what could run, and
    without asking for what an optimizer had no state of."""

    class Reader(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            with open(path / ".metadata", "rb") as file:
                metadata = _PlainUnpickler(file).load()
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    class Planner(DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            _drop_what_was_not_there(state_dict, metadata.state_dict_metadata)
            super().set_up_planner(state_dict, metadata, is_coordinator)

        def load_bytes(self, read_item, value):  # numbers of the optimizer's groups
            torch.load(value, weights_only=True)  # raises where there is more in it than numbers and text
            value.seek(0)
            super().load_bytes(read_item, value)

    return {"storage_reader": Reader(path), "planner": Planner()}


def read_state(run_dir: Path, step: int) -> dict:
    """What `save_checkpoint` was given as `state`, and the step."""
    path = folder_of(run_dir, step) / "trainer" / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.get("step") != step:
            raise ValueError(f"it is not the state of step {step}")
        return state
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--resume: {path} is damaged: {error}. {remedy(folder_of(run_dir, step))}") from None


def load_checkpoint(run_dir: Path, step: int, modules: dict, memory: dict, classes=KEPT) -> dict:
    """Put weights, optimizers, random state and memory back where `Saver.save` took them; returns its `state`.

    classes: what the memory may hold instances of.
    """
    path, state = folder_of(run_dir, step), _train_state(modules)
    settings = {name: _settings(optimizer) for name, (_, optimizer) in modules.items() if optimizer is not None}
    try:
        dcp.load(state, **_reader_and_planner(path / "trainer" / "state"))
    except (dcp.api.CheckpointException, RuntimeError, ValueError, OSError) as error:  # the first is no Exception
        raise ConfigError(
            f"--resume: {path} does not fit this run, or is damaged. It needs the model, --use_peft, --lora_r, "
            f"--lora_targets and --optim it was saved with. {remedy(path)} {str(error)[-600:]}"
        ) from None
    for name, (module, optimizer) in modules.items():
        weights = state[name]["model"]
        options = StateDictOptions(ignore_frozen_params=optimizer is not None, strict=optimizer is None)
        set_model_state_dict(module, weights, options=options)
        if optimizer is None:
            continue
        if moments := state[name].get("optimizer"):
            set_optimizer_state_dict(module, optimizer, moments, options=options)
        else:  # saved before its first update
            optimizer.state.clear()
        for group, own in zip(optimizer.param_groups, settings[name], strict=True):
            group.update(own)
    rng_file = path / "trainer" / f"rng_{dist.get_rank() if dist.is_initialized() else 0}.pt"
    if rng_file.exists():  # absent when resumed on more ranks than it was saved from
        _set_rng_state(rng_file)
    memory_file = rng_file.with_name(rng_file.name.replace("rng", "memory"))
    kept, ranks = sorted(rng_file.parent.glob("memory_*.pt")), len([*rng_file.parent.glob("rng_*.pt")])
    if kept and utils.world_size() > ranks:
        if len(kept) < ranks or len({file.read_bytes() for file in kept}) > 1:
            raise ConfigError(
                f"--resume: the {ranks} ranks that saved {path} had different `memory` (after_rollout), so there is "
                "none for another rank. Resume on as many, or fill it alike on all (utils.gather_objects) in a new run."
            )
        memory_file = kept[0]
    if memory_file.exists():
        with torch.serialization.safe_globals(list(classes)):
            memory.update(torch.load(memory_file, weights_only=True))
    return read_state(run_dir, step)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict]:
    """Of each group what the optimizer was made with, but for the learning rate, which each update sets: that of this
    run holds. What else is in a group may be the optimizer's state."""
    ours = {*inspect.signature(type(optimizer).__init__).parameters, "lr_scale"} - {"params", "lr"}
    return [{name: value for name, value in group.items() if name in ours} for group in optimizer.param_groups]


def _drop_what_was_not_there(state: dict, saved: Iterable[str]) -> None:
    """Of optimizers: they keep no state of parameters that never had a gradient, as the last layers of an image encoder
    of which an earlier one is used, and `_train_state` makes one for each."""
    for name, parts in state.items():
        if "optimizer" not in parts:
            continue
        place = f"{name}.optimizer."
        there = [key.removeprefix(place).split(".") for key in saved if key.startswith(place)]
        known = {".".join(words[1:end]) for words in there for end in range(2, len(words))}  # state.PARAMETER.moment
        if there:
            of_all = parts["optimizer"]["state"]
            parts["optimizer"]["state"] = {name: moments for name, moments in of_all.items() if name in known}
        else:
            del parts["optimizer"]


def _set_rng_state(path: Path) -> None:
    try:
        rng = torch.load(path, weights_only=True)
        torch.set_rng_state(rng["torch"])
        random.setstate(rng["python"])
    except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError, TypeError, EOFError, OSError) as error:
        raise ConfigError(
            f"--resume: {path} is no random state: {str(error).splitlines()[0]} {remedy(path.parent.parent)}"
        ) from None
    if torch.cuda.is_available() and len(rng["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(rng["cuda"])


def push_to_hub(run_dir: Path, step: int, repo_id: str) -> None:
    """Upload the `from_pretrained` part of a checkpoint."""
    api, folder = HfApi(), folder_of(run_dir, step)
    try:
        api.create_repo(repo_id, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns=["trainer/*", SUMS])
    except Exception as error:  # of several libraries
        raise RuntimeError(
            f"--push_to_hub: {folder} could not be uploaded ({type(error).__name__}: {error}). The run itself is "
            f"complete. Upload it by hand: hf upload {repo_id} {folder} . --exclude 'trainer/*' --exclude {SUMS}"
        ) from error
