#!/usr/bin/env bash
# Installs, lints and tests, on a bare machine: bash scripts/test.sh [pytest options]
#
# `bash scripts/test.sh quick` is for every edit: it installs nothing, lints and runs the test files that are marked so,
# but for tests that are marked `slow`.
#
# Without options a tenth of the fault campaign comes first, and of the tests that are marked `in_turn` (they take long,
# and an edit seldom breaks them) a quarter runs: others at each commit. `bash scripts/test.sh tests` runs all tests.
# Ends with pytest's exit code, or with 1 if all tests passed and a fault was twice not as wanted. One test may take
# TEST_TIMEOUT seconds (default 300), after which every thread's stack is printed and the test fails.
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

python scripts/make_models.py tiny models/tiny
python scripts/make_models.py smollm2 models/SmolLM2-135M-Instruct

ruff check .
ruff format --check .

cache=$(mktemp -d)
trap 'rm -rf "$cache"' EXIT
faults=0
if [ $# = 0 ]; then
  printf '\nA tenth of the fault campaign (python tests/faults --turn /10):\n'
  python tests/faults --turn /10 --jobs 2 --patience 2 | tee "$cache/faults" || faults=1
  set -- --turn /4
fi
end() { # all tests passed: say again what else did not, above a screen of tests
  [ "$faults" = 0 ] || grep '^!\|not as wanted' "$cache/faults"
  exit "$faults"
}

# Three files at a time: most tests wait for processes of their own. With four on two cores some processes get no core
# for seconds, and tests of time limits fail now and then.
pytest=(python -m pytest --timeout="${TEST_TIMEOUT:-300}" -ra -o cache_dir="$cache")
status=0
"${pytest[@]}" -n 3 --dist loadfile --no-loadscope-reorder --durations=15 --durations-min=2 "$@" || status=$?
[ "$status" = 0 ] && end
[ "$status" = 1 ] || exit "$status" # 1: tests failed; others: interrupted, wrong usage

# Some kill processes in the middle of something, or hold them to a time limit: with all cores taken that can go wrong by
# itself. A few that failed are run once more with nothing beside them. What fails then has failed.
failed=$(python -c 'import json, sys; print(len(json.load(open(sys.argv[1]))))' "$cache/v/cache/lastfailed")
[ "$failed" -le 5 ] || exit "$status"
printf '\n%s failed beside others. Once more, alone:\n' "$failed"
"${pytest[@]}" --last-failed "$@"
end
