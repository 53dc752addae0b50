"""Both scripts train every example as it is: data, environment, tools and rewards differ, and nothing else."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny_vlms
from live import SMALL, running, trainer
from server_fixture import make_tiny

from runlog.reading import read_metrics

EXAMPLES = {
    "sums": "--reward_funcs last_number",
    "arithmetic": "--tools calculator --reward_funcs examples/arithmetic.py:right tool_use few_turns",
    "search": "--mcp_config examples/search.json --tool_parser tags --reward_funcs squad_em",
    "coding": "--reward_funcs code_tests --allow_uncontained",
    "games": "--env frozenlake?slippery=true",
    "games, sokoban": "--env sokoban",
    "counting": "--reward_funcs examples/counting.py:count",
    "grounding": "--reward_funcs examples/grounding.py:grounding",
    "geometry": "--reward_funcs math",
    "counting, cropped": "--env examples/visual_crop.py:Crop",
}
SCRIPTS = {"train_grpo.py": "", "train_ppo.py": "--num_generations 1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(script, example) -> future of its run's folder, status and text. Two at a time: one leaves a core idle."""
    folder = tmp_path_factory.mktemp("examples")
    models = {False: str(make_tiny()), True: str(tiny_vlms.make("idefics3", folder / "vlm"))}

    def train(script: str, example: str):
        file, name = example.split(",")[0], f"{script} {example}"
        sees = file in ("counting", "grounding", "geometry")
        flags = f"{SMALL} {SCRIPTS[script]} {EXAMPLES[example]} --dataset_id examples/{file}.py:rows --max_steps 1 "
        flags += "--max_prompt_length 512 --max_completion_length 96 --max_turn_length 16 --max_turns 3"
        flags = [*flags.split(), "--model_id", models[sees], "--output_dir", str(folder), "--run_name", name]
        with running(trainer(folder / f"{name}.log", *flags, script=script)) as run:
            return folder / name, run.end(), run.text

    with ThreadPoolExecutor(2) as pool:
        yield {(s, e): pool.submit(train, s, e) for s in SCRIPTS for e in EXAMPLES}


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("script", SCRIPTS)
def test_trains(runs, script, example):
    folder, status, text = runs[script, example].result()
    assert status == 0, text
    (line,) = read_metrics(folder)
    several = any(flag in EXAMPLES[example] for flag in ("--tools", "--env", "--mcp_config"))
    assert "reward" in line and ("turns/mean" in line) == several
