#!/usr/bin/env bash
# For whoever has a machine with GPUs: does all of this work there, and how fast? Leaves one page, gpu_check.md.
#
#   bash scripts/gpu_check.sh                  ten minutes by estimate, after installation
#   bash scripts/gpu_check.sh --only push      flags go to scripts/gpu_check.py, whose --help lists them
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/install.sh
. .venv/bin/activate
python scripts/make_models.py tiny models/tiny
python scripts/make_models.py smollm2 models/SmolLM2-135M-Instruct || echo "without it the demo is skipped" >&2

exec python scripts/gpu_check.py "$@"
