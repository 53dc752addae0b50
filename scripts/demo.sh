#!/usr/bin/env bash
# The whole thing on a bare machine, in one command: install, a real small model, a vLLM server, 30 steps of GRPO with
# the new weights pushed to the server after each, accuracy on sums it never saw before and after, a report.
#
#   bash scripts/demo.sh                        10 to 15 minutes on two idle CPU cores, with installation
#   bash scripts/demo.sh --max_steps 10         flags go to the train script
#   bash scripts/demo.sh ppo                    the same with train_ppo.py: 64 prompts x 1 completion and a critic
#   bash scripts/demo.sh async                  the same with train_async.py: the server samples while the trainer updates
#
# It ends with eval/mean@4 of about .03 before and .7 or more after. Whatever happens, the server is gone afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."

script=train_grpo.py algorithm=(--lr_schedule linear)
if [ "${1:-}" = ppo ]; then
  script=train_ppo.py algorithm=(--prompts_per_step 64 --num_generations 1 --critic_learning_rate 3e-4 --critic_warmup 2)
  shift
elif [ "${1:-}" = async ]; then
  script=train_async.py
  shift
fi

bash scripts/install.sh
. .venv/bin/activate
model=models/SmolLM2-135M-Instruct
python scripts/make_models.py smollm2 "$model"

exec bash scripts/serve_and_train.sh "demo-$(date +%m%d-%H%M%S)" "$model" 512 "$script" \
  --dataset_id examples/sums.py:rows --reward_funcs last_number --max_prompt_length 128 --max_completion_length 12 \
  --prompts_per_step 8 --num_generations 8 --max_steps 30 --eval_steps 10 \
  --use_peft --lora_r 32 --lora_alpha 64 --learning_rate 3e-4 "${algorithm[@]}" "$@"
