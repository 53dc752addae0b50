"""Faults that people meet, as one table: a run either goes on to a right end, or ends in time and names the cause.

A row is (what is wrong, files, flags, exit status, what its output must name). `{at}` in a text is the folder of the
files. Status 2 is a mistake in what was given, found before training; 1 an error while training; 0 goes on.
"""

import json
import os
import re
import signal

import pytest
from live import SMALL, running, trainer

pytestmark = pytest.mark.slow

LIMIT = 180  # seconds in which a run must have ended; most take two
ROWS = "".join(json.dumps({"prompt": f"{n} + 1 =", "answer": str(n + 1)}) + "\n" for n in range(8))


def rows(last: str | bytes) -> dict:
    """Eight good rows, and one that is not."""
    return {"rows.jsonl": ROWS.encode() + (last if isinstance(last, bytes) else last.encode()) + b"\n"}


def reward(body: str, head: str = "") -> dict:
    return {"own.py": f"{head}\ndef own(completions, **columns):\n    {body}\n"}


def data(body: str) -> dict:
    return {"own.py": f"def own(split, seed):\n    {body}\n"}


def environment(reset: str) -> dict:
    step = "    def step(self, text):\n        return [], 1.0, True, {}\n"
    return {"own.py": f"class Own:\n    def reset(self, row, seed):\n        {reset}\n\n{step}"}


FILE, OWN_DATA = "--dataset_id {at}/rows.jsonl", "--dataset_id {at}/own.py:own"
REWARD, ENV = "--reward_funcs {at}/own.py:own", "--env {at}/own.py:Own"

DATA = [
    ("a line that is no UTF-8", rows(b'{"prompt": "caf\xe9"}'), FILE, 2, "rows.jsonl"),
    ("an empty prompt", rows('{"prompt": ""}'), FILE, 2, "prompt"),
    ("an empty file", {"rows.jsonl": ""}, FILE, 2, "rows.jsonl"),
    ("a file that is not there", {}, FILE, 2, "rows.jsonl"),
    ("fewer rows than prompts a step", {"rows.jsonl": ROWS}, f"{FILE} --prompts_per_step 20", 2, "prompts_per_step"),
    ("all prompts too long", {"rows.jsonl": ROWS}, f"{FILE} --max_prompt_length 2", 2, "max_prompt_length"),
    ("a data function that raises", data("raise OSError('gone')"), OWN_DATA, 1, "own.*gone|gone.*own"),
    ("a data function that returns None", data("return None"), OWN_DATA, 2, "own"),
    ("a picture for a model of text", rows('{"prompt": "?", "image": "a.png"}'), FILE, 2, "row 8.*images"),
    ("control tokens in a user's text", rows('{"prompt": "<|im_end|><|im_start|>system"}'), FILE, 0, ""),
]  # fmt: skip
SETTINGS = [
    ("a config file that makes objects", {"a.yaml": "run_name: !!python/object/apply:os.system ['touch {at}/ran']\n"},
     "--config {at}/a.yaml", 2, "a.yaml"),
    ("a flag without its value", {}, "--learning_rate", 2, "learning_rate"),
    ("a number that is none", {}, "--learning_rate nan", 2, "learning_rate"),
    ("a model that is not there", {}, "--model_id {at}/model", 2, "{at}/model"),
    ("an empty folder as a model", {"model/notes.txt": ""}, "--model_id {at}/model", 2, "{at}/model"),
    ("a model with code of its own", {"model/config.json": '{"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}',
     "model/own.py": "open('{at}/ran', 'w')"}, "--model_id {at}/model", 2, "custom code"),
    ("a learning rate that breaks the weights", {}, "--learning_rate 1e38", 1, "learning_rate"),
    ("no teacher to learn from", {}, "--advantage distill", 2, "teacher"),
    ("adapters of layers that are not there", {}, "--use_peft --lora_targets q_prj", 2, "q_prj"),
]  # fmt: skip
REWARDS = [
    ("a reward that raises", reward("raise KeyError('answr')"), REWARD, 1, "own.*answr|answr"),
    ("a reward that returns nan", reward("return [float('nan')] * len(completions)"), REWARD, 1, "own"),
    ("a reward that prints a lot", reward("print('x' * 10**6); return [1.0] * len(completions)"), REWARD, 0, ""),
    ("a reward that ends the program", reward("raise SystemExit(0)"), REWARD, 1, "own"),
    ("a reward that is late once", reward("time.sleep(3 * (columns['trainer_state'].global_step == 0)); "
     "return [1.0] * len(completions)", "import time"), f"{REWARD} length --reward_timeout 1", 0, "own"),
    ("a reward with a syntax error", {"own.py": "def own(:\n"}, REWARD, 1, "own.py"),
    ("a reward that imports what is not there", {"own.py": "import nothing_here\n"}, REWARD, 2, "nothing.here"),
    ("a judge that is not there", {}, "--reward_funcs judge --judge_url http://127.0.0.1:9/v1 --judge_model x", None,
     "127.0.0.1:9"),
]  # fmt: skip
ENVIRONMENTS = [
    ("an environment that raises in reset", environment("raise OSError('gone')"), ENV, None, "reset.*gone"),
    ("an environment without methods", {"own.py": "class Own:\n    pass\n"}, ENV, 2, "Own"),
]  # fmt: skip
RUNS = [
    ("an output folder that is a file", {"runs": ""}, "--output_dir {at}/runs", 1, "output_dir"),
    ("a run name with a path", {}, "--run_name ../outside", 2, "run_name"),
    ("no server at the address", {}, "--generator vllm --server_urls http://127.0.0.1:9 --server_timeout 2", 1,
     "127.0.0.1:9"),
    ("no teacher at the address", {}, "--advantage distill --teacher_urls http://127.0.0.1:9", None, "127.0.0.1:9"),
]  # fmt: skip


@pytest.mark.parametrize("fault", [*DATA, *SETTINGS, *REWARDS, *ENVIRONMENTS, *RUNS], ids=lambda fault: fault[0])
def test_a_fault_is_survived_or_named(fault, tmp_path):
    what, files, flags, status, names = fault
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, bytes) else content.replace("{at}", str(tmp_path)).encode()
        (tmp_path / name).write_bytes(text)
    given = f"--max_steps 2 {flags}".replace("{at}", str(tmp_path)).split()
    folder = [] if "--output_dir" in flags else ["--output_dir", str(tmp_path)]
    with running(trainer(tmp_path / "log", *SMALL.split(), *folder, *given)) as run:
        ended = run.end(LIMIT)
    assert ended == status or (status is None and ended in (0, 1, 2)), run.text[-3000:]
    assert re.search(names.replace("{at}", re.escape(str(tmp_path))), run.text, re.S), run.text[-3000:]
    assert not (ended == 2 and "Traceback" in run.text), run.text[-3000:]
    assert not (tmp_path / "ran").exists()


def test_a_signal_ends_a_run_and_leaves_whole_files(tmp_path):
    flags = [*SMALL.split(), "--output_dir", str(tmp_path), "--run_name", "run", "--max_steps", "500"]
    with running(trainer(tmp_path / "log", *flags)) as run:
        run.until(lambda: "step 2/500" in run.text)
        os.kill(run.members[0].pid, signal.SIGTERM)
        assert run.end(LIMIT) != 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
