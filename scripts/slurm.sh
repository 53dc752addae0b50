#!/usr/bin/env bash
#SBATCH --job-name=grpo
#SBATCH --ntasks-per-node=1
# Several nodes under Slurm: the first serves, or the first SERVER_NODES of them, and the others train.
#
#   sbatch --nodes=3 --gpus-per-node=8 scripts/slurm.sh NAME MODEL WINDOW train_grpo.py [flags of the train script]
#
# From the repository's folder, on a disk that every node has mounted: run folders go there (--output_dir for another).
# A server splits the model over the GPUs of its node, unless SERVER_FLAGS has a parallel size; it is reached under the
# node's name, listens on all its addresses, and its token is in runs/NAME-token, which only its user can read. Its log
# is runs/NAME-server.log, and it may load for SERVER_START_SECONDS (unset: 1800).
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
[ $# -ge 4 ] || { echo "usage: sbatch --nodes=N --gpus-per-node=G scripts/slurm.sh NAME MODEL WINDOW SCRIPT [flags]" >&2; exit 2; }
name=$1 model=$2 window=$3 script=$4
shift 4
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[ ${#nodes[@]} -ge 2 ] || { echo "--nodes=1: give at least 2, or use scripts/serve_and_train.sh on the node" >&2; exit 2; }
serving=${SERVER_NODES:-1} training=$((${#nodes[@]} - ${SERVER_NODES:-1}))
[ "$serving" -ge 1 ] && [ $training -ge 1 ] || { echo "SERVER_NODES=$serving of ${#nodes[@]}: server and trainer need one each" >&2; exit 2; }
gpus="${SLURM_GPUS_ON_NODE:?ask for GPUs, for example --gpus-per-node=8}"
servers="$(IFS=,; echo "${nodes[*]:0:serving}")" trainers="$(IFS=,; echo "${nodes[*]:serving}")"
port=$((10000 + SLURM_JOB_ID % 10000)) master=$((20000 + SLURM_JOB_ID % 10000)) # jobs may share a node
server_flags=()
[[ "$gpus" = 1 || "${SERVER_FLAGS:-}" == *parallel-size* ]] || server_flags=(--tensor-parallel-size "$gpus")

mkdir -p runs
export VLLM_SERVER_TOKEN_FILE="$PWD/runs/$name-token"
(umask 077; python -c 'import secrets; print(secrets.token_hex(16))' >"$VLLM_SERVER_TOKEN_FILE")
# shellcheck disable=SC2086 # SERVER_FLAGS are several words
srun --nodes="$serving" --ntasks-per-node=1 --nodelist="$servers" python vllm_server.py --model "$model" --host 0.0.0.0 --port "$port" \
  --max-model-len "$window" "${server_flags[@]}" ${SERVER_FLAGS:-} >"runs/$name-server.log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true; rm -f "$VLLM_SERVER_TOKEN_FILE"' EXIT
limit=${SERVER_START_SECONDS:-1800}
until [ "$(grep -c "vllm_server: ready" "runs/$name-server.log")" -ge "$serving" ]; do
  kill -0 "$server" 2>/dev/null || { echo "the server ended while loading: runs/$name-server.log" >&2; exit 1; }
  [ $SECONDS -lt "$limit" ] || { echo "the server was not ready within SERVER_START_SECONDS=$limit" >&2; exit 1; }
  sleep 0.5
done
mapfile -t urls < <(printf "http://%s:$port\n" "${nodes[@]:0:serving}")
srun --nodes=$training --ntasks-per-node=1 --nodelist="$trainers" torchrun --nnodes=$training \
  --nproc_per_node="$gpus" --rdzv_id="$SLURM_JOB_ID" --rdzv_backend=c10d --rdzv_endpoint="${nodes[serving]}:$master" \
  "$script" --run_name "$name" --model_id "$model" --server_urls "${urls[@]}" --server_timeout 300 "$@"
