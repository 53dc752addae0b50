#!/usr/bin/env bash
# Learning with tools and environments, one command a task: install, the model, a short supervised warm start on the
# example's careless demonstrations, then for each seed a vLLM server and GRPO with a push after every step.
#
#   bash examples/run_turns.sh arithmetic     sums and products of three-digit numbers, with a calculator
#   bash examples/run_turns.sh search         an invented country, with a search engine behind a real MCP server; at the
#                                             end once more with the observation mask off, to show what it is for
#   bash examples/run_turns.sh frozenlake     a game of several moves; at the end once more on slippery ice
#   bash examples/run_turns.sh sokoban        another, in which a wrong move may be final
#   bash examples/run_turns.sh coding         small python functions judged by tests, without a warm start
#   bash examples/run_turns.sh visual_crop    counting in pictures, of which the model may look at a part more closely
#   SEEDS=0 bash examples/run_turns.sh search --max_steps 5      one seed; flags go to the train script
set -euo pipefail
cd "$(dirname "$0")/.."
task=${1:-} seeds=${SEEDS:-0 1 2}
[ $# = 0 ] || shift

smollm2=models/SmolLM2-135M-Instruct rewards=() warm=() train=() alone=() steps=0
case $task in
  arithmetic)
    model=smollm2 folder=$smollm2 shown=eval/mean@2
    common=(--dataset_id examples/arithmetic.py:rows --tools calculator --max_prompt_length 256 --max_turns 3)
    common+=(--max_turn_length 48 --max_completion_length 192)
    rewards=(--reward_funcs examples/arithmetic.py:right)
    alone=(--dataset_id examples/arithmetic.py:rows --max_prompt_length 256 --max_completion_length 64)
    warm=(--demonstrations examples/arithmetic.py:demonstrate --prompts_per_step 16)
    steps=30
    train=(--use_peft --learning_rate 3e-4 --prompts_per_step 4 --num_generations 8 --max_steps 10 --eval_generations 2)
    ;;
  search)
    model=smollm2 folder=$smollm2 shown=eval/mean@1
    common=(--dataset_id examples/search.py:rows --mcp_config examples/search.json --tool_parser tags)
    common+=(--max_prompt_length 256 --max_turns 4 --max_turn_length 24 --max_completion_length 288)
    rewards=(--reward_funcs squad_em)
    alone=(--dataset_id examples/search.py:rows --max_prompt_length 256 --max_completion_length 64)
    warm=(--demonstrations examples/search.py:demonstrate --prompts_per_step 16)
    steps=50
    train=(--use_peft --learning_rate 1.5e-4 --lr_schedule linear --prompts_per_step 12 --num_generations 4)
    train+=(--loss_agg token_mean --max_steps 15 --eval_generations 1) # seq_mean: a second look-up counts for less
    ;;
  frozenlake | sokoban)
    model=tiny folder=models/tiny shown=eval/rewards/environment/success/mean
    game="frozenlake?compass=true"
    [ "$task" = frozenlake ] || game="sokoban?size=5&walls=0&pulls=3&compass=true"
    common=(--dataset_id examples/games.py:rows --env "$game" --max_turns 8 --max_turn_length 24)
    common+=(--max_prompt_length 256 --max_completion_length 768 --compute_dtype float32)
    warm=(--demonstrations examples/games.py:demonstrate --prompts_per_step 64 --learning_rate 2e-3)
    steps=200
    train=(--learning_rate 5e-4 --prompts_per_step 8 --num_generations 16 --max_steps 30 --eval_generations 4)
    ;;
  coding)
    model=smollm2 folder=$smollm2 shown=eval/mean@4
    common=(--dataset_id examples/coding.py:rows --max_prompt_length 128 --max_completion_length 96)
    rewards=(--reward_funcs code_tests)
    train=(--use_peft --learning_rate 3e-4 --prompts_per_step 8 --num_generations 8 --max_steps 15 --eval_generations 4)
    ;;
  visual_crop)
    folder=models/tiny-vlm shown=eval/mean@4
    common=(--dataset_id examples/counting.py:rows --env examples/visual_crop.py:Crop --max_turns 3)
    common+=(--max_turn_length 24 --max_prompt_length 128 --max_completion_length 192 --compute_dtype float32)
    warm=(--demonstrations examples/counting.py:look_closer --prompts_per_step 64 --learning_rate 5e-4)
    steps=150
    train=(--learning_rate 3e-4 --prompts_per_step 32 --num_generations 16 --max_steps 30 --eval_generations 4)
    ;;
  *)
    sed -n '2,12p' "$0" >&2
    exit 2
    ;;
esac

bash scripts/install.sh
. .venv/bin/activate
if [ "$task" = visual_crop ]; then # ten minutes
  python scripts/make_tiny_vlm.py "$folder"
else
  python scripts/make_models.py "$model" "$folder"
fi
start=$folder
[ ${#warm[@]} = 0 ] || start=runs/warm-$task/checkpoints/step_$steps
if [ ! -d "$start" ]; then
  rm -rf "runs/warm-$task"
  python scripts/warm_start.py --run_name "warm-$task" --model_id "$folder" --max_steps $steps --num_generations 1 \
    --tokens_per_microbatch 4096 "${common[@]}" "${warm[@]}"
fi
if [ ${#alone[@]} != 0 ]; then # the model as it was, by itself
  python train_grpo.py --eval_only --generator hf --model_id "$folder" "${alone[@]}" "${rewards[@]}" --eval_generations 2 |
    sed -n 's|^evaluation after step 0|without warm start and tool|p'
fi

begin=$(date +%m%d-%H%M%S) runs=()
learn() { # name, script, flags
  bash scripts/serve_and_train.sh "$1" "$start" 1024 "$2" "${common[@]}" "${rewards[@]}" "${train[@]}" \
    --tokens_per_microbatch 4096 --eval_steps 1000 "${@:3}" # evaluated before and after
  runs+=("runs/$1")
}
for seed in $seeds; do
  learn "$task-$begin-seed$seed" train_grpo.py --seed "$seed" "$@"
done
if [ "$task" = search ]; then
  learn "search-$begin-unmasked" benchmarks/unmasked.py --seed 0 --correction none --logprob_diff_limit 99 "$@"
elif [ "$task" = frozenlake ]; then
  learn "frozenlake-$begin-slippery" train_grpo.py --seed 0 "$@" --env "$game&slippery=true"
fi

python - "$shown" "${runs[@]}" <<'PY'
import sys
from runlog.reading import read_metrics

print("\nheld-out rows, before -> after")
for folder in sys.argv[2:]:
    evals = [line for line in read_metrics(folder) if "eval/reward" in line]
    keys = [sys.argv[1], *(key for key in evals[0] if key.endswith(("/valid/mean", "/effective/mean", "/looked/mean")))]
    for key in keys:
        print(f"  {folder}: {key} " + " -> ".join(f"{line[key]:.3f}" for line in evals))
PY
