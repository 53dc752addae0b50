#!/usr/bin/env bash
# Reinforcement learning of a model that sees, in one command: install, a tiny warm-started vision-language model, then
# for each seed and task - counting.py and grounding.py - a vLLM server, GRPO with a push after every step, a report
# with pictures. At the end a table, and grounding on descriptions of another kind than those it was trained on.
#
#   bash examples/run_counting.sh                          about an hour on two idle CPU cores, with installation
#   SEEDS=0 bash examples/run_counting.sh --max_steps 20   one seed; flags go to the train script
set -euo pipefail
cd "$(dirname "$0")/.."
seeds=${SEEDS:-0 1 2}

bash scripts/install.sh
. .venv/bin/activate
model=models/tiny-vlm
python scripts/make_tiny_vlm.py "$model"

begin=$(date +%m%d-%H%M%S) runs=()
for seed in $seeds; do
  # A box counts as solved from an IoU of .5 on: a score of .5 * .5^2 + .5.
  for task in "counting:count 1" "grounding:grounding 0.625"; do
    solved=${task#* } task=${task% *}
    file=examples/${task%:*}.py name=${task%:*}-$begin-seed$seed
    bash scripts/serve_and_train.sh "$name" "$model" 128 train_grpo.py \
      --dataset_id "$file:rows" --reward_funcs "$file:${task#*:}" --seed "$seed" \
      --max_prompt_length 96 --max_completion_length 16 --prompts_per_step 64 --num_generations 16 \
      --learning_rate 3e-4 --lr_schedule linear --max_steps 60 --eval_steps 20 --eval_solved "$solved" --compute_dtype float32 "$@"
    runs+=("runs/$name")
  done
done

for folder in "$model" runs/grounding-"$begin"-seed*/checkpoints/step_*; do # described otherwise: "the largest shape"
  python train_grpo.py --eval_only --generator hf --model_id "$folder" --compute_dtype float32 \
    --dataset_id examples/grounding.py:rows --eval_split test_reasoning \
    --reward_funcs examples/grounding.py:grounding --max_prompt_length 96 --max_completion_length 16 |
    sed -n "s|^evaluation after step 0|$folder, test_reasoning|p"
done
python - "${runs[@]}" <<'PY'
import sys
from runlog.reading import read_metrics

print("\nheld-out rows before -> after")
for folder in sys.argv[1:]:
    evals = [line for line in read_metrics(folder) if "eval/reward" in line]
    key = "eval/rewards/grounding/iou/mean" if "grounding" in folder else "eval/mean@4"
    before, after = evals[0][key], evals[-1][key]
    print(f"  {folder}: {key.split('/', 1)[1]} {before:.3f} -> {after:.3f} ({after - before:+.3f})")
PY
