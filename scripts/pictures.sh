#!/usr/bin/env bash
# Makes the pictures of the README and of docs/looking.md from a run, such as the demo's, by a headless browser.
#
#   bash scripts/pictures.sh runs/demo-1123-101500 [STEP ROW]      # which trajectory; default: the last step, the best row
#
# Needs Chromium (Debian: apt install chromium) and requirements-dev.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}" ]; then . .venv/bin/activate; fi
exec python scripts/pictures.py "$@"
