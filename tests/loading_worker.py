"""Loads a model, trains adapters and saves under each sharding, on two ranks. Run by test_loading.py.

usage: loading_worker.py MODEL_FOLDER OUT.json
"""

import ctypes
import json
import os
import sys
import time
import zlib
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from push_worker import peak_memory, reset_peak  # noqa: E402

import train_grpo as script  # noqa: E402
import utils  # noqa: E402
from config import TrainConfig  # noqa: E402
from runlog import checkpoints  # noqa: E402

CPU = torch.device("cpu")


def config(folder: str, strategy: str, **settings) -> TrainConfig:
    return TrainConfig(model_id=folder, strategy=strategy, **dict(compute_dtype="float32") | settings)


def loaded(folder: str, strategy: str, expected: dict) -> dict:
    """MiB by which loading raises the peak, and what differs from what was saved."""
    reset_peak()
    before = peak_memory()
    policy, inner = script.load_policy(config(folder, strategy), CPU)
    grown = peak_memory() - before
    model = inner.hf_model
    # FSDP1 has one view of a tied weight, and its other place has none until it runs.
    tied = strategy == "fsdp" or model.get_output_embeddings().weight is model.get_input_embeddings().weight
    got = {name.replace("_fsdp_wrapped_module.", ""): tensor for name, tensor in model.named_buffers()}
    for bucket in script.weight_buckets(policy, 2**20, torch.float32):
        got |= {name: tensor.clone() for name, tensor in bucket}
    return dict(grown=grown, tied=tied, wrong=[n for n, t in expected.items() if not torch.equal(got[n], t)])


def reduced(folder: str, strategy: str, dtype: str) -> dict:
    """Elements of gradients that a rank keeps, and that it takes part in reducing, for one backward pass of LoRA."""
    cfg = config(folder, strategy, use_peft=True, lora_r=4, dtype=dtype, compute_dtype="bfloat16")
    policy, inner = script.load_policy(cfg, CPU)
    trained = {n: p for n, p in inner.named_parameters() if p.requires_grad}
    kinds = {str(p.dtype) for n, p in trained.items()}, {str(p.dtype) for p in inner.parameters() if p.numel()}
    counted, original = [], torch.distributed.reduce_scatter_single

    def counting(*args, **kwargs):
        counted.append([*args, *kwargs.values()][1].numel())  # output, input
        return original(*args, **kwargs)

    torch.distributed.reduce_scatter_single = counting
    ids = torch.arange(8)[None]
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=ids)
    policy(inputs, torch.zeros(7, dtype=torch.long), torch.arange(7), ids[0, 1:])[0].sum().backward()
    torch.distributed.reduce_scatter_single = original
    local = [getattr(p.grad, "_local_tensor", p.grad) for p in policy.parameters() if p.grad is not None]
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() // g.itemsize for g in local}
    return dict(kept=sum(storages.values()), reduced=sum(counted), adapters=sorted(kinds[0]), all=sorted(kinds[1]))


def folded(folder: str, strategy: str, expected: dict) -> dict:
    """Weights in bfloat16 with adapters that add the same 6e-6 everywhere, a tenth of what rounding to the nearest
    keeps: their checksum, and the mean of what was added to the layers, by what should be."""
    policy, _ = script.load_policy(config(folder, strategy, use_peft=True), CPU)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            getattr(parameter.data, "_local_tensor", parameter.data).fill_(3e-4)
    got = {}
    for bucket in script.weight_buckets(policy, 2**20, torch.bfloat16):
        got |= {name: tensor.to(torch.bfloat16) for name, tensor in bucket}
    sums = {name: zlib.crc32(tensor.contiguous().view(torch.uint8).numpy()) for name, tensor in sorted(got.items())}
    added = [(got[name].float() - expected[name]).mean() for name in got if "proj" in name]
    return dict(sums=sums, added=float(sum(added) / len(added) / (64 * 3e-4**2)))


def saved(folder: str, out: Path) -> dict:
    """A checkpoint of a sharded policy in several files; rank 1 has a slow disk."""
    cfg = config(folder, "fsdp2")
    policy, inner = script.load_policy(cfg, CPU)
    checkpoints.FILE, checkpoints.CHUNK, fsync = 2**22, 2**24, os.fsync
    os.fsync = lambda file: time.sleep(0.0 if utils.is_main() else 0.3)
    saver = checkpoints.Saver(out, 2)
    buckets = script.weight_buckets(policy, 2**22, torch.bfloat16)
    reset_peak()
    before = peak_memory()
    modules = {"policy": (policy, None)}
    saver.save(1, modules, inner.hf_model, buckets, script_tokenizer(), {"a": 1}, {})
    grown, asked, waits = peak_memory() - before, 0, []
    with torch.no_grad():
        for parameter in policy.parameters():  # training goes on
            parameter.zero_()
    seen = checkpoints.steps_saved(out)
    while True:
        start = time.monotonic()
        done = saver.poll()
        waits.append(time.monotonic() - start)
        if done:
            break
        asked += 1
        time.sleep(0.05)
    os.fsync = fsync
    buckets = script.weight_buckets(policy, 2**22, torch.bfloat16)
    saver.save(2, modules, inner.hf_model, buckets, script_tokenizer(), {}, {})
    deadline = time.monotonic() + 30
    while checkpoints.steps_saved(out) != [1, 2] and time.monotonic() < deadline:
        time.sleep(0.05)
    unasked = checkpoints.steps_saved(out)
    saver.wait()
    memory: dict = {}
    state = checkpoints.load_checkpoint(out, 1, modules, memory, [])
    intact = all(checkpoints.check_sums(out, step) for step in (1, 2))
    return dict(grown=grown, asked=asked, longest=max(waits), seen=seen, unasked=unasked, intact=intact) | state


def script_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained("models/tiny")


def main(folder: str, out: str) -> None:
    utils.init_distributed(60)
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD, bytes: what is freed goes back at once, so a peak is one
    model = script.load_hf_model(config(folder, "ddp"), torch.float32)
    expected = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    del model
    script.load_policy(config(folder, "ddp"), CPU)  # imports, and what torch keeps
    result = {strategy: loaded(folder, strategy, expected) for strategy in ("ddp", "fsdp", "fsdp2")}
    for dtype in ("float32", "bfloat16"):
        result |= {f"lora {strategy} {dtype}": reduced(folder, strategy, dtype) for strategy in ("fsdp", "fsdp2")}
    result["folded"] = {strategy: folded(folder, strategy, expected) for strategy in ("ddp", "fsdp", "fsdp2")}
    result["saved"] = saved(folder, Path(out).parent / "run")
    results = utils.gather_objects(result)
    if utils.is_main():
        Path(out).write_text(json.dumps(results), encoding="utf-8")
    utils.end_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
