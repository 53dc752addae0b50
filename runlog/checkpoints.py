"""Checkpoints: an ordinary `from_pretrained` folder each, with `trainer/` in it to resume from.

    checkpoints/step_N/
        model.safetensors  config.json  tokenizer ...   the policy, LoRA folded in
        trainer/state/                                  sharded weights and optimizer, by torch.distributed.checkpoint
        trainer/rng_R.pt                                random state of rank R
        trainer/state.json                              step, counters, and what the run was trained with (resume.py)
        SHA256SUMS                                      of every file above; `sha256sum -c SHA256SUMS` checks them, too

A folder is written as incomplete_step_N_XXXX and renamed when complete. What is read back is tensors, numbers and text:
nothing in a folder that was tampered with can run. Heavy imports happen where they are used.
"""

import hashlib
import json
import os
import pickle
import random
import re
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

import utils
from config import ConfigError

SUMS = "SHA256SUMS"


def folder_of(run_dir: Path, step: int) -> Path:
    return Path(run_dir) / "checkpoints" / f"step_{step}"


def steps_saved(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending. A half-written one still has its other name and is not seen."""
    folders = [path for path in Path(run_dir).glob("checkpoints/step_*") if path.is_dir()]
    return sorted(int(found[1]) for path in folders if (found := re.fullmatch(r"step_(\d+)", path.name)))


def last_step(run_dir: Path) -> int:
    """Step of the newest complete checkpoint."""
    if steps := steps_saved(run_dir):
        return steps[-1]
    raise ConfigError(
        f"--resume: no complete checkpoint in {run_dir}/checkpoints. Is it the right --output_dir and --run_name? "
        "--save_steps N makes one every N steps; without it there is only the last. A run that ended before its "
        "first starts anew without --resume."
    )


def remedy(path: Path) -> str:
    """What to do about a checkpoint that cannot be used."""
    others = [step for step in steps_saved(path.parent.parent) if f"step_{step}" != path.name]
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


def write_sums(folder: Path) -> None:
    """SHA256SUMS of all files in the folder; collective."""
    files = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    sums = shared_sums(folder, utils.gather_objects(files)[0])
    if utils.is_main():
        (folder / SUMS).write_text("".join(f"{value}  {name}\n" for name, value in sums.items()))


def check_sums(run_dir: Path, step: int) -> bool:
    """Whether the checkpoint has checksums, on every rank; ConfigError naming the files that do not match theirs.

    Collective. One made before there were checksums has none.
    """
    folder = folder_of(run_dir, step)
    text = (folder / SUMS).read_text(errors="replace") if utils.is_main() and (folder / SUMS).is_file() else None
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
    module with an optimizer what is trained; without one, all of it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

    state = {}
    for name, (module, optimizer) in modules.items():
        if optimizer is None:
            state[name] = {"model": get_model_state_dict(module)}
        else:
            options = StateDictOptions(ignore_frozen_params=True)
            state[name] = dict(
                zip(("model", "optimizer"), get_state_dict(module, optimizer, options=options), strict=True)
            )
    return state


def _rng_state() -> dict:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate()}


def save_checkpoint(
    run_dir: Path, step: int, modules: dict, hf_model, buckets, tokenizer, state: dict, memory: dict, keep: int
) -> Path:
    """Write checkpoints/step_N: modules["policy"] as a `from_pretrained` folder, and the state of all
    {name: (module, its optimizer or None)} in `trainer/`.

    All ranks call it; an error on one is raised on all. Written under another name and renamed when complete; then
    older ones beyond `keep` are removed, and what killed runs left half-written.
    buckets: lists of (name, full tensor) of the policy, an iterable that all ranks walk in step.
    state: plain JSON values that come back from `load_checkpoint`; memory: this rank's, see `check_memory`.
    """
    import torch.distributed.checkpoint as dcp

    final = folder_of(run_dir, step)
    # A name of its own: whatever a killed run left under another is in nobody's way.
    partial = final.with_name(utils.gather_objects(f"incomplete_step_{step}_{secrets.token_hex(4)}")[0])
    rank = dist.get_rank() if dist.is_initialized() else 0

    def clear() -> None:
        for half in final.parent.glob("incomplete_step_*"):
            shutil.rmtree(half, ignore_errors=True)

    def begin() -> None:
        clear()  # before anything is written: where the disk was full, its room is needed
        (partial / "trainer").mkdir(parents=True)

    def shards() -> None:
        torch.save(_rng_state(), partial / "trainer" / f"rng_{rank}.pt")
        if memory:
            torch.save(memory, partial / "trainer" / f"memory_{rank}.pt")

    def whole() -> None:
        save_pretrained(partial, hf_model, tokenizer, weights)
        (partial / "trainer" / "state.json").write_text(json.dumps(state | {"step": step}))

    def rename() -> None:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        for old in steps_saved(run_dir)[:-keep]:
            shutil.rmtree(folder_of(run_dir, old))

    try:
        _together(begin, main=True)
        dcp.save(_train_state(modules), checkpoint_id=partial / "trainer" / "state")
        _together(shards)
        weights = {}
        for bucket in buckets:
            weights.update((name, tensor.cpu()) for name, tensor in bucket)
        _together(whole, main=True)
        write_sums(partial)
        _together(rename, main=True)
    except (dcp.api.CheckpointException, RuntimeError, OSError, SafetensorError) as error:  # the first is no Exception
        if utils.is_main():
            clear()
        raise RuntimeError(
            f"The checkpoint {final} could not be written; those before it are as they were. "
            f"{room(final.parent)} {str(error)[-600:]}"
        ) from None
    return final


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


def save_pretrained(path: Path, hf_model, tokenizer, weights: dict[str, Tensor]) -> None:
    """Write gathered weights as an ordinary `from_pretrained` folder. ValueError for weights that are not finite."""
    from safetensors.torch import save_file

    weights = dict(utils.as_in_a_checkpoint(hf_model, list(weights.items())))
    if bad := [
        name
        for name, tensor in weights.items()
        if tensor.is_floating_point() and not torch.linalg.vector_norm(tensor.float()).isfinite()
    ]:
        raise ValueError(f"{len(bad)} of {len(weights)} tensors hold nan or infinity, first {bad[0]}")
    hf_model.config.save_pretrained(path)
    if hf_model.can_generate():
        hf_model.generation_config.save_pretrained(path)
    tokenizer.save_pretrained(path)
    save_file({k: v.contiguous() for k, v in weights.items()}, path / "model.safetensors", metadata={"format": "pt"})


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
    """How torch.distributed.checkpoint reads here: as it does by itself, but without unpickling what could run."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            with open(path / ".metadata", "rb") as file:
                metadata = _PlainUnpickler(file).load()
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item, value):  # numbers of the optimizer's groups
            torch.load(value, weights_only=True)  # raises where there is more in it than numbers and text
            value.seek(0)
            super().load_bytes(read_item, value)

    return {"storage_reader": Reader(path), "planner": Planner()}


def read_state(run_dir: Path, step: int) -> dict:
    """What `save_checkpoint` was given as `state`, and the step."""
    path = folder_of(run_dir, step) / "trainer" / "state.json"
    try:
        state = json.loads(path.read_text())
        if not isinstance(state, dict) or state.get("step") != step:
            raise ValueError(f"it is not the state of step {step}")
        return state
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--resume: {path} is damaged: {error}. {remedy(folder_of(run_dir, step))}") from None


def load_checkpoint(run_dir: Path, step: int, modules: dict, memory: dict, classes: list[type]) -> dict:
    """Put weights, optimizers, random state and memory back where `save_checkpoint` took them; returns its `state`.

    classes: what the memory may hold instances of.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_state_dict

    path, state = folder_of(run_dir, step), _train_state(modules)
    try:
        dcp.load(state, **_reader_and_planner(path / "trainer" / "state"))
    except (dcp.api.CheckpointException, RuntimeError, ValueError, OSError) as error:  # the first is no Exception
        raise ConfigError(
            f"--resume: {path} does not fit this run, or is damaged. It needs the model, --use_peft, --lora_r and "
            f"--lora_targets it was saved with. {remedy(path)} {str(error)[-600:]}"
        ) from None
    for name, (module, optimizer) in modules.items():
        weights = state[name]["model"]
        if optimizer is None:
            set_model_state_dict(module, weights)
        else:
            options = StateDictOptions(ignore_frozen_params=True, strict=False)
            moments = state[name]["optimizer"]
            set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
    rng_file = path / "trainer" / f"rng_{dist.get_rank() if dist.is_initialized() else 0}.pt"
    if rng_file.exists():  # absent when resumed on more ranks than it was saved from
        _set_rng_state(rng_file)
    memory_file = rng_file.with_name(rng_file.name.replace("rng", "memory"))
    if memory_file.exists():
        with torch.serialization.safe_globals(classes):
            memory.update(torch.load(memory_file, weights_only=True))
    return read_state(run_dir, step)


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


def push_to_hub(run_dir: Path, step: int, repo_id: str, private: bool) -> None:
    """Upload the `from_pretrained` part of a checkpoint."""
    from huggingface_hub import HfApi

    api, folder = HfApi(), folder_of(run_dir, step)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, ignore_patterns=["trainer/*", SUMS])
    except Exception as error:  # of several libraries
        raise RuntimeError(
            f"--push_to_hub: {folder} could not be uploaded ({type(error).__name__}: {error}). The run itself is "
            f"complete. Upload it by hand: hf upload {repo_id} {folder} . --exclude 'trainer/*' --exclude {SUMS}"
        ) from error
