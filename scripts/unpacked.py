"""What the 4 bits of `--load_in 4bit` stand for, as an ordinary model for the server.

    python scripts/unpacked.py MODEL FOLDER
    python vllm_server.py --model FOLDER --enable-lora
    python train_grpo.py --model_id MODEL --use_peft --load_in 4bit

The server then samples by the trainer's own base, rounded once more to 16 bits. Given MODEL itself it would sample by
another one: docs/serving.md has the measured difference.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from config import TrainConfig  # noqa: E402
from inputs.processor import load_processor  # noqa: E402
from saving.checkpoints import save_model  # noqa: E402
from train_grpo import load_hf_model  # noqa: E402


def main(model_id: str, folder: str) -> None:
    cfg = TrainConfig(model_id=model_id, use_peft=True, load_in="4bit", compute_dtype="float32")
    model = load_hf_model(cfg, torch.float32).dequantize(torch.float32).to(torch.bfloat16)
    save_model(Path(folder), model, load_processor(model_id))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
