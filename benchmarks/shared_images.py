"""What it saves to compute a prompt with its images once per group, not once per completion. No server, no data.

    python benchmarks/shared_images.py              # Qwen2.5-VL's shape, 23 million weights; 2 minutes on two CPU cores

Log-probs and the gradient of one step, the image encoder trained: `--shared_prefix` against plain rows, in turn, three
times each after one to warm up; the medians and their ratio. Both are the same numbers (tests/test_vision.py).
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import tiny_vlms  # noqa: E402

import train_grpo as script  # noqa: E402
from config import TrainConfig  # noqa: E402
from inputs import prompts  # noqa: E402
from inputs.processor import load_processor  # noqa: E402
from rollouts import Trajectory  # noqa: E402

TEXT = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=2)
VISION = dict(hidden_size=256, intermediate_size=768, depth=8, num_heads=4, out_hidden_size=384, window_size=112)


def make_model(folder: Path) -> None:
    processor = tiny_vlms.processor_of("qwen2_5_vl")
    processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 1024 * 1024}  # pixels
    config = tiny_vlms.config_of("qwen2_5_vl", processor)
    rope = config["text_config"]["rope_parameters"] | {"mrope_section": [8, 12, 12]}
    text = config["text_config"] | TEXT | {"head_dim": 64, "rope_parameters": rope}
    vision = config["vision_config"] | VISION | {"fullatt_block_indexes": [3, 7]}
    config = AutoConfig.for_model("qwen2_5_vl", **config | {"text_config": text, "vision_config": vision})
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} million weights")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def make_batch(cfg: TrainConfig, generator, args) -> script.Batch:
    """`args.prompts` prompts with a picture, each answered `args.generations` times with `args.tokens` tokens."""
    draw, trajectories = torch.Generator().manual_seed(0), []
    for group in range(args.prompts):
        row = {"prompt": "What does the picture show?", "image": tiny_vlms.picture(group, args.side, args.side)}
        prompt = prompts.build_prompt(row, generator, cfg)
        for member in range(args.generations):
            ids, n = torch.randint(300, 4000, (args.tokens,), generator=draw).tolist(), args.tokens
            rewards, info = [0.0] * (n - 1) + [float(member)], {"model_inputs": prompt.model_inputs}
            trajectories.append(Trajectory(row, group, prompt.token_ids, ids, [1] * n, [-1.0] * n, rewards, info=info))
    print(f"{args.prompts} prompts of {len(prompt.token_ids)} tokens x {args.generations} x {args.tokens} tokens")
    batch = script.collate(trajectories, 0, torch.device("cpu"))
    batch.advantages = script.dr_grpo(batch, cfg)
    return batch


def measure(policy, batch: script.Batch, cfg: TrainConfig) -> tuple[float, float]:
    """Seconds for the log-probs and for the gradient."""
    policy.zero_grad()
    begin = time.perf_counter()
    script.all_logprobs(policy, batch, cfg)
    middle = time.perf_counter()
    script.accumulate_gradients(policy, replace(batch), cfg)
    return middle - begin, time.perf_counter() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="a completion")
    parser.add_argument("--side", type=int, default=224, help="pixels of a picture, of either side")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        cfg = TrainConfig(model_id=folder, compute_dtype="float32", beta=0.0, num_generations=args.generations)
        policy, inner = script.load_policy(cfg, torch.device("cpu"))
        rope_index = prompts.rope_index_of(inner.hf_model)
        generator = SimpleNamespace(tokenizer=load_processor(folder), rope_index=rope_index)
        batch = make_batch(cfg, generator, args)
        seconds = {True: [], False: []}
        for _ in range(4):
            for shared in seconds:
                seconds[shared].append(measure(policy, batch, replace(cfg, shared_prefix=shared)))
    for number, name in enumerate(("log-probs", "gradient")):
        once, each = (statistics.median(pair[number] for pair in seconds[shared][1:]) for shared in (True, False))
        print(f"{name}: once per group {once:.2f} s, once per completion {each:.2f} s, x {once / each:.2f}")


if __name__ == "__main__":
    main()
