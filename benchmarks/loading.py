"""What loading a policy costs: resident memory of each rank, and bytes a parameter once it trains.

usage: python benchmarks/loading.py [--millions 200] [--ranks 4] [--cases ddp fsdp fsdp2 ...]

A random Llama in bfloat16, as published ones are, loaded with `--dtype float32` (the default) but for cases that say
otherwise. Processes with gloo on a CPU: where a GPU would hold shards, here it is the same memory as what is read from
disk. Columns:

    load    highest resident memory (VmHWM) while load_policy runs, less that of the rank before it
    loaded  resident memory after it, less that of before
    step    and after an optimizer step, which has one short row (its activations do not count)
    weights, gradients, AdamW    bytes of the tensors' storages after an optimizer step, a parameter of the model
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from safety.orphans import ends_with_us  # noqa: E402

CASES = "ddp fsdp fsdp2 ddp+lora fsdp+lora fsdp2+lora fsdp2+lora+bfloat16".split()


def make_model(folder: Path, millions: float) -> int:
    """A random Llama of about so many parameters with untied embeddings, as safetensors; their number."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    layers = max(round((millions - 16.4) / 12.6), 1)  # 16.4 M are embeddings and output layer
    shape = dict(hidden_size=1024, intermediate_size=2730, num_attention_heads=16, num_key_value_heads=16)
    config = LlamaConfig(vocab_size=8000, num_hidden_layers=layers, tie_word_embeddings=False, **shape)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def status(field: str) -> float:
    """MiB of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def storage_bytes(tensors) -> int:
    """Bytes of the storages below these tensors, each once."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors if t is not None]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def worker(folder: str, tiny: str, case: str) -> None:
    """One rank: prints a JSON line."""
    import torch

    import train_grpo as script
    import utils
    from config import TrainConfig

    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD, bytes: what is freed goes back at once
    rank, _, device = utils.init_distributed(120)
    strategy, *options = case.split("+")
    options = dict(use_peft="lora" in options, dtype="bfloat16" if "bfloat16" in options else "float32")

    def trained(model_id: str):
        cfg = TrainConfig(model_id=model_id, strategy=strategy, compute_dtype="bfloat16", max_steps=1, **options)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM starts again
        policy, _ = script.load_policy(cfg, device)
        load, loaded = status("VmHWM") - before, status("VmRSS") - before
        optimizer = script.make_optimizer(policy, cfg)
        ids = torch.arange(8, device=device)[None]
        inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=ids)
        logprobs, _, _ = policy(inputs, torch.zeros(7, dtype=torch.long), torch.arange(7), ids[0, 1:])
        logprobs.sum().backward()
        parts = {"weights": storage_bytes(weights(policy))}
        parts["gradients"] = storage_bytes(p.grad for p in policy.parameters())
        optimizer.step()
        moments = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
        parts["AdamW"] = storage_bytes(moments)
        return dict(load=load, loaded=loaded, step=status("VmRSS") - before, **parts)

    trained(tiny)  # what torch, transformers and PEFT import and keep when first used belongs to an empty rank
    result = trained(folder)
    results = utils.gather_objects(result)
    if rank == 0:
        print(json.dumps(results), flush=True)
    utils.end_process(0)


def weights(policy):
    """Parameters, buffers and FSDP1's flat parameters (whose views the others are)."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    flat = [unit._flat_param for unit in policy.modules() if isinstance(unit, FSDP) and unit._flat_param is not None]
    return [*(flat or policy.parameters()), *policy.buffers()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cases", nargs="+", default=CASES)
    args = parser.parse_args()
    from server_fixture import free_port

    with tempfile.TemporaryDirectory() as folder:
        number = make_model(Path(folder) / "model", args.millions)
        make_model(Path(folder) / "tiny", 30)
        mib = number * 4 / 2**20
        print(f"{number / 1e6:.0f} M parameters, {mib:.0f} MiB in float32; {args.ranks} ranks\n")
        print("| case | load, rank 0 | others | loaded, rank 0 | others | step | weights | gradients | AdamW |")
        print("|---|---|---|---|---|---|---|---|---|")
        for case in args.cases:
            command = [sys.executable, __file__, "worker", f"{folder}/model", f"{folder}/tiny", case]
            env = os.environ | {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_PORT": str(free_port()), "LOCAL_WORLD_SIZE": str(args.ranks)}
            places = [env | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(args.ranks)]
            how = dict(stdout=subprocess.PIPE, text=True, preexec_fn=ends_with_us(), encoding="utf-8")
            ranks = [subprocess.Popen(command, env=place, **how) for place in places]
            output = [rank.communicate(timeout=300)[0] for rank in ranks]
            found = json.loads(output[0].splitlines()[-1])
            first, others = found[0], {key: max(rank[key] for rank in found[1:] or found) for key in found[0]}
            memory = [f"{part[key]:.0f} MiB" for key in ("load", "loaded") for part in (first, others)]
            memory.append(f"{first['step']:.0f} MiB")
            shares = [f"{first[key] / number:.2f}" for key in ("weights", "gradients", "AdamW")]
            print(f"| {case} | {' | '.join(memory + shares)} |", flush=True)


if __name__ == "__main__":
    worker(*sys.argv[2:]) if sys.argv[1:2] == ["worker"] else main()
