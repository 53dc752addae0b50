"""How seconds and memory grow with the length of a completion, phase by phase. No GPU, no server.

    python benchmarks/long_completions.py                        # about 15 minutes of a core
    python benchmarks/long_completions.py --lengths 500 1000     # fewer

The tiny random model with a wider window, sampled in the process; each completion has exactly so many tokens, in one
turn or in turns of 250 with an environment and its tool between (soak.py). Of each length a run of its own, of three
steps: of each phase the fastest counts, in seconds of a core, which other work on the machine changes little. Memory is
the process's peak. The exponent is that of a power law through the lengths (least squares of logarithms), 1 is linear,
2 quadratic; behind it that of the last two lengths alone. Attention has to be quadratic, and nothing else.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import linear_regression

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runlog.reading import phases, read_metrics  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

FLAGS = "--generator hf --compute_dtype float32 --dataset_id benchmarks/toy.py:rows --seed 0 --max_prompt_length 64 "
FLAGS += "--reward_funcs benchmarks/toy.py:tens --max_steps 3 --print_samples_every 0 --prompts_per_step 1 "
FLAGS += "--logprob_diff_limit 1e9 "  # sampling that blocks the ends has other log-probs
CPU_CLOCK = "import runpy, sys, time; time.perf_counter = time.process_time; sys.argv[0] = 'train_grpo.py'; "
CPU_CLOCK += "sys.path.insert(0, '.'); runpy.run_path('train_grpo.py', run_name='__main__')"
TURNS = "--env benchmarks/soak.py:Long --max_turn_length 250 --max_turns 64 "
KINDS = {"one turn": "", "turns of 250 and a tool": TURNS}


def widened(folder: Path) -> Path:
    """models/tiny with places for 8,192 tokens, and every second token as an end."""
    shutil.copytree(ROOT / "models" / "tiny", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ends = {"eos_token_id": [2, *range(1, 4096, 2)]}  # a turn ends where it may: one that is cut ends the game
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    return folder


def run(model: Path, kind: str, length: int, completions: int) -> dict[str, float]:
    """Seconds of the fastest step by phase, and MB."""
    with tempfile.TemporaryDirectory() as folder:
        batch = f"--model_id {model} --num_generations {completions} --max_completion_length {length} "
        batch += f"--min_completion_length {240 if KINDS[kind] else length} --output_dir {folder} --run_name run"
        command = [sys.executable, "-c", CPU_CLOCK, *(FLAGS + KINDS[kind] + batch).split()]
        log = Path(folder) / "log"
        with log.open("w", encoding="utf-8") as out:
            how = dict(cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=out, stderr=out)
            process = subprocess.Popen(command, preexec_fn=ends_with_us(), **how)
            _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(log.read_text(encoding="utf-8")[-2000:])
        lines = read_metrics(Path(folder) / "run")
        steps = [phases(line) | {"tokens": line["completions/mean_length"]} for line in lines]
        return {name: min(step.get(name, 0.0) for step in steps) for name in steps[0]} | {"MB": used.ru_maxrss / 1e3}


def exponent(lengths: list[int], values: list[float]) -> float:
    """nan where seconds are too short to tell."""
    if min(values) < 0.02:
        return math.nan
    return linear_regression([math.log(n) for n in lengths], [math.log(v) for v in values]).slope


def measure(model: Path, kinds: list[str], lengths: list[int], completions: int) -> None:
    for kind in kinds:
        found = [run(model, kind, length, completions) for length in lengths]
        print(f"\n**{kind}**, {completions} completions a step, seed 0\n")
        print(f"| phase | {' | '.join(f'{n:,}' for n in lengths)} | exponent |")
        print(f"|---|{'---:|' * (len(found) + 1)}")
        for name in found[0]:
            values = [one[name] for one in found]
            digits = 0 if name in ("MB", "tokens") else 2
            power = "" if digits == 0 or math.isnan(e := exponent(lengths, values)) else f"{e:.2f}"
            power += f", {exponent(lengths[-2:], values[-2:]):.2f}" if power else ""
            print(f"| {name} | {' | '.join(f'{v:.{digits}f}' for v in values)} | {power} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 1000, 2000, 4000])
    parser.add_argument("--completions", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(widened(Path(folder) / "tiny"), given.kinds, given.lengths, given.completions)


if __name__ == "__main__":
    main()
