"""Runs an example from start to end: its model, its warm start, then for each seed a vLLM server and GRPO beside it,
with a push after every step; at the end what held-out rows say before and after. With `generator: hf` in the example's
file there is no server: tiny models sample fast enough in process.

    python examples/run.py                                   # what there is
    python examples/run.py arithmetic                        # after scripts/install.sh
    SEEDS=0 python examples/run.py search --max_steps 5      # one seed; flags go to the train script
    SCRIPT=train_async.py python examples/run.py search      # another train script

An example is NAME.py, with its rows, reward, environment and demonstrations, if it has any of its own, and NAME.yaml:
settings of the train script, for `train_grpo.py --config examples/NAME.yaml` as well, and in a section `example`, which
is read here alone: `window` (tokens that the server has room for), `script`, `seeds`, `warm_start` (settings of
scripts/warm_start.py beside those of TASK), `shown` (metrics in the table at the end; eval/mean@* stands for any k).
"""

import fnmatch
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.chdir(ROOT)
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from orphans import ends_with_us  # noqa: E402

from config import ConfigError, load_config, load_yaml, words_of  # noqa: E402
from runfiles.reading import held_out  # noqa: E402

MADE = {  # models that need no hub, and what makes them
    "models/SmolLM2-135M-Instruct": ["scripts/make_models.py", "smollm2"],
    "models/tiny": ["scripts/make_models.py", "tiny"],
    "models/tiny-vlm": ["scripts/make_tiny_vlm.py"],  # ten minutes
}
# What the warm start has in common with the training.
TASK = "dataset_id reward_funcs env tools mcp_config tool_parser max_turns max_turn_length max_prompt_length "
TASK += "max_completion_length agent system_prompt max_pixels compute_dtype tokens_per_microbatch"


def run(*command: str) -> None:
    """Waits for it, and ends with its status where it fails. It is stopped where we are."""
    process = subprocess.Popen(command, preexec_fn=ends_with_us())
    try:
        status = process.wait()
    except KeyboardInterrupt:  # which reached it, too
        process.wait()
        raise
    if status:
        raise SystemExit(status if status > 0 else 128 - status)


def main(name: str, flags: list[str]) -> None:
    path = f"examples/{name}.yaml"
    settings = load_yaml(path)
    example = settings.pop("example", {})
    load_config(argv=["--config", path, *flags, "--generator", "hf"])  # a mistake is told now; hf: no token is read
    start = settings["model_id"]
    if start in MADE:
        run(sys.executable, *MADE[start], start)
    if warm := example.get("warm_start"):
        run_name = f"warm-{name}"
        model, start = start, f"runs/{run_name}/checkpoints/step_{warm['max_steps']}"
        if not Path(start).is_dir():
            task = {key: settings[key] for key in TASK.split() if key in settings}
            command = ["scripts/warm_start.py", "--resume", "--run_name", run_name, "--model_id", model]
            command += words_of(task | warm)
            run(sys.executable, *command)

    in_process = "hf" in (settings.get("generator"), *flags)
    script = os.environ.get("SCRIPT", example.get("script", "train_grpo.py"))
    begin, runs = time.strftime("%m%d-%H%M%S"), []
    for seed in os.environ.get("SEEDS", "").split() or example.get("seeds", [0, 1, 2]):
        runs.append(f"{name}-{begin}-seed{seed}")
        command = [script, "--config", path, "--seed", str(seed), *flags]
        if in_process:
            run(sys.executable, *command, "--run_name", runs[-1], "--model_id", start)
        else:
            run("bash", "scripts/serve_and_train.sh", runs[-1], start, str(example.get("window", 1024)), *command)

    print("\nheld-out rows, before -> after")
    for run_name in runs:
        values = held_out(Path("runs") / run_name)
        for metric in [metric for pattern in example["shown"] for metric in fnmatch.filter(values, pattern)]:
            print(f"  runs/{run_name}: {metric} {' -> '.join(values[metric])}")


if __name__ == "__main__":
    names = {path.stem: path for path in sorted(Path("examples").glob("*.yaml"))}
    if len(sys.argv) < 2 or sys.argv[1] not in names:
        print(__doc__)
        for name, path in names.items():
            print(f"{name:12} {path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")
        raise SystemExit(0 if sys.argv[1:] in ([], ["-h"], ["--help"]) else 2)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for what starts `python`
    try:
        main(sys.argv[1], sys.argv[2:])
    except ConfigError as error:
        print(f"run.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
