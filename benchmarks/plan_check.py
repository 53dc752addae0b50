"""Are the bytes of plan.py those of larger models? Real updates and pushes of random ones, on CPU, 2 ranks.

    python benchmarks/plan_check.py [NAME ...]         a table in Markdown, error of each prediction

What is measured: tests/memory_worker.py. Needs about 8 GiB and some minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

sys.path.insert(0, str(ROOT / "tests"))
from memory_worker import predicted  # noqa: E402

from config import TrainConfig, load_config  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

SHAPES = {  # hidden, feed-forward, layers, heads, key heads, vocabulary, tied
    "34 M": ("llama", 512, 1536, 8, 8, 4, 16384, True),
    "SmolLM2-135M": ("llama", 576, 1536, 30, 9, 3, 49152, True),
    "Qwen2.5-0.5B, 4 of 24 layers, 32k words": ("qwen2", 896, 4864, 4, 14, 2, 32000, True),
    "Llama-3.2-1B, 2 of 16 layers, 16k words": ("llama", 2048, 8192, 2, 32, 8, 16000, False),
}
NAMES = "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size "
NAMES += "tie_word_embeddings"
WORDS = dict(use_peft="LoRA", gradient_checkpointing="checkpointing", dtype="bfloat16", offload="offload")
FLAGS = "--prompts_per_step 4 --num_generations 4 --max_prompt_length 100 --max_completion_length 100 "
FLAGS += "--tokens_per_microbatch 512 --push_bucket_mb 64"


def main(names: list[str]) -> None:
    print("| model | strategy | settings | predicted MiB | measured MiB | kept | update | push |\n|" + "---|" * 8)
    for name, strategy in product(names or SHAPES, ("ddp", "fsdp", "fsdp2")):
        with tempfile.TemporaryDirectory() as folder:
            shape = dict(zip(NAMES.split(), SHAPES[name], strict=True))
            Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
            words = ["--model_id", folder, "--strategy", strategy, *FLAGS.split()]
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
            command = [*launch, "tests/memory_worker.py", f"{folder}/out.json", *words]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            how = dict(check=True, capture_output=True, timeout=900, preexec_fn=ends_with_us())
            subprocess.run(command, cwd=ROOT, env=environment, **how)
            for more, critic, measured in json.loads(Path(folder, "out.json").read_text(encoding="utf-8")):
                expected = predicted(replace(load_config(TrainConfig, words), **more), 2, critic)
                errors = " | ".join(f"{size / measured[what] - 1:+.1%}" for what, size in expected.items())
                settings = [WORDS[key] for key, value in more.items() if value] + ["critic"] * critic
                sizes = f"{expected['update'] / 2**20:.0f} | {measured['update'] / 2**20:.0f}"
                print(f"| {name} | {strategy} | {', '.join(settings)} | {sizes} | {errors} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
