"""What the sampler sees of the first updates of LoRA, whose weights it gets folded into bfloat16.

    python benchmarks/folding.py                      # 5 minutes on one busy core: learning rates 3e-4 and 2e-5

SmolLM2-135M with LoRA r 32 learns the answers to 24 sums, four updates of AdamW, in float32. After each: how much
likelier the answers have become (nats a token) for the trainer, and for the same model with folded weights rounded to
the nearest bfloat16, and as train_grpo.py rounds them. Results: benchmarks/results/folding.json.
"""

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import train_grpo as script  # noqa: E402
from config import TrainConfig  # noqa: E402
from examples.sums import rows  # noqa: E402

MODEL, SUMS, UPDATES = str(ROOT / "models" / "SmolLM2-135M-Instruct"), 24, 4


def examples() -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with their answers, padded on the right, and 1 on the answers.  [B, T], [B, T]"""
    tokenizer, sums = AutoTokenizer.from_pretrained(MODEL), rows("train", 42)
    made = []
    for row in random.Random(0).sample(sums, SUMS):
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, row["answer"])]
        made.append((ids[0] + ids[1], len(ids[1])))
    longest = max(len(ids) for ids, _ in made)
    ids, mask = torch.zeros(2, SUMS, longest, dtype=torch.long).unbind()
    for row, (tokens, answer) in enumerate(made):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, len(tokens) - answer : len(tokens)] = 1
    return ids, mask


def likelihood(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean log-prob of the tokens of the answers. Padding stands behind them and is never looked at."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return (logprobs * mask[:, 1:]).sum() / mask[:, 1:].sum()


def main() -> None:
    torch.set_num_threads(1)
    (ids, mask), results = examples(), []
    for rate in (3e-4, 2e-5):
        torch.manual_seed(0)
        cfg = TrainConfig(model_id=MODEL, use_peft=True, compute_dtype="float32", learning_rate=rate)
        policy, inner = script.load_policy(cfg, torch.device("cpu"))
        optimizer, sampler = script.make_optimizer(policy, cfg), script.load_hf_model(cfg, torch.float32)
        before = likelihood(inner.hf_model, ids, mask).item()
        for update in range(1, UPDATES + 1):
            optimizer.zero_grad()
            (-likelihood(inner.hf_model, ids, mask)).backward()
            optimizer.step()
            line = {"learning_rate": rate, "update": update}
            with torch.no_grad():
                line["trainer"] = likelihood(inner.hf_model, ids, mask).item() - before
                for how, dtype in (("nearest", torch.float32), ("dithered", torch.bfloat16)):
                    weights = [pair for bucket in script.weight_buckets(policy, 2**28, dtype) for pair in bucket]
                    sampler.load_state_dict({n: w.bfloat16().float() for n, w in weights}, strict=False)
                    line[how] = likelihood(sampler, ids, mask).item() - before
            results.append(line)
            print("  ".join(f"{name} {value:.4g}" for name, value in line.items()), flush=True)
    (ROOT / "benchmarks" / "results" / "folding.json").write_text(
        json.dumps(results, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
