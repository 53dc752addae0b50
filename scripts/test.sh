#!/usr/bin/env bash
# Installs, lints and tests, on a bare machine: bash scripts/test.sh [pytest options]
#
# Ends with pytest's exit code. One test may take TEST_TIMEOUT seconds (default 300), after which every thread's stack
# is printed and the test fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null # nothing here asks anything

bash scripts/install.sh
. .venv/bin/activate
export OMP_WAIT_POLICY=PASSIVE # many processes share the cores: a waiting thread must not spin
export PYTHONUNBUFFERED=1 HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1 WANDB_MODE=offline

python scripts/make_models.py tiny models/tiny
python scripts/make_models.py smollm2 models/SmolLM2-135M-Instruct

ruff check .
ruff format --check .

# Three files at a time: most tests wait for processes of their own. With four on two cores some processes get no core
# for seconds, and tests of time limits fail now and then.
exec python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --timeout="${TEST_TIMEOUT:-300}" --durations=15 --durations-min=2 -ra "$@"
