"""Runs an example from start to end: its model, its warm start, then for each seed a vLLM server and GRPO beside it,
with a push after every step; at the end what held-out rows say before and after. With `generator: hf` in the example's
file there is no server: tiny models sample fast enough in process.

    python examples/run.py                                   # what there is
    python examples/run.py arithmetic                        # on a bare machine: python3; it installs first
    SEEDS=0 python examples/run.py search --max_steps 5      # one seed; flags go to the train script
    SCRIPT=train_async.py python examples/run.py search      # another train script

An example is NAME.py, with its rows, reward, environment and demonstrations, if it has any of its own, and NAME.yaml:
settings of the train script, for `train_grpo.py --config examples/NAME.yaml` as well, and in a section `example`, which
is read here alone,

    window        tokens that the server has room for [1024]
    seeds         [0 1 2]
    warm_start    settings of scripts/warm_start.py; those of TASK are the training's; unset: none
    before        NAME: settings of an evaluation of the model as it is, before any training
    after         NAME: settings of an evaluation of every seed's trained model
    then          NAME: settings of one more training, in place of those above; `script` is another train script
    shown         metrics in the table at the end; eval/mean@* stands for any k
"""

import dataclasses
import fnmatch
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
os.chdir(ROOT)
if not sys.argv[1:] or sys.argv[1].startswith("-"):
    print(__doc__)
    for path in sorted(Path("examples").glob("*.yaml")):
        print(f"{path.stem:12} {path.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")
    raise SystemExit(sys.argv[1:] not in ([], ["-h"], ["--help"]))
if importlib.util.find_spec("vllm") is None and Path(sys.prefix).resolve() != Path(".venv").resolve():
    subprocess.run(["bash", "scripts/install.sh"], check=True)
    os.execv(".venv/bin/python", [".venv/bin/python", *sys.argv])
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for what starts `python`
sys.path.insert(0, str(ROOT))


from cli import build_parser, convert, known_name, load_yaml  # noqa: E402
from config import ConfigError, TrainConfig, load_config  # noqa: E402
from runlog.reading import held_out  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

MADE = {  # models that need no hub, and what makes them
    "models/SmolLM2-135M-Instruct": ["scripts/make_models.py", "smollm2"],
    "models/tiny": ["scripts/make_models.py", "tiny"],
    "models/tiny-vlm": ["scripts/make_tiny_vlm.py"],  # ten minutes
}
# What the warm start has in common with the training.
TASK = "dataset_id env tools mcp_config tool_parser max_turns max_turn_length max_prompt_length max_completion_length "
TASK += "system_prompt max_pixels min_pixels compute_dtype tokens_per_microbatch"


@dataclasses.dataclass
class Example:
    """The section `example`: see above."""

    window: int = 1024
    seeds: list[int] = dataclasses.field(default_factory=lambda: [0, 1, 2])
    warm_start: dict = dataclasses.field(default_factory=dict)
    before: dict[str, dict] = dataclasses.field(default_factory=dict)
    after: dict[str, dict] = dataclasses.field(default_factory=dict)
    then: dict[str, dict] = dataclasses.field(default_factory=dict)
    shown: list[str] = dataclasses.field(default_factory=list)


def read(name: str, flags: list[str]) -> tuple[dict, Example]:
    """Settings of the training, and of what is around it. ConfigError for a name or flag that nothing would read."""
    known_name("example", name, [path.stem for path in Path("examples").glob("*.yaml")])
    path = f"examples/{name}.yaml"
    load_config(argv=["--config", path, *flags, "--generator", "hf"])  # hf: no token is read
    for flag in sorted({"output_dir", "run_name"} & {*vars(build_parser(TrainConfig).parse_args(flags))}):
        raise ConfigError(f"--{flag}: its runs lie in runs/, under names of their own; leave it out.")
    settings = load_yaml(path)
    fields = [field.name for field in dataclasses.fields(TrainConfig)]

    def checked(where: str, given, known: list[str] | None = None) -> dict:
        if not isinstance(given, dict):
            raise ConfigError(f"{path}, {where}: expected `name: value` lines, found {given!r}.")
        for key in given if known else ():
            known_name(f"{path}, {where}", key, known)
        return given

    hints = {field.name: field.type for field in dataclasses.fields(Example)}
    given = checked("example", settings.pop("example", {}), list(hints))
    plain = {key: convert(key, hints[key], given[key]) for key in ("window", "seeds", "shown") if key in given}
    example = Example(**given | plain)
    if checked("warm_start", example.warm_start, [*fields, "demonstrations"]):
        if missing := {"demonstrations", "max_steps"} - set(example.warm_start):
            raise ConfigError(f"{path}, warm_start: {' and '.join(sorted(missing))} must be given.")
    for part, known in (("before", fields), ("after", fields), ("then", [*fields, "script"])):
        for title, chosen in checked(part, getattr(example, part)).items():
            checked(f"{part}, {title}", chosen, known)
    return settings, example


def as_flags(settings: dict) -> list[str]:
    words = []
    for name, value in settings.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def run(*command: str, output=None) -> str | None:
    """Waits for it, and ends as it does where it fails. Ctrl-C reaches it without us, and it has things to put away."""
    process = subprocess.Popen(command, stdout=output, text=True, encoding="utf-8", preexec_fn=ends_with_us())
    try:
        printed, _ = process.communicate()
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            process.terminate()
        process.wait()
        raise
    if process.returncode:
        raise SystemExit(process.returncode if process.returncode > 0 else 128 - process.returncode)
    return printed


def python(*command: str, **options) -> str | None:
    return run(sys.executable, *command, **options)


def evaluate(model: str, title: str, settings: dict) -> None:
    flags = ["--eval_only", "--generator", "hf", "--model_id", model, *as_flags(settings)]
    for line in python("train_grpo.py", *flags, output=subprocess.PIPE).splitlines():
        if line.startswith("evaluation after step 0"):
            print(f"{model}, {title}{line.removeprefix('evaluation after step 0')}", flush=True)


def warm_start(name: str, model: str, settings: dict, warm: dict) -> str:
    """The folder of the warm-started model, which is left as it is where it is there already."""
    run_name = f"warm-{name}"
    start = Path("runs") / run_name / "checkpoints" / f"step_{warm['max_steps']}"
    if not start.is_dir():
        shutil.rmtree(Path("runs") / run_name, ignore_errors=True)
        task = {key: settings[key] for key in TASK.split() if key in settings}
        flags = as_flags(task | warm)
        python("scripts/warm_start.py", "--run_name", run_name, "--model_id", model, *flags)
    return str(start)


def last_checkpoint(run_name: str) -> str:
    return str(max(Path("runs", run_name, "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:])))


def table(runs: list[str], shown: list[str]) -> None:
    print("\nheld-out rows, before -> after")
    for run_name in runs:
        values = held_out(Path("runs") / run_name)
        for metric in [metric for pattern in shown for metric in fnmatch.filter(values, pattern)]:
            print(f"  runs/{run_name}: {metric} {' -> '.join(values[metric])}")


def main(name: str, flags: list[str]) -> None:
    settings, example = read(name, flags)
    model = start = settings["model_id"]
    if model in MADE:
        python(*MADE[model], model)
    if example.warm_start:
        start = warm_start(name, model, settings, example.warm_start)
    for title, given in example.before.items():
        evaluate(model, title, given)

    script = os.environ.get("SCRIPT", "train_grpo.py")
    given = vars(build_parser(TrainConfig).parse_args(flags))
    in_process = given.get("generator", settings.get("generator")) == "hf"
    begin, runs = time.strftime("%m%d-%H%M%S"), []

    def train(suffix: str, given: dict) -> None:
        runs.append(f"{name}-{begin}-{suffix}")
        own = {key: value for key, value in given.items() if key != "script"}
        command = [given.get("script") or script, "--config", f"examples/{name}.yaml", *as_flags(own), *flags]
        if in_process:
            python(*command, "--run_name", runs[-1], "--model_id", start)
        else:
            run("bash", "scripts/serve_and_train.sh", runs[-1], start, str(example.window), *command)

    for seed in os.environ.get("SEEDS", "").split() or example.seeds:
        train(f"seed{seed}", {"seed": seed})
    trained = list(runs)
    for title, given in example.then.items():
        train(title, given)
    for title, given in example.after.items():
        for run_name in trained:
            evaluate(last_checkpoint(run_name), title, given)
    table(runs, example.shown)


signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
try:
    main(sys.argv[1], sys.argv[2:])
except ConfigError as error:
    print(f"run.py: error: {error}", file=sys.stderr)
    raise SystemExit(2) from None
except KeyboardInterrupt:
    raise SystemExit(130) from None
