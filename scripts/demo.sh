#!/usr/bin/env bash
# The whole thing on a bare machine, in one command: install, a real small model, a vLLM server, 30 steps of GRPO with
# the new weights pushed to the server after each, accuracy on sums it never saw before and after, a report.
#
#   bash scripts/demo.sh                        10 to 15 minutes on two idle CPU cores, with installation
#   bash scripts/demo.sh --max_steps 10         flags go to the train script
#   bash scripts/demo.sh ppo                    the same with train_ppo.py: 64 prompts x 1 completion and a critic
#
# It ends with eval/mean@4 of about .03 before and .7 or more after. Whatever happens, the server is gone afterwards.
set -euo pipefail
cd "$(dirname "$0")/.."

script=train_grpo.py algorithm=()
if [ "${1:-}" = ppo ]; then
  script=train_ppo.py algorithm=(--prompts_per_step 64 --num_generations 1 --critic_learning_rate 3e-4 --critic_warmup 2)
  shift
fi

bash scripts/install.sh
. .venv/bin/activate
model=models/SmolLM2-135M-Instruct
python scripts/make_models.py smollm2 "$model"

export VLLM_SERVER_TOKEN="$(python -c 'import secrets; print(secrets.token_hex(16))')"
port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
name="demo-$(date +%m%d-%H%M%S)"
server="" trainer=""

stop() { # signal $2, ten seconds of patience, KILL; for the process $1 and whatever it started
  [ -n "$1" ] || return 0
  kill "-$2" -- "-$1" 2>/dev/null || return 0
  for _ in $(seq 100); do kill -0 -- "-$1" 2>/dev/null || return 0; sleep 0.1; done
  kill -KILL -- "-$1" 2>/dev/null || true
}
finish() {
  status=$?
  trap - EXIT INT TERM HUP
  stop "$trainer" INT # as Ctrl-C: it still writes its report
  stop "$server" TERM
  [ "$status" -lt 128 ] || echo "demo: interrupted; trainer and server are stopped, what there is lies in runs/$name" >&2
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT # a shell that starts this in its background ignores INT: send TERM
trap 'exit 143' TERM HUP

shared_gpu=()
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then shared_gpu=(--gpu-memory-utilization 0.3); fi

mkdir -p runs
set -m # each background job is a process group of its own, so that stop() reaches its children, too
echo "demo: starting the server, log in runs/$name-server.log"
python vllm_server.py --model "$model" --port "$port" --max-model-len 512 "${shared_gpu[@]}" \
  >"runs/$name-server.log" 2>&1 </dev/null &
server=$!
python "$script" --run_name "$name" --model_id "$model" --server_urls "http://127.0.0.1:$port" --server_timeout 300 \
  --dataset_id examples/sums.py:rows --reward_funcs last_number --max_prompt_length 128 --max_completion_length 12 \
  --prompts_per_step 8 --num_generations 8 --max_steps 30 --eval_steps 10 \
  --use_peft --lora_r 32 --lora_alpha 64 --learning_rate 3e-4 "${algorithm[@]}" "$@" </dev/null &
trainer=$!
set +m
status=0
wait "$trainer" || status=$?
trainer=""
if [ "$status" != 0 ]; then
  echo "demo: the trainer ended with status $status; the server's last lines:" >&2
  tail -n 5 "runs/$name-server.log" >&2
  exit "$status"
fi

python - "runs/$name" <<'PY'
import sys
from runlog import read_metrics

evals = [line for line in read_metrics(sys.argv[1]) if "eval/mean@4" in line]
first, last = evals[0]["eval/mean@4"], evals[-1]["eval/mean@4"]
print(f"\ndemo: two-digit sums not seen in training, answered right: {first:.2f} before, {last:.2f} after")
print(f"demo: curves and completions: {sys.argv[1]}/report.html")
PY
