#!/usr/bin/env bash
# A vLLM server and a trainer beside it, on one machine; whatever happens, kill -9 of this script included, both are
# gone afterwards.
#
#   bash scripts/serve_and_train.sh NAME MODEL WINDOW train_grpo.py [--server_gpus N] [flags of the train script]
#
# runs `train_grpo.py --run_name NAME --model_id MODEL ...` against a server of MODEL with a window of WINDOW tokens, its
# log in runs/NAME-server.log. Ctrl-C ends the trainer as Ctrl-C does, then the server. Ends with the trainer's status.
# SERVER_FLAGS in the environment go to the server.
#
# Of several GPUs the first N (unset: 1) are the server's, which splits the model over them; torchrun starts a trainer
# on each of the others, as far as they make a power of two: prompts of a step have to divide by the ranks. One GPU is
# shared, with --colocate by turns. On GPUs the trainer starts when the server is ready, for which it has
# SERVER_START_SECONDS (unset: 1800). Without a GPU a script with async in its name and the server get half of the cores
# each.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -ge 4 ] || { sed -n '2,16p' "$0" >&2; exit 2; }
name=$1 model=$2 window=$3 script=$4
shift 4

server_gpus=1 flags=()
while [ $# -gt 0 ]; do
  case "$1" in
    --server_gpus) server_gpus="${2:-}" && shift ;;
    --server_gpus=*) server_gpus="${1#*=}" ;;
    *) flags+=("$1") ;;
  esac
  shift || break # --server_gpus was the last word
done
if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
  count="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"
  visible="$(seq -s , 0 $((count - 1)))"
elif command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
  visible="$CUDA_VISIBLE_DEVICES"
else
  visible=""
fi
IFS=, read -ra gpus <<<"$visible"
colocate=""
for flag in "${flags[@]}"; do [ "$flag" != --colocate ] || { colocate=1; gpus=("${gpus[@]:0:1}"); }; done
if [ ${#gpus[@]} -gt 1 ] && ! [[ "$server_gpus" =~ ^[0-9]+$ && $server_gpus -ge 1 && $server_gpus -lt ${#gpus[@]} ]]; then
  echo "--server_gpus=$server_gpus of ${#gpus[@]} GPUs: give 1 to $((${#gpus[@]} - 1)), the others are the trainer's" >&2
  exit 2
fi

export VLLM_SERVER_TOKEN="${VLLM_SERVER_TOKEN:-$(python -c 'import secrets; print(secrets.token_hex(16))')}"
port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
server="" trainer="" guard=""

stop() { # signal $2, ten seconds of patience, KILL; for the process $1 and whatever it started
  [ -n "$1" ] || return 0
  kill "-$2" -- "-$1" 2>/dev/null || return 0
  for _ in $(seq 100); do kill -0 -- "-$1" 2>/dev/null || return 0; sleep 0.1; done
  kill -KILL -- "-$1" 2>/dev/null || true
}
finish() {
  status=$?
  trap - EXIT INT TERM HUP
  stop "$trainer" INT # as Ctrl-C
  stop "$server" TERM
  [ -z "$guard" ] || kill -KILL -- "-$guard" 2>/dev/null || true
  [ "$status" -lt 128 ] || echo "interrupted; trainer and server are stopped, what there is lies in runs/$name" >&2
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT # a shell that starts this in its background ignores INT: send TERM
trap 'exit 143' TERM HUP

for_server=() for_trainer=() server_flags=() run=(python)
if [ ${#gpus[@]} -gt 1 ]; then
  for_server=(env CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${gpus[*]:0:server_gpus}")")
  free=$((${#gpus[@]} - server_gpus)) ranks=1
  while [ $((2 * ranks)) -le $free ]; do ranks=$((2 * ranks)); done
  [ "$ranks" = "$free" ] || echo "$ranks GPUs train, $((free - ranks)) stay idle; --server_gpus N gives the server more" >&2
  for_trainer=(env CUDA_VISIBLE_DEVICES="$(IFS=,; echo "${gpus[*]:server_gpus:ranks}")")
  [ "$ranks" = 1 ] || run=(torchrun --standalone --nproc_per_node="$ranks")
  [[ "$server_gpus" = 1 || "${SERVER_FLAGS:-}" == *parallel-size* ]] || server_flags=(--tensor-parallel-size "$server_gpus")
elif [ ${#gpus[@]} = 1 ]; then
  for_server=(env CUDA_VISIBLE_DEVICES="${gpus[0]}") for_trainer=(env CUDA_VISIBLE_DEVICES="${gpus[0]}")
  server_flags=(--gpu-memory-utilization 0.3)
  [ -z "$colocate" ] || server_flags=(--gpu-memory-utilization 0.85 --enable-sleep-mode)
else # both on the same cores: whoever waits must not spin
  export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
  read -ra cores <<<"$(python -c 'import os; print(*sorted(os.sched_getaffinity(0)))')"
  half=$((${#cores[@]} / 2))
  if [[ "${script##*/}" == *async* && $half -ge 1 ]]; then # both work all the time: half of the cores each
    first="$(IFS=,; echo "${cores[*]:0:half}")" second="$(IFS=,; echo "${cores[*]:half}")"
    for_server=(env VLLM_CPU_OMP_THREADS_BIND="$first" taskset -c "$first")
    for_trainer=(env OMP_NUM_THREADS="$((${#cores[@]} - half))" taskset -c "$second")
  fi
fi

last_lines() {
  echo "$1; the server's last lines:" >&2
  tail -n 5 "runs/$name-server.log" >&2
}

mkdir -p runs
set -m # each background job is a process group of its own, so that stop() reaches its children, too
echo "starting the server, log in runs/$name-server.log"
# shellcheck disable=SC2086 # SERVER_FLAGS are several words
"${for_server[@]}" python vllm_server.py --model "$model" --port "$port" --max-model-len "$window" --exit-with-parent \
  "${server_flags[@]}" ${SERVER_FLAGS:-} >"runs/$name-server.log" 2>&1 </dev/null &
server=$!
set +m # Ctrl-C reaches what follows, and this shell
if [ ${#gpus[@]} -gt 0 ]; then # vLLM measures free memory while it loads: what a trainer takes would count as its own
  limit=${SERVER_START_SECONDS:-1800}
  until grep -q "vllm_server: ready" "runs/$name-server.log"; do
    kill -0 "$server" 2>/dev/null || { last_lines "the server ended while loading"; exit 1; }
    [ $SECONDS -lt "$limit" ] || { last_lines "the server was not ready within SERVER_START_SECONDS=$limit"; exit 1; }
    sleep 0.5
  done
fi
set -m
"${for_trainer[@]}" "${run[@]}" "$script" --run_name "$name" --model_id "$model" --server_urls "http://127.0.0.1:$port" --server_timeout 300 \
  "${flags[@]}" </dev/null &
trainer=$!
# No trap runs when this shell is killed with -9. Then the guard's input, a pipe that this shell alone holds open, ends.
coproc GUARD { cat >/dev/null; stop "$trainer" INT; stop "$server" TERM; }
guard=$GUARD_PID
set +m
status=0
wait "$trainer" || status=$?
trainer=""
if [ "$status" != 0 ]; then
  last_lines "the trainer ended with status $status"
  exit "$status"
fi

python - "runs/$name" <<'PY'
import sys
from runfiles.reading import held_out

print("\nheld-out rows, never trained on, before and after:")
for metric, values in held_out(sys.argv[1]).items():
    if metric not in ("eval/rows", "eval/mean_length"):
        print(f"  {metric.removeprefix('eval/')}: {values[0]} -> {values[-1]}")
print(f"curves and completions: {sys.argv[1]}/report.html")
PY
