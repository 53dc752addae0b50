"""Are the bytes of plan.py those of larger models? Real updates and pushes of three random ones, on CPU, 2 ranks.

    python benchmarks/plan_check.py            a table in Markdown, error of each prediction

What is measured: tests/memory_worker.py. Needs about 8 GiB and a few minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import memory  # noqa: E402
from config import TrainConfig, load_config  # noqa: E402
from train_grpo import empty_policy  # noqa: E402

SHAPES = {  # hidden, feed-forward, layers, heads, key heads, vocabulary, tied
    "SmolLM2-135M": ("llama", 576, 1536, 30, 9, 3, 49152, True),
    "Qwen2.5-0.5B, 4 of 24 layers, 32k words": ("qwen2", 896, 4864, 4, 14, 2, 32000, True),
    "Llama-3.2-1B, 2 of 16 layers, 16k words": ("llama", 2048, 8192, 2, 32, 8, 16000, False),
}
NAMES = "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size "
NAMES += "tie_word_embeddings"
FLAGS = "--prompts_per_step 4 --num_generations 4 --max_prompt_length 100 --max_completion_length 100 "
FLAGS += "--tokens_per_microbatch 512 --push_bucket_mb 64"


def main() -> None:
    print("| model | strategy | LoRA | checkpointing | predicted MiB | measured MiB | error | push |\n|" + "---|" * 8)
    for name, values in SHAPES.items():
        for strategy in ("ddp", "fsdp", "fsdp2"):
            with tempfile.TemporaryDirectory() as folder:
                shape = dict(zip(NAMES.split(), values, strict=True))
                Path(folder, "config.json").write_text(json.dumps(shape))
                words = ["--model_id", folder, "--strategy", strategy, *FLAGS.split()]
                launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
                command = [*launch, "tests/memory_worker.py", f"{folder}/out.json", *words]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=900)
                for use_peft, checkpointing, measured in json.loads(Path(folder, "out.json").read_text()):
                    cfg = replace(
                        load_config(TrainConfig, words), use_peft=use_peft, gradient_checkpointing=checkpointing
                    )
                    need = memory.rank_bytes(empty_policy, cfg, 2)
                    update, push = memory.update_peak(need), memory.kept(need) + need["push"]
                    print(
                        f"| {name} | {strategy} | {'yes' * use_peft} | {'yes' * checkpointing} | {update / 2**20:.0f} "
                        f"| {measured['update'] / 2**20:.0f} | {update / measured['update'] - 1:+.1%} "
                        f"| {push / measured['push'] - 1:+.1%} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
