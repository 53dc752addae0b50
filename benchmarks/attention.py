"""What sharing a prompt costs and saves: time, and memory of attention, for lengths of prompts and completions.

    python benchmarks/attention.py                        # a group of each size, forward and backward; two CPU cores
    python benchmarks/attention.py --cells 400,50,4       # one cell: prompt, completion, completions per prompt
    python benchmarks/attention.py --cpu_time             # one core, and the seconds that it worked for this process
    python benchmarks/attention.py --memory               # bytes kept for the backward pass at 4k, 8k and 16k tokens
    python benchmarks/attention.py --family mistral --window 128      # layers that see the last 128 tokens
    python benchmarks/attention.py --family qwen3_5_text --layers 4   # three layers of linear attention, one of full

Time: log-probs and gradient of one group, `--shared_prefix` against plain rows, in turn after one to warm up; the
shortest of three each (`--rounds`) and their ratio. All completions are of one length, so that plain rows are not
padded and compute their causal half alone: the best that they can do. The model is a small Llama; by arithmetic
attention is 4 % of its layers' work in rows of 100 tokens, 16 % at 450, 63 % at 4,000. Cells whose plain rows have more
than `--pairs` pairs are left out. Where other processes want the cores, too, wall-clock times tell little: sharing
makes many small parallel calls of few large ones, and each waits for the core that comes last. `--cpu_time` is for such
machines.
Memory: bytes of distinct tensors that autograd keeps in one attention layer, counted; and the largest of them.
"""

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import train_grpo as script  # noqa: E402
from config import TrainConfig  # noqa: E402
from inputs.attention import attend, attention_of, fall_back_to_eager  # noqa: E402
from inputs.processor import model_class  # noqa: E402
from rollouts import Trajectory  # noqa: E402

SHAPE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
# Where a family has them, as wide against the rest as in its published models: linear attention, state-space layers.
SHAPE |= dict(linear_num_value_heads=4, linear_num_key_heads=2, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=128)


def small_model(family: str, layers: int, window: int | None, cfg: TrainConfig, dtype: torch.dtype) -> torch.nn.Module:
    """Loaded as a run would: with the attention that `auto` takes."""
    torch.manual_seed(0)
    own = {"sliding_window": window} if window else {}
    ids = dict(vocab_size=1000, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = AutoConfig.for_model(family, num_hidden_layers=layers, **SHAPE, **ids, **own)
    with attention_of("auto", model_class(config)) as attention:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype)
    fall_back_to_eager(model, "auto")
    return model


def group_of(prompt: int, completion: int, count: int) -> script.Batch:
    """`count` completions of `completion` tokens behind one prompt of `prompt` tokens."""
    draw = torch.Generator().manual_seed(0)
    first = torch.randint(1000, (prompt,), generator=draw).tolist()
    rest = torch.randint(1000, (count, completion), generator=draw).tolist()
    ones = [1] * completion
    trajectories = [Trajectory({}, 0, first, ids, ones, [-1.0] * completion, [0.0] * completion) for ids in rest]
    return script.collate(trajectories, 0, torch.device("cpu"))


def seconds(policy, batch: script.Batch, cfg: TrainConfig, clock=time.perf_counter) -> float:
    policy.zero_grad()
    begin = clock()
    script.compute_logprobs(policy, batch, cfg)[0].sum().backward()
    return clock() - begin


def kept(length: int, completions: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that autograd keeps of one attention over `length` tokens: all of them, and of the largest tensor."""
    size = length // (completions + 1)
    table = torch.tensor([[[[n * size, (n + 1) * size, 0, size * (n > 0)] for n in range(completions + 1)]]])
    heads = (SHAPE["num_attention_heads"], *[SHAPE["num_key_value_heads"]] * 2)
    tensors = [torch.randn(1, n, size * (completions + 1), SHAPE["head_dim"], dtype=dtype) for n in heads]
    found: dict[int, int] = {}

    def note(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out, _ = attend(torch.nn.Module(), *[t.requires_grad_() for t in tensors], table)
    out.sum().backward()
    return sum(found.values()), max(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    cells = [",".join(map(str, cell)) for cell in product((50, 400, 2000), (50, 400, 2000), (4, 16))]
    parser.add_argument("--cells", nargs="+", default=cells, help="prompt,completion,completions per prompt")
    parser.add_argument("--pairs", type=float, default=2e7, help="of plain rows: larger cells are left out")
    parser.add_argument("--rounds", type=int, default=3, help="of both forms, after one to warm up")
    parser.add_argument("--cpu_time", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--family", default="llama", help="a model_type of transformers'")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--window", type=int, help="its sliding_window")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    if args.memory:
        print("tokens  kept MiB  largest MiB  a mask of bool MiB   (one layer, 8 completions as long as their prompt)")
        for length in (4096, 8192, 16384):
            total, largest = kept(length, 8, getattr(torch, args.dtype))
            print(f"{length:6}  {total / 2**20:8.1f}  {largest / 2**20:11.1f}  {length**2 / 2**20:8.0f}")
        return
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(1 if args.cpu_time else torch.get_num_threads())
    script.load_hf_model = partial(small_model, args.family, args.layers, args.window)
    cfg = TrainConfig(compute_dtype=args.dtype, beta=0.0)
    policy, inner = script.load_policy(cfg, torch.device("cpu"))
    if reason := script.why_not_shared(inner.hf_model, cfg):
        raise SystemExit(f"{args.family}: not shared, {reason}")
    print("prompt completion   G   plain s  shared s  ratio  ratio of pairs, of tokens")
    for p, c, count in ([int(n) for n in cell.split(",")] for cell in args.cells):
        plain_pairs, shared_pairs = count * (p + c) ** 2 / 2, p**2 / 2 + count * c * (p + c / 2)
        if plain_pairs > args.pairs:
            print(f"{p:6} {c:10} {count:3}   left out: {plain_pairs / 1e6:.0f} million pairs")
            continue
        batch, times = group_of(p, c, count), {False: [], True: []}
        for _ in range(1 + args.rounds):
            for shared in times:
                times[shared].append(seconds(policy, batch, replace(cfg, shared_prefix=shared), clock))
        plain, shared = (min(times[key][1:]) for key in (False, True))
        tokens = (p + count * c) / (count * (p + c))
        figures = f"{plain:8.2f}  {shared:8.2f}  {shared / plain:5.2f}  {shared_pairs / plain_pairs:5.2f} {tokens:5.2f}"
        print(f"{p:6} {c:10} {count:3}  {figures}", flush=True)


if __name__ == "__main__":
    main()
