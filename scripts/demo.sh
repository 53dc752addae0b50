#!/usr/bin/env bash
# The whole thing on a bare machine, in one command: install, a real small model, a vLLM server, 30 steps of GRPO with
# the new weights pushed to the server after each, accuracy on sums it never saw before and after, a report.
#
#   bash scripts/demo.sh                        about 10 minutes on two idle CPU cores, with installation; 20 on slow ones
#   bash scripts/demo.sh --max_steps 10         flags go to the train script; its settings: examples/sums.yaml
#   bash scripts/demo.sh ppo                    the same with train_ppo.py: 64 prompts x 1 completion and a critic
#   bash scripts/demo.sh async                  the same with train_async.py: the server samples while the trainer updates
#
# It ends with eval/mean@4 of about .03 before and .65 to .8 after. Whatever happens, the server is gone afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."

script=train_grpo.py algorithm=()
if [ "${1:-}" = ppo ]; then
  script=train_ppo.py algorithm=(--prompts_per_step 64 --num_generations 1 --critic_learning_rate 3e-4 --critic_warmup 2)
  algorithm+=(--lr_schedule constant)
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
  --config examples/sums.yaml "${algorithm[@]}" "$@"
