"""The page's server: who may ask, and what is answered of runs that grow, are torn, or gone. In a browser:
test_look_browser.py."""

import fcntl
import json
import os
import shutil
import socket
import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from made_runs import FIRST_WORD, PIECES, make_run, vocabulary
from starlette.testclient import TestClient

import look
from config import ConfigError
from looking.runs import Runs
from looking.server import ANSWERS, make_app
from runfiles import samples

pytestmark = pytest.mark.quick

PLACE = {"run": "one", "kind": "completions", "step": 40, "row": 3}


def client(folder, token: str | None = "a token") -> TestClient:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return TestClient(make_app(folder, "a token", []), headers=headers, raise_server_exceptions=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", seed=1)
    make_run(folder / "sweep" / "two", seed=2, learning_rate=1e-5)
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return client(folder)


def get(page, name: str, **parameters) -> dict:
    answer = page.get(f"/api/{name}", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


# ---- who may ask ----------------------------------------------------------------------------------------------------


def test_every_answer_about_runs_asks_for_the_token_and_other_scripts_are_forbidden(folder, page):
    stranger, guesser = client(folder, None), client(folder, "wrong")
    for name in (*ANSWERS, "run", "none", "try"):
        answers = [stranger.get(f"/api/{name}"), guesser.get(f"/api/{name}")]
        answers += [stranger.get(f"/api/{name}?token=a token")]  # a link cannot ask
        assert [answer.status_code for answer in answers] == [401] * 3, name
    for answer in (stranger.get("/"), *answers, page.get("/api/runs"), page.get("/api/run?run=one")):
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff" and "a token" not in answer.text
    assert stranger.get("/page/app.js").status_code == 200, "the page itself is no secret"


@pytest.mark.parametrize(
    "path", ["run?run=one/../../secret", "run?run=/etc", "row?run=one&kind=../../secret&step=40&row=0"]
)
def test_nothing_outside_of_the_folder(folder, page, path):
    make_run(folder.parent / "secret", steps=2, files=1)
    assert page.get(f"/api/{path}").status_code == 404
    assert page.get("/page/../told.py").status_code == 404 == page.get("/page/%2e%2e/told.py").status_code


def test_nothing_in_a_run_folder_changes(tmp_path):
    folder = make_run(tmp_path / "one", state="running")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    page = client(tmp_path)
    for name in ("runs", "run", "steps", "listing", "row", "tokens"):
        get(page, name, **PLACE)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_what_cannot_work_is_said(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        look.main([str(tmp_path / "none")])
    with look.bound(0) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="Give another --port"):
        look.main([str(tmp_path), "--try", "--model_id", "m", "--port", str(taken.getsockname()[1])])


# ---- what is answered -----------------------------------------------------------------------------------------------


def test_the_table(folder, page):
    found = {run["name"]: run for run in get(page, "runs")["runs"]}
    assert found.keys() == {"one", "sweep/two"}
    one, text = found["one"], (folder / "one" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    solved = [line["eval/mean@4"] for line in lines if "eval/mean@4" in line]
    assert (one["state"], one["step"], one["steps"], one["algorithm"]) == ("finished", 40, 40, "grpo / ppo")
    assert (one["metric"], one["first"], one["last"]) == ("mean@4", *map(pytest.approx, (solved[0], solved[-1])))
    assert one["reward"] == pytest.approx(lines[-2]["reward"])
    assert [run["name"] for run in get(client(folder / "one"), "runs")["runs"]] == ["one"], "a run itself can be given"


def test_every_metric_is_drawn_over_steps_tokens_and_seconds(folder, page):
    lines = [json.loads(line) for line in (folder / "one" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if "reward" in line]
    axes = {axis: get(page, "run", run="one", x=axis)["panels"] for axis in ("step", "tokens", "seconds")}
    entropy = {x: next(p for p in panels if p["title"] == "Entropy")["curves"][0] for x, panels in axes.items()}
    assert entropy["step"]["x"] == [*range(1, 41)] and entropy["step"]["y"] == pytest.approx(
        [n["entropy"] for n in lines]
    )
    assert entropy["tokens"]["x"] == pytest.approx([9000 * n for n in range(1, 41)])
    assert entropy["seconds"]["x"] == pytest.approx([10.2 * n for n in range(1, 41)])
    shown = {curve["name"] for panel in axes["step"] for curve in panel["curves"]}
    hidden = {"step", "num_tokens"} | {name for name in lines[0] if name.startswith("time/")}
    assert not lines[0].keys() - hidden - shown, "every metric is drawn"


def test_several_runs_over_each_other(tmp_path):
    make_run(tmp_path / "one", seed=1, files=0)
    make_run(tmp_path / "two", seed=2, learning_rate=0.1, files=0)
    found = get(client(tmp_path), "run", run=["one", "two"])
    assert found["settings"]["learning_rate"] == [3e-4, 0.1] and "advantage" not in found["settings"]
    reward = next(panel for panel in found["panels"] if panel["note"] == "reward")["curves"]
    assert [curve["run"] for curve in reward] == [0, 1] and len(reward[0]["x"]) == 40


def test_a_trajectory_with_calls_and_tokens(folder, page):
    row, tokens = (get(page, name, **PLACE) for name in ("row", "tokens"))
    rows = pq.read_table(folder / "one/completions/step_000040.parquet").to_pylist()
    assert row["turns"][0]["calls"][0]["name"] == "calculator" and row["turns"][0]["calls"][0]["result"] == "42"
    assert tokens["completion"]["ids"] == rows[3]["token_ids"]
    assert tokens["columns"]["trained"] == rows[3]["tokens/trained"]
    assert tokens["columns"]["weight"] == pytest.approx(rows[3]["tokens/weight"], abs=1e-3)
    unknown = [value is None for value in tokens["columns"]["sampler_logprob"]]
    assert unknown == [not trained for trained in rows[3]["tokens/trained"]], "what no sampler sampled has no log-prob"
    assert tokens["turns"] == [[turn["start"], turn["end"]] for turn in rows[3]["turns"]]


def test_the_list_finds_text_in_any_alphabet(folder, page, tmp_path):
    listing = get(page, "listing", **PLACE)
    assert len(listing["group"]) == 16 and set(listing["rewards"]) == {"right", "format"}
    rows = pq.read_table(folder / "one/completions/step_000040.parquet").to_pylist()
    word = rows[5]["turns"][0]["text"].split()[2]
    hits = {n for n, row in enumerate(rows) if word.lower() in json.dumps(row["turns"], ensure_ascii=False).lower()}
    assert hits <= set(get(page, "search", **PLACE, text=word.upper())["rows"])
    assert get(page, "search", **PLACE, text="nowhere at all")["rows"] == []
    assert page.get("/api/row", params=PLACE | {"row": 16}).status_code == 422
    from runlog.log import write_table

    texts = ["Привет, мир", 'I write "x" and \\boxed{3}', "line\nbreak"]
    write_table(tmp_path / "step_000001.parquet", [{"prompt": "x", "completion": text} for text in texts])
    for number, text in enumerate(["ПРИВЕТ", '"X" and \\boxed', "e\nb"]):
        assert samples.search(tmp_path / "step_000001.parquet", text) == [number]


def test_a_character_of_several_tokens(tmp_path):
    vocabulary(tmp_path)
    assert PIECES[3:6] == [b"\xc3", b"\xa9", b"\xff"]
    ids = np.array([FIRST_WORD, 3, 4, 5, 3, 2, 99999, 3, FIRST_WORD])
    shown = samples.token_texts(ids, samples.vocabulary(tmp_path))
    assert shown["text"] == [" we", "", "é", "\\xff", "\\xc3", "<|im_end|>", "#99999", "", "\\xc3 we"]
    assert shown["special"] == [5]


# ---- while others write ---------------------------------------------------------------------------------------------


def test_lines_arrive_and_a_resumed_run_begins_anew(tmp_path):
    folder = make_run(tmp_path / "run", steps=10, files=0)
    run = Runs(tmp_path).get("run")
    assert run.curves().all("reward")[0].tolist() == list(range(1, 11)) and run.summary()["step"] == 10
    line = json.dumps({"step": 11, "reward": 0.5, "time/unix": 1.8e9})
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(line[:9])
        file.flush()
        assert run.curves().all("reward")[0][-1] == 10  # it is being written
        file.write(line[9:] + "\n")
    assert run.curves().all("reward")[0][-1] == 11 and run.summary()["step"] == 11
    kept = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(True)[:3]
    (folder / "metrics.partial").write_text("".join(kept) + '{"step": 4, "reward": 9}\n', encoding="utf-8")
    os.replace(folder / "metrics.partial", folder / "metrics.jsonl")  # as a resumed run rewrites it
    assert run.curves().all("reward")[0].tolist() == [1, 2, 3, 4] and run.summary()["reward"] == 9


def test_a_run_of_100000_steps_opens_in_under_a_second(tmp_path):
    """Processor time, of a file of 150 MB: some of its steps are read, and all of its evaluations."""
    line = json.dumps({"step": 0, **{f"rewards/function_{n}/mean": 0.123456789 + n for n in range(30)}})
    with open(make_run(tmp_path / "run", files=0) / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, 100_001):
            file.write(line.replace('"step": 0', f'"step": {step}') + "\n")
            if step % 10_000 == 0:
                file.write(f'{{"step": {step}, "eval/mean@4": {step / 1e6}}}\n')
    page, begun = client(tmp_path), time.process_time()
    found = get(page, "run", run="run")
    assert time.process_time() - begun < 1
    (summary,) = found["runs"]
    assert summary["step"] == 100_000 and summary["first"] == 0.01 and found["stride"] == 100
    held_out = next(panel for panel in found["panels"] if panel["title"] == "Reward")["curves"][0]
    assert held_out["x"] == list(range(10_000, 100_001, 10_000))


def test_each_run_that_is_torn_or_gone_fails_alone(tmp_path):
    for name in ("torn", "half", "gone"):
        make_run(tmp_path / name)
    metrics = tmp_path / "torn" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(True)
    bad = [b'{"step": 3, "rew\n', b"\xff\xfe\n", b"null\n", b'{"step": "x"}\n']
    metrics.write_bytes(b"".join([*lines[:5], *bad, *lines[5:], b'{"step": 99, "re']))
    kept = tmp_path / "half" / "completions" / "step_000040.parquet"
    kept.write_bytes(kept.read_bytes()[:1000])
    (tmp_path / "half" / "vocabulary.parquet").write_bytes(b"PAR1")
    (tmp_path / "half" / "config.json").write_text('{"model_', encoding="utf-8")
    page = client(tmp_path)
    assert len(get(page, "runs")["runs"]) == 3
    assert get(page, "run", run="torn")["runs"][0]["step"] == 40
    answer = page.get("/api/listing", params=PLACE | {"run": "half"})
    assert answer.status_code == 422 and "half written" in answer.json()["error"]
    get(page, "run", run="half")
    shown = get(page, "tokens", **PLACE | {"run": "half", "step": 39})["completion"]["text"]
    assert shown[0].startswith("#"), "without a vocabulary the numbers are shown"
    shutil.rmtree(tmp_path / "gone")
    assert page.get("/api/run", params={"run": "gone"}).status_code == 404
    assert len(get(page, "runs")["runs"]) == 2


def test_whether_a_run_runs(tmp_path):
    """By the lock that its process holds, whatever it said last."""
    for name in ("running", "failed", "killed"):
        make_run(tmp_path / name, files=0, state="running" if name == "killed" else name)
    for name, steps in (("unfinished", 60), ("finished", 40)):  # as of train_minimal.py
        (make_run(tmp_path / name, files=0, max_steps=steps) / "state.json").unlink()
    elsewhere = make_run(tmp_path / "elsewhere", files=0, state="running") / "state.json"
    told = json.loads(elsewhere.read_text(encoding="utf-8")) | {"host": "another", "updated": time.time() - 7200}
    elsewhere.write_text(json.dumps(told), encoding="utf-8")
    runs = Runs(tmp_path)
    with open(tmp_path / "running" / "lock", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        states = {run.name: run.state() for run in runs.all()}
    assert {name: state for name, (state, _) in states.items()} == {
        "running": "running", "failed": "failed", "killed": "killed", "elsewhere": "silent",
        "unfinished": "unfinished", "finished": "finished",
    }  # fmt: skip
    assert "CUDA" in states["failed"][1] and "120 min" in states["elsewhere"][1]
    assert runs.get("running").state()[0] == "killed", "the process ended without a word"
