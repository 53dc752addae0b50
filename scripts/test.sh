#!/usr/bin/env bash
# Installs, lints and tests, on a bare machine with two cores and no GPU.
#
#   bash scripts/test.sh                what README, SECURITY.md and docs/ promise; live servers and a browser included
#   bash scripts/test.sh all            with what takes long or tries many of a kind (tests marked `slow`)
#   bash scripts/test.sh quick          for every edit: under a minute, starts no process, installs nothing
#   bash scripts/test.sh tests/test_resume.py -k lora       any pytest options
#
# Ends with pytest's exit code. One test may take TEST_TIMEOUT seconds (default 300), after which every thread's stack is
# printed and the test fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null # nothing here asks anything

if [ "${1:-}" = quick ]; then
  if [ ! -f .venv/installed ]; then
    echo "Nothing is installed here yet: bash scripts/install.sh, or bash scripts/test.sh, comes first." >&2
    exit 2
  fi
  . .venv/bin/activate
  ruff check .
  ruff format --check .
  # By name: to import the other test files, too, takes each process ten seconds more.
  [ $# -gt 1 ] || set -- quick $(grep -l "^pytestmark = pytest.mark.quick" tests/test_*.py)
  OMP_NUM_THREADS=1 exec python -m pytest -q -m "quick and not slow" -n 2 --dist loadfile "${@:2}"
fi

bash scripts/install.sh
. .venv/bin/activate
export OMP_WAIT_POLICY=PASSIVE # many processes share the cores: a waiting thread must not spin
export PYTHONUNBUFFERED=1 HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1 WANDB_MODE=offline

# For the tests of the page. Where it cannot be installed they fail and say so.
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v chromium google-chrome >/dev/null; then
  apt="timeout 300 apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o DPkg::Lock::Timeout=30"
  export DEBIAN_FRONTEND=noninteractive
  { $apt install -y chromium || { $apt update && $apt install -y chromium; }; } >/dev/null 2>&1 ||
    echo "test.sh: Chromium could not be installed; the tests of the page in a browser will fail" >&2
fi

python scripts/make_models.py tiny models/tiny

ruff check .
ruff format --check .

case "${1:-}" in
  "") set -- -m "not slow" ;;
  all)
    python scripts/make_models.py smollm2 models/SmolLM2-135M-Instruct
    shift
    ;;
esac

# Three files at a time: most tests wait for processes of their own.
exec python -m pytest --timeout="${TEST_TIMEOUT:-300}" -ra -n 3 --dist loadfile --no-loadscope-reorder \
  --durations=15 --durations-min=2 "$@"
