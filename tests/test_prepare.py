"""look.py --prepare: who may ask, and that what it says of rows, prompts and rewards is what a training does. The page
itself is in test_prepare_browser.py."""

import base64
import io
import json
import subprocess
import sys
import time

import pytest
import requests
from looking_at import ROOT, checkout, looking
from PIL import Image

SMALL = dict(model_id="models/tiny", generator="hf", dataset_id="examples/sums.py:rows", compute_dtype="float32")
SMALL |= dict(prompts_per_step="4", num_generations="4", max_prompt_length="64", max_completion_length="8")
SMALL |= dict(print_samples_every="0", learning_rate="1e-3", max_steps="2")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    here = checkout(tmp_path_factory.mktemp("look") / "here")
    with looking(here / "runs", "--prepare", cwd=here) as page:
        yield page


def post(page, action: str, headers: dict | None = None, body=None, **given) -> requests.Response:
    """As the page's own javascript does, but for `headers`; body: in place of JSON."""
    given = {"session": "test", "script": "train_grpo.py"} | given
    own = {"Authorization": f"Bearer {page.token}", "Content-Type": "application/json"} | (headers or {})
    own = {name: value for name, value in own.items() if value is not None}
    data = json.dumps(given) if body is None else body
    return requests.post(f"{page.root}/api/prepare/{action}", headers=own, data=data, timeout=300)


def told(page, action: str, settings: dict, **given) -> dict:
    answer = post(page, action, settings=settings, **given)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---- who may ask ----------------------------------------------------------------------------------------------------


def test_without_prepare_the_page_changes_nothing_and_imports_no_torch(tmp_path):
    with looking(tmp_path) as page:
        assert post(page, "check").status_code in (404, 405)
        assert page.ask("/api/prepare").status_code == 404
        assert "data-prepare" not in requests.get(page.address, timeout=10).text
    said = "import sys; sys.argv = ['look.py', '--help']; import looking.server; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", said], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert done.stdout.strip() == "False", done


def test_only_the_page_itself_is_answered(page):
    cookie = requests.get(page.address, timeout=10).headers["Set-Cookie"].split(";")[0]
    here = page.root
    with_cookie = {"Authorization": None, "Cookie": cookie}
    accepted = [{}, {"Origin": here}, with_cookie | {"Origin": here, "Sec-Fetch-Site": "same-origin"}]
    refused = [
        {"Authorization": None},
        {"Authorization": "Bearer wrong"},
        with_cookie,
        with_cookie | {"Origin": "http://127.0.0.1:1"},
        with_cookie | {"Origin": "null"},
        with_cookie | {"Origin": here, "Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://evil.example"},
        {"Host": f"evil.example:{page.port}", "Origin": f"http://evil.example:{page.port}"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
    ]
    for headers in accepted:
        assert post(page, "close", headers).status_code == 200, headers
    for headers in refused:
        assert post(page, "close", headers).status_code == 403, headers
    in_address = requests.post(f"{page.root}/api/prepare/close?token={page.token}", json={"session": "x"}, timeout=10)
    assert in_address.status_code == 403
    assert requests.get(f"{page.root}/api/prepare/close", headers={"Cookie": cookie}, timeout=10).status_code == 405


def test_what_is_no_request_is_refused(page):
    assert post(page, "check", body="[1]").status_code == 400
    assert post(page, "check", body="{").status_code == 400
    assert post(page, "check", body=b" " * (2 << 20)).status_code == 422
    assert post(page, "no_such_thing").status_code == 422
    for script in ("../train_grpo.py", "/etc/passwd", "scripts/check.py", "look.py", "", None):
        assert post(page, "check", script=script).status_code == 422, script


def test_a_form_is_sent_once(page):
    first = post(page, "stop", form="12345678", name="none")
    again = post(page, "stop", form="12345678", name="none")
    assert (first.status_code, again.status_code) == (422, 403) and "sent before" in again.json()["error"]
    assert post(page, "stop", name="none").status_code == 403


@pytest.mark.in_turn
def test_python_files_outside_of_the_folder_are_not_run(page, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef rows(split, seed):\n    return []\n", encoding="utf-8")
    # A path goes up through a name that is no folder, too: file.py:/../..
    through = "../" * len(page.folder.parents) + str(file)[1:]
    specs = [f"{file}:rows", f"train_grpo.py:/../{through}:rows", f"train_grpo.py:rows?/../{through}:rows"]
    for name in ("dataset_id", "reward_funcs", "tools", "env"):
        for spec in specs:
            found = told(page, "check", SMALL | {name: spec})
            assert "only python files in" in found["error"] and found["field"] == name, found
            assert post(page, "rows", settings=SMALL | {name: spec}).status_code == 422
    assert not (tmp_path / "ran").exists()


def test_servers_of_a_file_outside_of_the_folder_or_of_one_that_was_dropped_are_not_started(page, tmp_path):
    server = {"command": "/bin/sh", "args": ["-c", f"touch {tmp_path / 'ran'}"]}
    content = json.dumps({"mcpServers": {"own": server}}).encode()
    (tmp_path / "own.json").write_bytes(content)
    kind = {"Content-Type": "application/octet-stream"}
    dropped = post(page, "drop?name=own.json", kind, body=content).json()["path"]
    for path in (str(tmp_path / "own.json"), dropped):
        found = told(page, "check", SMALL | {"mcp_config": path})
        assert "only MCP servers of files in" in found["error"] and found["field"] == "mcp_config", found
        assert post(page, "tools", settings=SMALL | {"mcp_config": path}).status_code == 422
    assert not (tmp_path / "ran").exists()


def test_other_hosts_need_a_word_of_their_own(tmp_path):
    command = [sys.executable, "look.py", str(tmp_path), "--prepare", "--host", "0.0.0.0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 1 and "--let-others-run-code" in done.stderr


def test_files_are_dropped_under_plain_names_alone(page):
    def drop(name: str, content: bytes):
        kind = {"Content-Type": "application/octet-stream"}
        return post(page, f"drop?name={name}", kind, body=content)

    for name in ("..%2Fx.csv", "%2Ftmp%2Fx.csv", ".x.csv", "x.py", "", "a%00b.csv"):
        assert drop(name, b"a\n1\n").status_code == 422, name
    contents = (b"a\n1\n", b"a\n2\n", b"a\n1\n")
    made = [page.folder.parent / drop("rows.csv", content).json()["path"] for content in contents]
    assert made[0] == made[2] != made[1] and made[1].read_bytes() == b"a\n2\n"


# ---- what it says is what a training does ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(page, tmp_path_factory):
    """The run that is started with SMALL and two rewards: (settings, its folder)."""
    settings = SMALL | {"reward_funcs": "last_number length", "reward_weights": "1 0.5", "run_name": "compared"}
    made = told(page, "launch", settings, form="of the run 1", runs=str(page.folder))
    deadline = time.monotonic() + 240
    while page.ask("/api/prepare").json()["launched"][0]["alive"]:
        assert time.monotonic() < deadline
        time.sleep(0.3)
    log = page.ask("/api/launch_log", name="compared").json()["text"]
    assert page.ask("/api/prepare").json()["launched"][0]["status"] == 0, log
    return settings, page.folder / made["run"]


@pytest.mark.in_turn
def test_rows_prompts_and_rewards_are_those_of_the_run(page, trained):
    import pyarrow.parquet as pq

    settings, folder = trained
    data = told(page, "rows", settings)["parts"][0]
    rows = pq.read_table(folder / "completions" / "step_000001.parquet").to_pylist()
    assert {row["row_number"] for row in rows} == set(data["first_step"])
    groups = {number: [row for row in rows if row["row_number"] == number] for number in data["first_step"]}
    for number, group in groups.items():
        shown = told(page, "row", settings, row=number)
        assert shown["tokens"]["completion"]["ids"] == group[0]["prompt_ids"]
        given = [{"text": r["completion"], "ids": r["token_ids"], "finish": r["finish_reason"]} for r in group]
        scored = told(page, "score", settings, row=number, completions=given)
        for one, row in zip(scored["completions"], group, strict=True):
            assert one["ids"] == row["token_ids"] and one["text"] == row["completion"]
            assert one["reward"] == pytest.approx(row["reward"], abs=1e-5)
            assert one["advantage"] == pytest.approx(row["advantage"], abs=1e-4)
        for function in scored["functions"]:
            logged = [row[f"rewards/{function['name']}"] for row in group]
            assert function["values"] == pytest.approx(logged, abs=1e-5)


def test_of_very_many_rows_bounds_are_called_so_and_listed_rows_are_counted(page):
    """In a process of its own, in which 40 rows are many."""
    here = page.folder.parent
    texts = ["count to ten and then back again " * 4] * 40 + ["too long " * 300]
    lines = [json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in texts]
    (here / "many.jsonl").write_text("".join(lines), encoding="utf-8")
    settings = SMALL | dict(dataset_id="many.jsonl", reward_funcs="exact_match", max_prompt_length="256")
    code = "import json, sys; from pathlib import Path; from inputs import on_disk, prompts\n"
    code += "on_disk.MANY, on_disk.LARGE, on_disk.KEPT, prompts.TRIED = 10, 1, Path('kept'), 5\n"
    code += "from looking.answers import rows, settings; script = settings.Script('train_grpo.py')\n"
    code += f"given = {{'settings': {settings!r}}}; found = rows.rows(script, given)['parts'][0]\n"
    code += "counted = [rows.row(script, given | {'part': 0, 'row': n})['length'] for n in (1, 40)]\n"
    code += "print(json.dumps([found, counted]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    found, (length, long) = json.loads(done.stdout.splitlines()[-1])
    assert found["bounds"] and found["median"] > length > 64 and found["left_out"] == 1
    assert [row["tokens"] for row in found["rows"]] == [length] * 40 + [long] and found["longest"] == long > 256
    assert len(found["first_step"]) == 4


@pytest.mark.in_turn
def test_images_of_a_row_are_shown_as_the_model_gets_them(page):
    """In a process of its own, as tiny_vlms imports torch."""
    here = page.folder.parent
    code = "import sys; sys.path[:0] = ['tests', '.']; import tiny_vlms; from pathlib import Path; "
    code += f"tiny_vlms.make('qwen2_5_vl', Path({str(here)!r}) / 'vlm'); "
    code += f"tiny_vlms.picture(1, 640, 320).save({str(here / 'picture.png')!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=200)
    row = {"prompt": "What is it?", "answer": "a cat", "image": str(here / "picture.png")}
    (here / "pictures.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    settings = SMALL | dict(model_id="vlm", dataset_id="pictures.jsonl", reward_funcs="zero", prompts_per_step="1")
    settings |= dict(max_pixels="50176", max_prompt_length="2000")
    (data,) = told(page, "rows", settings)["parts"]
    shown = told(page, "row", settings, row=0)
    assert data["longest"] == shown["length"] == len(shown["tokens"]["completion"]["ids"]) > 20
    (image,) = shown["images"]
    with Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))) as made:
        assert 0.8 * 50176 < made.width * made.height <= 50176
    assert shown["columns"].keys() == {"prompt", "answer"}


def test_the_command_that_is_shown_says_what_the_form_says(page):
    import shlex

    from config import TrainConfig, load_config

    settings = SMALL | {"epsilon": "0.3", "tools": "calculator", "reward_funcs": "last_number", "use_peft": "true"}
    settings |= {"system_prompt": "- Be brief, 'please'.", "chat_template_kwargs": '{"a": 1}', "eval_split": "none"}
    found = told(page, "check", settings)
    words = shlex.split(found["command"])[2:]
    cfg = load_config(TrainConfig, words)
    assert cfg.system_prompt == settings["system_prompt"] and cfg.chat_template_kwargs == {"a": 1}
    assert cfg.epsilon == 0.3 and cfg.tools == ["calculator"] and cfg.use_peft and cfg.eval_split is None
    assert {"epsilon", "use_peft", "model_id"} <= set(found["differs"]) and "beta" not in found["differs"]
    path = page.folder.parent / "same.yaml"
    path.write_text(found["yaml"], encoding="utf-8")
    own = ["--run_name", cfg.run_name, "--output_dir", cfg.output_dir]
    assert load_config(TrainConfig, ["--config", str(path), *own]) == cfg


def test_a_reward_that_raises_is_named_with_its_line_and_one_that_was_edited_is_read_again(page):
    file = page.folder.parent / "own_reward.py"
    settings = SMALL | {"reward_funcs": f"last_number {file.name}:own"}
    given = [{"text": "21"}, {"text": "no"}]
    code = "def own(completions, **_):\n    print('seen', len(completions))\n    return [1 / 0]\n"
    file.write_text(code, encoding="utf-8")
    right, own = told(page, "score", settings, row=1, completions=given)["functions"]
    assert right["values"] == [1, 0] and right["error"] is None
    assert "ZeroDivisionError" in own["error"] and own["said"] == "seen 2\n"
    assert (own["where"]["file"], own["where"]["line"]) == (file.name, 3)
    file.write_text("def own(completions, **_):\n    return [{'a': 0.5, 'b': 1}, None]\n", encoding="utf-8")
    found = told(page, "score", settings, row=1, completions=given)
    own = found["functions"][1]
    assert own["values"][0] == 1.5 and own["components"][0] == {"a": 0.5, "b": 1} and own["values"][1] is None
    assert [round(c["advantage"], 3) for c in found["completions"]] == [0.707, -0.707]


@pytest.mark.parametrize(
    "code, text",
    [
        ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
        ("import os; os._exit(3)", "status 3"),
        ("raise SystemExit(4)", None),
        ("while True: pass", None),
    ],
)
def test_what_never_ends_or_crashes_takes_nothing_along(page, code, text):
    file = page.folder.parent / "crash.py"
    file.write_text(f"def own(completions, **_):\n    {code}\n", encoding="utf-8")
    settings = SMALL | {"reward_funcs": f"{file.name}:own", "reward_timeout": "1"}
    answer = post(page, "score", settings=settings, row=1, completions=[{"text": "21"}])
    if text:
        assert answer.status_code == 422 and text in answer.json()["error"], answer.text
    else:
        (own,) = answer.json()["functions"]
        assert own["error"] or own["late"]
    assert page.ask("/api/runs").status_code == 200


def test_a_session_gives_the_memory_of_what_sampled_back():
    """It may wait for long beside a training, with what torch keeps of the GPU; also after an error."""
    code = """
import json, os, socket, sys, weakref
from unittest.mock import MagicMock
sys.modules |= {name: MagicMock() for name in ("torch", "looking.answers", "looking.answers.settings")}
import torch
from looking import bench

class Model:
    pass

def score(script, given):
    model = Model()
    model.itself = model
    sampled.append(weakref.ref(model))
    raise ValueError("out of memory")

sampled, out, (ours, theirs) = [], os.dup(1), socket.socketpair()
bench.apart, bench.ACTIONS["score"], bench.os.setsid = lambda *_: False, score, lambda: None
torch.cuda.empty_cache = lambda: os.write(out, f"{[model() for model in sampled]}".encode())
ours.sendall(json.dumps({"action": "score", "given": {}}).encode() + b"\\n")
ours.shutdown(socket.SHUT_WR)
bench.session(None, theirs.detach(), os.dup(2))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (0, "[None]"), done.stderr
