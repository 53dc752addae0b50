"""look.py: who may ask, what is answered of torn, deleted and growing runs, and how long it takes. The page itself is
in test_look_browser.py."""

import contextlib
import errno
import fcntl
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from certificates import Authority
from looking.launches import born
from looking_at import looking
from made_runs import FAULTS, completions_table, make_run, metrics_line, vocabulary, write_step

from looking.runs import Runs
from runlog import advice, samples
from runlog.curves import Curves, merged, panels
from runlog.log import write_table

ROOT = Path(__file__).parent.parent
PLACE = {"kind": "completions", "step": 40, "row": 3}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "one", seed=1)
    make_run(folder / "sweep" / "two", seed=2, learning_rate=1e-5)
    with looking(folder) as page:
        yield page


# ---- who may ask ----------------------------------------------------------------------------------------------------


def test_without_the_token_nothing_is_answered(page):
    for path in ("/", "/page/app.js", "/page/uplot.js", "/page/none", "/api/runs", "/api/run?run=one", "/api/picture"):
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": "look=wrong"}):
            answer = requests.get(page.root + path, headers=given, timeout=10)
            assert answer.status_code == 401 and "one" not in answer.json()["error"].split(), path
    assert requests.get(f"{page.root}/?token=wrong", timeout=10).status_code == 401


def test_the_token_opens_by_address_cookie_and_header(page):
    first = requests.get(page.address, timeout=10)
    assert first.status_code == 200 and page.token not in first.text
    cookie = first.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    assert requests.get(f"{page.root}/api/runs", cookies=first.cookies, timeout=10).status_code == 200
    bearer = {"Authorization": f"Bearer {page.token}"}
    assert requests.get(f"{page.root}/api/runs", headers=bearer, timeout=10).status_code == 200


def test_under_tls_the_cookie_is_for_tls_only(page, tmp_path):
    assert "secure" not in requests.get(page.address, timeout=10).headers["Set-Cookie"].lower()
    authority = Authority(tmp_path)
    with looking(tmp_path, "--ssl-certfile", str(authority.sign("page"))) as safe:
        answer = requests.get(safe.address, timeout=10, verify=authority.file)
        assert "; secure" in answer.headers["Set-Cookie"].lower()
        again = requests.get(f"{safe.root}/api/runs", cookies=answer.cookies, timeout=10, verify=authority.file)
        assert again.status_code == 200


def test_pages_behind_two_forwarded_ports_keep_their_cookies_apart(page):
    """Cookies do not know ports, and `ssh -L 7001:127.0.0.1:6060` gives the browser another one than the page has."""
    names = []
    for port in (7001, 7002):
        answer = requests.get(page.address, headers={"Host": f"127.0.0.1:{port}"}, timeout=10)
        names += answer.cookies.keys()
        given = {"Host": f"127.0.0.1:{port}", "Cookie": f"{names[-1]}={page.token}"}
        assert requests.get(f"{page.root}/api/runs", headers=given, timeout=10).status_code == 200
    assert len(set(names)) == 2


def test_an_endless_header_is_refused_and_costs_no_memory(page):
    before = psutil.Process(page.process.pid).memory_info().rss
    with socket.create_connection(("127.0.0.1", page.port), timeout=20) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
        with contextlib.suppress(OSError):  # it hangs up
            for number in range(60):
                stranger.sendall(b"X-%d: " % number + bytes([97]) * 2**20 + b"\r\n")
        with contextlib.suppress(OSError):
            assert stranger.recv(100).startswith(b"HTTP/1.1 431")
    assert psutil.Process(page.process.pid).memory_info().rss - before < 20 << 20


def test_half_open_connections_keep_nobody_out(page):
    """Some say nothing, some begin a request; more of them than the page lets in."""
    opened = []
    try:
        for number in range(1500):
            opened.append(socket.create_connection(("127.0.0.1", page.port), timeout=20))
            if number % 3:
                with contextlib.suppress(OSError):
                    opened[-1].sendall(b"GET / HTTP/1.1\r\nHost: a\r\n"[: number % 25])
        deadline, answered = time.monotonic() + 15, False
        while not answered and time.monotonic() < deadline:  # for two seconds each of them may yet say more
            with contextlib.suppress(requests.RequestException):
                answered = page.ask("/api/runs").status_code == 200
        assert answered and time.monotonic() < deadline - 8
    finally:
        for one in opened:
            one.close()


def test_every_answer_forbids_other_scripts(page):
    for path in ("/", "/page/app.js", "/api/runs", "/api/run?run=none"):
        policy = page.ask(path).headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert page.ask(path).headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/api/run?run=../secret",
        "/api/run?run=/etc",
        "/api/run?run=one/../../secret",
        "/api/run?run=",
        "/api/run",
        "/api/run?run=linked",
        "/api/steps?run=one/completions",
        "/api/row?run=one&kind=../../secret&step=40&row=0",
        "/api/row?run=one&kind=completions&step=../40&row=0",
        "/api/row?run=one&kind=completions&step=-1&row=0",
        "/api/listing?run=one&kind=completions&step=41",
        "/api/listing?run=one&kind=completions&step=39999",
        "/page/../look.py",
        "/page/..%2f..%2flook.py",
        "/page/%2e%2e/server.py",
        "/etc/passwd",
        "/api/none",
    ],
)
def test_nothing_outside_of_the_folder(page, path):
    secret = page.folder.parent / "secret"
    make_run(secret, steps=2, files=1)
    (page.folder / "one" / "completions" / "step_039999.parquet").unlink(missing_ok=True)
    (page.folder / "one" / "completions" / "step_039999.parquet").symlink_to(secret / "completions/step_000002.parquet")
    if not (page.folder / "linked").is_symlink():
        (page.folder / "linked").symlink_to(secret)
    assert page.ask(path).status_code == 404


def test_only_get_is_answered(page):
    for method in ("post", "put", "delete", "patch"):
        answer = getattr(requests, method)(f"{page.root}/api/runs?token={page.token}", timeout=10)
        assert answer.status_code == 405


# ---- what is answered -----------------------------------------------------------------------------------------------


def test_the_table(page):
    found = {run["name"]: run for run in page.ask("/api/runs").json()["runs"]}
    assert found.keys() == {"one", "sweep/two"}
    one = found["one"]
    assert one["state"] == "finished" and one["step"] == one["steps"] == 40 and one["algorithm"] == "grpo / ppo"
    lines = [
        json.loads(line) for line in (page.folder / "one" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    solved = [line["eval/mean@4"] for line in lines if "eval/mean@4" in line]
    assert (
        one["metric"] == "mean@4"
        and one["last"] == pytest.approx(solved[-1])
        and one["first"] == pytest.approx(solved[0])
    )
    assert one["best"] == pytest.approx(max(solved)) and one["reward"] == pytest.approx(lines[-2]["reward"])


def test_every_metric_is_in_one_panel():
    line = {"step": 1, "eval/mean@4": 0.5, "eval/code/mean@4": 0.5, "eval/rewards/right/mean": 1.0, "odd/<key>": 3}
    steps = [metrics_line(step, 20, None, random.Random(0)) for step in range(1, 21)]
    shown = [name for _, _, labels in panels(Curves([*steps, line]), {}) for name in labels]
    assert len(shown) == len(set(shown))
    hidden = {"reward", "reward_std", "num_tokens", "step"} | {name for name in steps[0] if name.startswith("time/")}
    assert set(shown) == (steps[0].keys() | line.keys()) - hidden


def test_what_a_run_used_of_a_shared_server_is_drawn_in_words():
    line = {"step": 1, "server/tokens": 90, "server/sampling_seconds": 2.5, "server/waited_seconds": 0.5}
    drawn = {title: (note, [*labels.values()]) for title, note, labels in panels(Curves([line]), {})}
    assert drawn["Tokens from a server that runs share"][1] == ["tokens"]
    note, labels = drawn["Time at a server that runs share"]
    assert labels == ["sampling_seconds", "waited_seconds"] and "waiting for their turn" in note and len(drawn) == 2


def test_of_a_long_run_few_points_are_kept_and_every_extreme():
    rng, odd = random.Random(0), {7_777: 50.0, 12_345: -40.0, 29_000: 60.0}
    value = {step: odd.get(step, rng.gauss(1, 0.1)) for step in range(1, 30_001)}
    lines = [
        {"step": n, "reward": v, "lost": v, "time/step": 2.0, "failed": float(n % 100 == 0)} for n, v in value.items()
    ]
    lines = [line if n % 3 else {k: v for k, v in line.items() if k != "lost"} for n, line in enumerate(lines)]
    bit_by_bit, at_once, exact = Curves(most=4096), Curves(most=4096), Curves(lines)
    for start in range(0, len(lines), 700):
        bit_by_bit = bit_by_bit.copy()
        bit_by_bit.add(lines[start : start + 700])
    at_once.add(lines)
    for curves in (bit_by_bit, at_once):
        assert all(curves.length(name) <= 4096 for name in curves.columns)
        assert curves.size() == exact.size() == 128
        for name in ("reward", "lost"):
            drawn, expected = (merged(one.points(name), 128) for one in (curves, exact))
            assert drawn == pytest.approx(expected) and drawn.shape[1] <= 400
            assert {round(v) for v in drawn[2:4].ravel()} >= {50, -40, 60} or name == "lost"
        first, last = curves.all("reward")[1][:64], curves.all("reward")[1][-64:]
        assert [*first, *last] == [value[n] for n in (*range(1, 65), *range(29_937, 30_001))]
        assert curves.total("failed") == 300 and curves.count("reward") == 30_000
        assert curves.axis("seconds")[1][-1] == pytest.approx(60_000)
        steps, split = curves.phases(128)
        assert split["other"] == pytest.approx(np.full(len(steps), 2.0)) and len(steps) == 235
        assert advice.since(*(lambda x, y: (x, y > 0))(*curves.all("reward"))) == 1


def test_curves_by_tokens_and_seconds(page):
    by_step, by_tokens, by_seconds = (
        next(p for p in page.ask(f"/api/run?run=one&x={x}").json()["panels"] if p["title"] == "Entropy")["curves"][0]
        for x in ("step", "tokens", "seconds")
    )
    assert by_step["x"] == list(range(1, 41)) and by_step["y"] == by_tokens["y"] == by_seconds["y"]
    assert by_tokens["x"] == pytest.approx([9000 * step for step in by_step["x"]])
    assert by_seconds["x"] == pytest.approx([10.2 * step for step in by_step["x"]])


def test_runs_that_differ_in_the_seed_become_a_mean_with_a_band(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"seed{seed}", seed=seed, files=0)
    make_run(tmp_path / "other", learning_rate=0.1, files=0)
    names = "&".join(f"run={name}" for name in ("seed0", "seed1", "other", "seed2", "none"))
    with looking(tmp_path) as page:
        apart, together = (page.ask(f"/api/compare?{names}&seeds={n}").json() for n in (0, 1))
    assert apart["gone"] == ["none"] and {key: len(v) for key, v in apart["settings"].items()}["learning_rate"] == 4
    assert "advantage" not in apart["settings"]
    reward, mean = (next(p for p in found["panels"] if p["name"] == "reward")["curves"] for found in (apart, together))
    assert [curve["runs"] for curve in reward] == [[0], [1], [2], [3]]
    assert [curve["runs"] for curve in mean] == [[0, 1, 3], [2]]
    values = [reward[n]["y"][20] for n in (0, 1, 3)]
    assert mean[0]["y"][20] == pytest.approx(sum(values) / 3, abs=1e-4)
    assert (mean[0]["low"][20], mean[0]["high"][20]) == pytest.approx((min(values), max(values)), abs=1e-4)


def test_a_trajectory_with_calls_and_tokens(page):
    row = page.ask("/api/row", run="one", **PLACE).json()
    assert [turn["calls"][0]["name"] for turn in row["turns"][:1]] == ["calculator"]
    assert row["turns"][0]["calls"][0]["result"] == "42" and row["turns"][0]["state"] == "n=3"
    tokens = page.ask("/api/tokens", run="one", **PLACE).json()
    whole = pq.read_table(page.folder / "one/completions/step_000040.parquet").to_pylist()[3]
    assert tokens["completion"]["ids"] == whole["token_ids"] and tokens["columns"]["trained"] == whole["tokens/trained"]
    shown = [
        (a is None, b is None)
        for a, b in zip(tokens["columns"]["sampler_logprob"], whole["tokens/trained"], strict=True)
    ]
    assert {missing for missing, _ in shown} == {True, False}  # what no sampler sampled has no log-prob
    assert tokens["turns"] == [[turn["start"], turn["end"]] for turn in whole["turns"]]


def test_colours_can_be_scaled_by_all_tokens_of_the_step(page):
    scales = page.ask("/api/scales", run="one", **PLACE).json()
    rows = pq.read_table(page.folder / "one/completions/step_000040.parquet").to_pylist()
    entropy = np.abs(np.concatenate([row["tokens/entropy"] for row in rows]).astype(float))
    assert scales["entropy"] == pytest.approx(np.nanquantile(entropy, 0.98), rel=1e-3)
    assert {"advantage", "weight", "logprob", "difference"} <= scales.keys()


def test_the_table_says_what_stands_out_and_a_run_what_is_not_as_usual(tmp_path):
    make_run(tmp_path / "sick", steps=60, rows=64, fault="stale", learning_rate=3e-4)
    make_run(tmp_path / "well", steps=60, rows=64)
    with looking(tmp_path) as page:
        deadline, found = time.monotonic() + 30, {}
        while not (found and all("notes" in run for run in found.values())) and time.monotonic() < deadline:
            time.sleep(0.2)
            found = {run["name"]: run for run in page.ask("/api/runs").json()["runs"]}
        assert found["sick"]["note"] == "A stale server" and found["sick"]["level"] == "bad"
        assert found["well"]["note"] == "" and found["well"]["notes"] == 0
        differs = page.ask("/api/run", run="sick").json()["differs"]
        assert "learning_rate" in differs and "gamma" not in differs


def test_the_list_finds_and_counts(page):
    listing = page.ask("/api/listing", run="one", **PLACE).json()
    assert len(listing["group"]) == 16 and set(listing["rewards"]) == {"right", "format"}
    table = pq.read_table(page.folder / "one/completions/step_000040.parquet").to_pylist()
    word = table[5]["turns"][0]["text"].split()[2]
    hits = [n for n, row in enumerate(table) if word.lower() in json.dumps(row["turns"], ensure_ascii=False).lower()]
    found = page.ask("/api/search", run="one", **PLACE, text=word.upper()).json()["rows"]
    assert 5 in found and set(hits) <= set(found)
    assert page.ask("/api/search", run="one", **PLACE, text="nowhere at all").json()["rows"] == []
    assert len(page.ask("/api/rows", run="one", **PLACE, rows="0,1,7").json()["rows"]) == 3
    assert page.ask("/api/row", run="one", kind="completions", step=40, row=16).status_code == 422


def test_a_prompt_over_time(page):
    found = page.ask("/api/over_time", run="one", kind="evaluations", step=40, row=2).json()
    assert [one["step"] for one in found["found"]] == [10, 20, 30, 40] and found["next"] is None
    assert found["prompt"] == "What is 2 + 2?"


def test_files_of_older_runs(tmp_path):
    """No tokens, no groups, turns as JSON text with calls as text, no state."""
    folder = make_run(tmp_path / "old", files=0, state=None)
    (folder / "vocabulary.parquet").unlink()
    turns = json.dumps([{"text": "calls", "observation": ["42"], "calls": ["calculator 0.02 s"], "reward": 0.5}])
    rows = {
        "prompt": ["a", "a", "b"],
        "completion": ["x", "y", "z"],
        "reward": [1.0, 0.0, None],
        "turns": [turns, None, "{"],
    }
    write_step(folder / "completions" / "step_000007.parquet", pa.table(rows))
    with looking(tmp_path) as page:
        place = {"run": "old", "kind": "completions", "step": 7}
        assert page.ask("/api/listing", **place).json()["group"] == [0, 0, 1]
        row = page.ask("/api/row", **place, row=0).json()
        assert row["turns"][0]["calls"] == [{"name": "calculator 0.02 s"}] and not row["tokens"]
        assert page.ask("/api/row", **place, row=2).json()["turns"] == []
        assert page.ask("/api/tokens", **place, row=0).json() == {}
        assert page.ask("/api/notes", run="old").status_code == 200


def test_a_character_of_several_tokens(tmp_path):
    vocabulary(tmp_path)
    known = samples.vocabulary(tmp_path)
    from made_runs import FIRST_WORD, PIECES

    assert PIECES[3:6] == [b"\xc3", b"\xa9", b"\xff"]
    shown = samples.spelled(np.array([FIRST_WORD, 3, 4, 5, 3, 2, 99999, 3, FIRST_WORD, 3]), known)
    texts = [" we", "", "é", "\\xff", "\\xc3", "<|im_end|>", "#99999", "\\xc3", " we", "\\xc3"]
    assert shown["text"] == texts and shown["special"] == [5]
    assert shown["bytes"][1] == "c3" and shown["bytes"][2] == "a9" and 3 not in shown["bytes"]


# ---- while others write ---------------------------------------------------------------------------------------------


def test_lines_arrive_and_a_resumed_run_begins_anew(tmp_path):
    folder = make_run(tmp_path / "run", steps=10, files=0)
    run = Runs(tmp_path).get("run")
    assert run.curves().all("reward")[0].tolist() == list(range(1, 11)) and run.summary()["step"] == 10
    line = json.dumps({"step": 11, "reward": 0.5, "time/unix": 1.8e9})
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(line[:9])
        file.flush()
        assert run.curves().all("reward")[0][-1] == 10 and run.unreadable == 0  # not yet: it is being written
        file.write(line[9:] + "\n")
    assert run.curves().all("reward")[0][-1] == 11 and run.summary()["step"] == 11
    partial = folder / "metrics.partial"  # as a resumed run rewrites it
    partial.write_text(
        "".join((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines(True)[:3])
        + '{"step": 4, "reward": 9}\n',
        encoding="utf-8",
    )
    os.replace(partial, folder / "metrics.jsonl")
    assert run.curves().all("reward")[0].tolist() == [1, 2, 3, 4] and run.summary()["reward"] == 9


def test_a_run_that_was_resumed_twice_between_two_looks_begins_anew(tmp_path):
    """The second file may have the inode of the one that was read: the file system gives it out again."""

    def lines(first, last, reward):
        return "".join(json.dumps({"step": n, "reward": reward}) + "\n" for n in range(first, last + 1))

    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text(lines(1, 20, 0.0), encoding="utf-8")
    run = Runs(tmp_path).get("run")
    assert run.curves().all("reward")[0][-1] == 20 and run.summary()["reward"] == 0
    mark, inode = run.curves().mark, metrics.stat().st_ino
    metrics.write_text(lines(1, 10, 0.0) + lines(11, 30, 1.0), encoding="utf-8")  # in place: the same inode
    assert metrics.stat().st_ino == inode
    steps, rewards = run.curves().all("reward")
    assert steps.tolist() == [*range(1, 31)] and rewards.tolist() == [0.0] * 10 + [1.0] * 20
    assert run.curves().mark != mark and run.summary()["step"] == 30
    metrics.write_text(lines(1, 5, 0.0) + lines(6, 9, 7.0), encoding="utf-8")
    assert run.curves().all("reward")[1].tolist() == [0.0] * 5 + [7.0] * 4 and run.summary()["step"] == 9


def curves_of(told: dict) -> list[dict]:
    more = [*told.get("times", ()), *([told["spread"]] if "spread" in told else ())]
    return more + [curve for panel in told["panels"] for curve in panel["curves"]]


def grown(before: dict, told: dict) -> dict:
    """As the page's own `grown` (dom.js)."""
    had = {curve["key"]: curve for curve in curves_of(before)}
    for curve in curves_of(told):
        assert curve["at"] <= len(had.get(curve["key"], {"x": []})["x"])
        for part in {"x", "y", "low", "high"} & curve.keys():
            curve[part] = had.get(curve["key"], {}).get(part, [])[: curve["at"]] + curve[part]
    return before | told


@pytest.mark.in_turn
@pytest.mark.parametrize("before", [30, 390, 1500])
@pytest.mark.parametrize("what", ["run?run=one", "run?run=one&x=seconds", "compare?run=one&run=two"])
def test_of_a_run_that_grows_the_page_gets_what_is_new(tmp_path, before, what):
    for name in ("one", "two"):
        make_run(tmp_path / name, steps=2000, files=0, state="running", evaluate=20)
    metrics = tmp_path / "one" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(True)
    metrics.write_bytes(b"".join(lines[:before]))
    with looking(tmp_path) as page:
        answer = page.ask(f"/api/{what}")
        has, whole = answer.json(), len(answer.content)
        for start in (before, before + 7, before + 15):
            with metrics.open("ab") as file:
                file.writelines(lines[start : start + 8])
            answer = page.ask(f"/api/{what}", {"If-None-Match": answer.headers["ETag"]})
            told = answer.json()
            if told.get("behind"):
                assert len(answer.content) < 0.5 * whole or before < 100
                told = grown(has, told)
            else:
                assert before == 390  # bins of another size
            has, expected = told, page.ask(f"/api/{what}").json()
            assert [curve | {"at": 0} for curve in curves_of(has)] == curves_of(expected)
            assert {
                key: has[key] for key in expected.keys() - {"panels", "times", "spread"}
            }.items() <= expected.items()
        assert has["behind"]
        assert page.ask(f"/api/{what}", {"If-None-Match": answer.headers["ETag"]}).status_code == 304
        what_it_has, lasts, _ = answer.headers["ETag"].strip('"').split("_")
        for last in ("", "nan", "inf,inf", "-inf", "1e308", f"{lasts},{lasts}", "x" * 3000):
            odd = page.ask(f"/api/{what}", {"If-None-Match": f'"{what_it_has}_{last}_"'})
            assert odd.status_code == 200, last


def test_torn_lines_half_files_and_deleted_runs(tmp_path):
    for name in ("torn", "half", "gone"):
        make_run(tmp_path / name)
    metrics = tmp_path / "torn" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(True)
    bad = [
        b'{"step": 3, "rew\n',
        b"\xff\xfe\n",
        b"null\n",
        b'{"step": "x"}\n',
        b'{"step": 1e400}\n',
        b"[" * 100000 + b"\n",
    ]
    metrics.write_bytes(b"".join([*lines[:5], *bad, *lines[5:], b'{"step": 99, "re']))
    whole = (tmp_path / "half" / "completions" / "step_000040.parquet").read_bytes()
    (tmp_path / "half" / "completions" / "step_000040.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "half" / "completions" / "step_000041.parquet").write_bytes(b"")
    (tmp_path / "half" / "vocabulary.parquet").write_bytes(b"PAR1")
    (tmp_path / "half" / "config.json").write_text('{"model_', encoding="utf-8")
    (tmp_path / "half" / "state.json").write_text("[1]", encoding="utf-8")
    with looking(tmp_path) as page:
        assert len(page.ask("/api/runs").json()["runs"]) == 3
        torn = page.ask("/api/run?run=torn").json()
        assert torn["unreadable"] == len(bad) and torn["summary"]["step"] == 40
        assert any(
            "6 lines of metrics.jsonl" in note["text"] for note in page.ask("/api/notes?run=torn").json()["notes"]
        )
        for step in (40, 41):
            answer = page.ask(f"/api/listing?run=half&kind=completions&step={step}")
            assert answer.status_code == 422 and "half written" in answer.json()["error"]
        assert page.ask("/api/run?run=half").status_code == 200
        assert any("cannot be read" in note["title"] for note in page.ask("/api/notes?run=half").json()["notes"])
        assert page.ask("/api/tokens?run=half&kind=completions&step=39&row=0").json()["completion"]["text"][0][0] == "#"
        assert page.ask("/api/run?run=gone").status_code == 200
        shutil.rmtree(tmp_path / "gone")
        assert page.ask("/api/run?run=gone").status_code == page.ask("/api/steps?run=gone").status_code == 404
        assert page.ask("/api/compare?run=gone&run=torn").json()["gone"] == ["gone"]
        assert len(page.ask("/api/runs").json()["runs"]) == 2


def test_states(tmp_path):
    for name in ("running", "failed", "interrupted"):
        make_run(tmp_path / name, files=0, state=name)
    make_run(tmp_path / "killed", files=0, state="running")
    make_run(tmp_path / "old", files=0, state=None)
    make_run(tmp_path / "stopped", files=0, state=None, max_steps=99)
    held = open(tmp_path / "running" / "lock", encoding="utf-8")
    fcntl.flock(held, fcntl.LOCK_EX)
    elsewhere = make_run(tmp_path / "elsewhere", files=0, state="running") / "state.json"
    told = json.loads(elsewhere.read_text(encoding="utf-8")) | {"host": "another", "updated": time.time() - 7200}
    elsewhere.write_text(json.dumps(told), encoding="utf-8")
    runs = Runs(tmp_path)
    states = {run.name: run.state() for run in runs.all()}
    assert {name: state for name, (state, _) in states.items()} == {
        "running": "running", "failed": "failed", "interrupted": "interrupted", "killed": "killed",
        "old": "finished", "stopped": "ended", "elsewhere": "silent",
    }  # fmt: skip
    assert "CUDA" in states["failed"][1] and "gone" in states["killed"][1] and "120 min" in states["elsewhere"][1]
    held.close()  # the process ends without a word
    assert runs.get("running").state()[0] == "killed"


def test_a_trainer_can_take_a_run_that_is_looked_at(tmp_path):
    """The page tries a free lock once; after that a process may take it at any time."""
    run = Runs(make_run(tmp_path / "run", files=0, state="running").parent).get("run")
    assert run.state()[0] == "killed"
    with open(tmp_path / "run" / "lock", "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert not run.held()  # not tried again ...
        file.write("process 1\n")
        file.flush()
        assert run.state()[0] == "running"  # ... until it changes


def test_a_pause_does_not_slow_the_steps_that_are_left_and_long_lines_are_found(tmp_path):
    """Three days between steps 50 and 51; then lines of 80 kB, as of many domains."""
    run = make_run(tmp_path / "a", steps=1, files=0)
    names = {f"domain/metric-{n}": 0.123456789012345 for n in range(2000)}
    lines = [{"step": n, "time/step": 10.0 + n % 2, "time/unix": 1e9 + 10 * n + 3e5 * (n > 50)} for n in range(1, 52)]
    for more in ({}, names):
        text = "".join(json.dumps(line | more) + "\n" for line in lines)
        (run / "metrics.jsonl").write_text(text, encoding="utf-8")
        summary = Runs(run).get("a").summary()
        assert summary["step"] == 51 and summary["pace"] == 10.5 and summary["seconds"] > 3e5, summary
    (run / "metrics.jsonl").write_text(
        text + json.dumps({"step": 51, "eval/reward": 1} | names) + "\n", encoding="utf-8"
    )
    assert Runs(run).get("a").summary()["step"] == 51


def test_a_search_finds_quotes_line_breaks_and_backslashes_in_messages_and_calls(tmp_path):
    call = {"name": "say", "arguments": json.dumps({"text": 'a "b"'}), "result": "", "seconds": 0.0}
    turn = {"text": 'I write "x" and \\boxed{3}', "observation": [], "calls": [call], "reward": 0.0}
    row = {"prompt": [{"role": "user", "content": 'Say "done".\nSimplify \\frac{1}{2}.'}], "turns": [turn]}
    row |= {"completion": "ok"}
    path = tmp_path / "step_000001.parquet"
    write_table(path, [row, {"prompt": "n", "completion": "done\\n", "turns": []}])
    for text in ('say "done"', '".\nsimplify', "\\frac{1}", "\\boxed{3}", '"x"', 'a "b"'):
        assert samples.search(path, text) == [0], text
    assert samples.search(path, "\n") == [0] and samples.search(path, "none") == []


def test_a_search_takes_no_note_of_case_in_any_alphabet(tmp_path):
    """Bytes that are no UTF-8, which others' files may have, hide nothing beside them."""
    path = tmp_path / "step_000001.parquet"
    texts = [text.encode() for text in ("Привет, мир", "Äpfel und Öl", "ΑΘΗΝΑ", "Hello World", "a \\E b")]
    column = pa.array([*texts, b"Hello \xff\xc4pfel"]).view(pa.string())
    pq.write_table(pa.table({"prompt": ["x"] * 6, "completion": column}), path)
    expected = {"привет": [0], "äPFEL": [1], "αθηνα": [2], "hello": [3, 5], "\\e": [4], "\ud83d": []}
    for text, rows in expected.items():
        assert samples.search(path, text) == rows, text


def test_the_gap_to_the_teacher_is_scaled_as_the_page_draws_it(tmp_path):
    logprobs = {"logprob": -1.0, "sampler_logprob": -3.0, "teacher_logprob": -0.5}
    row = {"prompt": "p", "completion": "c", "token_ids": np.arange(100)}
    row |= {f"tokens/{name}": np.full(100, value, np.float16) for name, value in logprobs.items()}
    write_table(path := tmp_path / "step_000001.parquet", [row])
    assert {name: samples.scales(path)[name] for name in ("difference", "gap")} == {"difference": 2.0, "gap": 2.5}


def test_a_process_is_known_again_after_the_clock_was_set(monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as process:
        begun, created = born(process.pid), psutil.Process(process.pid).create_time()
        monkeypatch.setattr(psutil.Process, "create_time", lambda self: created + 1)
        assert begun and born(process.pid) == begun != born(os.getpid())
        process.kill()
    assert born(process.pid) is None


def test_without_locks_a_run_is_known_by_its_process_and_by_what_it_says(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    run = Runs(make_run(tmp_path / "a", files=0, state="running")).get("a")
    told = json.loads((run.path / "state.json").read_text(encoding="utf-8"))
    ended = subprocess.Popen(["true"])
    ended.wait()
    cases = [
        ({}, "running"),
        ({}, "running"),
        ({"pid": ended.pid}, "killed"),
        ({"updated": told["updated"] - 7200}, "silent"),
    ]
    for change, state in cases:
        (run.path / "state.json").write_text(json.dumps(told | change), encoding="utf-8")
        assert run.state()[0] == state, change


def test_nothing_in_a_run_folder_changes(tmp_path):
    folder = make_run(tmp_path / "run", state="running")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with looking(tmp_path) as page:
        for path in ("runs", "run?run=run", "notes?run=run", "compare?run=run", "steps?run=run"):
            assert page.ask(f"/api/{path}").status_code == 200
        assert page.ask("/api/tokens", run="run", **PLACE).status_code == 200
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


# ---- runs that cannot be read ---------------------------------------------------------------------------------------


def pipe(folder):
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")


def told(folder, **changes):
    known = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    (folder / "state.json").write_text(json.dumps(known | changes), encoding="utf-8")


def away(folder, name):
    """The file as a link to another one of that name, which lies outside and has a secret in it."""
    outside = folder.parent.parent / f"outside_{name}"
    shutil.copy(folder / name, outside)
    with open(outside, "a", encoding="utf-8") as file:
        file.write("\n{}" if name.endswith("l") else "")
    (folder / name).unlink()
    (folder / name).symlink_to(outside)


def typed(folder):
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    lines.append(json.dumps({"step": 41, "reward": "high", "time/unix": 1.0}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def circle(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")


BROKEN = {
    "fifo": (pipe, "metrics.jsonl is no regular file"),
    "fifo_lock": (
        lambda f: (told(f, state="running"), (f / "lock").unlink(missing_ok=True), os.mkfifo(f / "lock")),
        "lock",
    ),
    "text": (lambda f: told(f, state="running", updated="x", host="elsewhere"), "state.json: updated is 'x'"),
    "list": (lambda f: told(f, num_steps=[4]), "state.json: num_steps is [4]"),
    "reward": (typed, "metrics.jsonl: reward is 'high'"),
    "config_away": (lambda f: away(f, "config.json"), "config.json is a link that leads out of the run folder"),
    "metrics_away": (lambda f: away(f, "metrics.jsonl"), "metrics.jsonl is a link that leads out"),
    "circle": (circle, "config.json cannot be read"),
}


@pytest.fixture(scope="module")
def ward(tmp_path_factory):
    """A page with a run for each of BROKEN, and a sound one."""
    folder = tmp_path_factory.mktemp("ward") / "runs"
    make_run(folder / "sound", steps=4, files=1)
    for name, (harm, _) in BROKEN.items():
        shutil.copytree(folder / "sound", folder / name)
        harm(folder / name)
    with looking(folder) as page:
        yield page


def test_each_run_fails_alone(ward):
    found = {run["name"]: run for run in ward.ask("/api/runs").json()["runs"]}
    assert found.keys() == {"sound", *BROKEN} and found["sound"]["state"] == "finished"
    for name, (_, why) in BROKEN.items():
        assert found[name]["state"] == "unreadable" and why in found[name]["why"], found[name]
        for path in ("run", "notes", "steps"):
            assert ward.ask(f"/api/{path}", run=name).status_code in (200, 422)
    said = ward.ask("/api/compare?run=sound&run=fifo&run=metrics_away").json()
    assert [run["name"] for run in said["runs"]] == ["sound"] and said["panels"] and len(said["unreadable"]) == 2


def test_links_out_of_a_run_are_not_followed(tmp_path):
    make_run(tmp_path / "secret", steps=4, files=1)
    secrets = {
        "config.json": '{"model_id": "canary"}',
        "command.txt": "canary",
        "git.diff": "canary",
        "state.json": "{}",
    }
    for name, text in secrets.items():
        (tmp_path / "secret" / name).write_text(text, encoding="utf-8")
    runs = tmp_path / "runs"
    make_run(runs / "files", steps=4, files=1)
    for name in (*secrets, "vocabulary.parquet"):
        (runs / "files" / name).unlink(missing_ok=True)
        (runs / "files" / name).symlink_to(tmp_path / "secret" / name)
    make_run(runs / "folder", steps=4, files=1)
    shutil.rmtree(runs / "folder" / "completions")
    (runs / "folder" / "completions").symlink_to(tmp_path / "secret" / "completions")
    with looking(runs) as page:
        for path in ("runs", "run?run=files", "notes?run=files", "compare?run=files", "run?run=folder"):
            assert "canary" not in page.ask(f"/api/{path}").text, path
        row = "kind=completions&step=4&row=0"
        assert page.ask("/api/steps?run=folder").status_code == 422
        for path in ("tokens?run=files", "tokens?run=folder", "over_time?run=folder", "listing?run=folder"):
            answer = page.ask(f"/api/{path}&{row}")
            assert answer.status_code in (404, 422) and "link" in answer.json()["error"], (path, answer.text)
        assert page.ask(f"/api/row?run=files&{row}").status_code == 200
        (runs / "files" / "vocabulary.parquet").unlink()
        os.mkfifo(runs / "files" / "vocabulary.parquet")
        assert page.ask(f"/api/tokens?run=files&{row}").status_code == 422


def test_a_folder_may_have_a_name_of_any_bytes(tmp_path):
    make_run(tmp_path / "runs" / "sound", steps=4, files=1)
    for name in (b"caf\xe9", b"caf\\xe9", "\u202egnorw \ud55c".encode()):
        shutil.copytree(tmp_path / "runs" / "sound", tmp_path / "runs" / os.fsdecode(name))
    os.rename(tmp_path / "runs", tmp_path / os.fsdecode(b"r\xff"))
    with looking(tmp_path / os.fsdecode(b"r\xff")) as page:
        names = [run["name"] for run in page.ask("/api/runs").json()["runs"]]
        assert len(set(names)) == 4 and r"caf\xe9" in names
        for name in names:
            assert page.ask("/api/run", run=name).json()["summary"]["step"] == 4, name


# ---- in words -------------------------------------------------------------------------------------------------------

NAMED = {
    "length": "Reward by length",
    "unmasked": "Observations are trained on",
    "stale": "A stale server",
    "entropy": "Entropy collapse",
    "domain": "Domain code",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_went_wrong_is_named(tmp_path, fault):
    folder = make_run(tmp_path / "run", steps=60, rows=64, fault=fault)
    run = Runs(tmp_path).get("run")
    found = advice.of_curves(run.curves(), run.config())
    found += advice.of_completions(samples.step_files(folder / "completions")[-1], run.config())
    assert NAMED[fault] in {note["title"] for note in found if note["level"] == "bad"}
    others = set(NAMED.values()) - {NAMED[fault]}
    assert not others & {note["title"] for note in found}


@pytest.mark.parametrize("steps", [3, 60, 2000])
def test_of_a_healthy_run_nothing_is_said(tmp_path, steps):
    folder = make_run(tmp_path / "run", steps=steps, rows=64, files=1)
    run = Runs(tmp_path).get("run")
    assert advice.of_curves(run.curves(), run.config()) == []
    assert advice.of_completions(samples.step_files(folder / "completions")[-1], run.config()) == []


def test_silent_groups_are_too_easy_or_too_hard():
    def told(reward):
        lines = [{"step": n, "reward": reward, "frac_reward_zero_std": 0.1 if n < 40 else 0.75} for n in range(1, 61)]
        return [note["text"] for note in advice.of_curves(Curves(lines), {})]

    assert len(told(0.98)) == 1 and told(0.98)[0].startswith("3 of 4 groups are silent since step 40: too easy")
    assert "too hard" in told(0.02)[0] and "score alike" in told(0.5)[0]


def test_entropy_may_fall_while_the_reward_grows():
    reward = [0.09, 0.31, 0.68, 0.41, 0.46, 0.5, 0.68, 0.8, 0.85, 0.78, 0.88, 0.89, 0.71, 0.83, 0.85, 0.86, 0.83, 0.89]
    entropy = [2, 0.94, 0.35, 0.28, 0.28, 0.2, 0.12, 0.1, 0.12, 0.14, 0.14, 0.14, 0.18, 0.19, 0.2, 0.2, 0.21, 0.2]
    lines = [{"step": n, "reward": r, "entropy": e} for n, (r, e) in enumerate(zip(reward, entropy, strict=True), 1)]
    for steps in range(1, len(lines) + 1):
        assert not [note for note in advice.of_curves(Curves(lines[:steps]), {}) if note["level"] == "bad"], steps


# What trainings that went wrong, most of them on purpose, had in their metrics, step by step.
WENT_WRONG = {
    "pays for words": (
        {"reward_funcs": ["last_number", "bad.py:thorough"], "max_completion_length": 64},
        {
            "reward": [0.65, 0.86, 0.94, 0.99, 1.0, 1.02, 1.01, 1.0, 1.0, 1.0, 1.0],
            "rewards/last_number/mean": [0.03, 0.03, 0.03, 0, 0, 0.02, 0.02, 0, 0, 0, 0],
            "rewards/thorough/mean": [0.62, 0.83, 0.91, 0.99, 1, 1, 1, 1, 1, 1, 1],
            "completions/mean_length": [36, 51, 57, 63, 64, 64, 64, 64, 64, 64, 64],
            "completions/clipped_ratio": [0.3, 0.53, 0.73, 0.95, 1, 1, 1, 1, 1, 1, 1],
            "frac_reward_zero_std": [0, 0.13, 0.13, 0.63, 1, 0.88, 0.75, 1, 1, 1, 1],
        },
        {"Rewards pull apart": "thorough rose from 0.62 to 1.00", "Cut off": "Is length rewarded?"},
        "too easy",
    ),
    "observations are trained on": (
        {"reward_funcs": ["environment"]},
        {
            "reward": [0.22, 0.18, 0.01, 0.14, 0.07, 0.12, 0.15, 0.08, 0.05, 0.12, 0.05, 0.04, 0.14, 0.08, 0.12],
            "rewards/environment/mean": [
                0.58, 0.67, 0.44, 0.36, 0.24, 0.5, 0.49, 0.3, 0.21, 0.37, 0.29, 0.06, 0.11, 0.16, -0.09,
            ],
            "unrewarded": [0] * 15,
            "sampling/logprob_diff_mean": [6.5, 7.5, 8.3, 8.5, 8.7, 8.7, 8.9, 9.2, 9.2, 9.1, 9.3, 9.6, 9.6, 9.6, 9.8],
        },
        {"Rewards are lost": "environment gave 0.67", "Trainer against generator": "From the start on"},
        "weights that sample are old",
    ),
    "weights never arrive": (
        {"reward_funcs": ["last_number"]},
        {
            "policy_lag": [0] * 15,
            "sampling/logprob_diff_mean": [0.04, 0.12, 0.26, 0.44, 0.7, 0.8, 0.9, 1, 1.2, 1.1, 1.2, 1.3, 1.2, 1.1, 1.1],
        },
        {"Trainer against generator": "by 0.04, by more than .05 since step 2.*are old, although they say"},
        "From the start on",
    ),
    "ten times the learning rate": (
        {"reward_funcs": ["last_number"]},
        {
            "lr": [0.003] * 15,
            "reward": [0.016] + [0] * 14,
            "entropy": [1.95, 0.82, 0.77, 0.61, 0.72, 0.78, 0.8, 0.83, 0.8, 0.89, 0.87, 0.85, 0.85, 1.1, 1.02],
        },
        {"One update too far": "from 1.9.* to 0.82 between two steps, before step 2;.*it was 0.003"},
        "explores",
    ),
    "a teacher that knows another template": (
        {},
        {
            "distill/reverse_kl": [0.4] * 12, "distill/first_gap": [-4.0] * 12, "distill/far_below": [0.05] * 12,
            "distill/outside_top": [0.4] * 12, "distill/top_mass": [0.97] * 12,
        },
        {"Teacher and template": "4.0 nats less likely", "Outside the teacher's top tokens": "^40% .* 97%"},
        "far away",
    ),
    "every completion is cut off, and none of those is learned from": (
        {"mask_truncated": True},
        {
            "reward": [0.3, 0.4] * 6, "frac_reward_zero_std": [0.25] * 12, "grad_norm": [0.7] * 4 + [0] * 8,
            "completions/clipped_ratio": [0.9] * 4 + [1] * 8,
        },
        {"Nothing is learned": "0 since step 5.*--mask_truncated", "Cut off": "hit the length limit"},
        "without signal",
    ),
    "nothing: a teacher alone, and rewards that are only looked at": (
        {"reward_weights": [0.0], "distill_coef": 1.0},
        {"distill/asked": [1] * 12, "frac_reward_zero_std": [1] * 12, "reward": [0] * 12},
        {},
        "silent",
    ),
    "a teacher that is only watched": (
        {"distill_coef": 0.0},
        {"distill/asked": [1] * 12, "frac_reward_zero_std": [1] * 12, "reward": [0] * 12},
        {"Groups without signal": "too hard"},
        "teacher",
    ),
    "a critic of one update a step": (
        {"critic_iterations": 1, "num_minibatches": 1},
        {"value/explained_variance": [0, 0, 0.001, 0.002, 0.006, 0.005, 0.003, 0.002] * 4},
        {"Critic": "explains 0% .* after 32 updates"},
        "early",
    ),
    "a domain's reward never right": (
        {"domains": [{"name": "plus"}, {"name": "minus"}]},
        {
            "reward": [0, 0, 0.05, 0.05, 0.06, 0.19, 0.23, 0.22, 0.33, 0.39, 0.25, 0.16, 0.2, 0.36, 0.25],
            "plus/reward": [0, 0, 0.09, 0.09, 0.13, 0.38, 0.47, 0.44, 0.66, 0.78, 0.5, 0.31, 0.41, 0.72, 0.5],
            "minus/reward": [0] * 15,
            "entropy": [1.87, 1.89, 1.76, 1.74, 1.5, 1.18, 0.99, 0.57, 0.35, 0.25, 0.25, 0.24, 0.21, 0.17, 0.15],
        },
        {"Domain minus": "the reward is 0 in every step", "Entropy collapse": "below a seventh.*has not grown since"},
        "between two steps",
    ),
    "turns without an end": (
        {},
        {
            "reward": [0.01, -0.23, 0.95, -0.04, -0.01, -0.01, 0, -0.01, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            "entropy": [
                0.28, 0.26, 0.31, 0.37, 0.43, 0.52, 0.59, 0.64, 0.73, 0.81, 0.93, 1.1, 1.3, 1.5, 1.7, 1.9, 2.4, 2.6,
                2.47, 2.54,
            ],
        },
        {"Entropy rises": "from 0.27 to 2.*, the reward from -0.11 to 0.00"},
        "between two steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WENT_WRONG)
def test_trainings_that_went_wrong(what):
    config, series, expected, never = WENT_WRONG[what]
    columns = {"step": range(1, 1 + min(map(len, series.values())))} | series
    lines = [dict(zip(columns, map(float, values), strict=True)) for values in zip(*columns.values(), strict=True)]
    said = {note["title"]: note["text"] for note in advice.of_curves(Curves(lines), config)}
    for title, words in expected.items():
        assert re.search(words, said[title]), said
    assert not any(never in text for text in said.values()), said


def test_every_note_is_explained():
    text = (ROOT / "docs" / "looking.md").read_text(encoding="utf-8").lower()

    for see in set(
        re.findall(r'"([a-z]+(?:-[a-z]+)+)"\)', (ROOT / "runlog" / "advice.py").read_text(encoding="utf-8"))
    ):
        assert see.replace("-", " ") in text, see


# ---- how long it takes ----------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds by the clock, printed, and of the server's processor, less than 2: other processes do not count there."""

    def __init__(self, page):
        self.process = psutil.Process(page.process.pid)

    def __enter__(self):
        self.used, self.begun = self.seconds(), time.monotonic()
        return self

    def __call__(self, what: str) -> None:
        used, begun = self.seconds(), time.monotonic()
        print(f"{what}: {begun - self.begun:.2f} s, of the processor {used - self.used:.2f} s")
        assert used - self.used < 2, what
        self.used, self.begun = used, begun

    def __exit__(self, *_):
        pass

    def seconds(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def test_200_runs_of_2000_steps(tmp_path):
    """The table and ten compared runs, each in less than 2 s the first time they are asked for."""
    first = make_run(tmp_path / "run-000", steps=2000, files=0, evaluate=20)
    for n in range(1, 200):
        folder = tmp_path / f"run-{n:03d}"
        folder.mkdir()
        for path in first.iterdir():
            if path.is_file():
                os.link(path, folder / path.name)
    with looking(tmp_path) as page, Stopwatch(page) as watch:
        assert len(page.ask("/api/runs").json()["runs"]) == 200
        watch("the table")
        found = page.ask("/api/compare?" + "&".join(f"run=run-{n:03d}" for n in range(10))).json()
        watch("ten compared")
        assert len(next(p for p in found["panels"] if p["name"] == "reward")["curves"]) == 10


def test_a_run_of_20000_steps_costs_no_more_with_each_step(tmp_path):
    """Of which each has a file of completions."""
    folder, rng = make_run(tmp_path / "run", steps=10, files=1, state="running", max_steps=20_000), random.Random(0)
    kept = folder / "completions" / "step_000010.parquet"
    lines = [json.dumps(metrics_line(step, 20_000, None, rng)) + "\n" for step in range(11, 2_011)] * 10
    tags, used = {}, {}
    with looking(tmp_path) as page, (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        process = psutil.Process(page.process.pid)

        def memory() -> float:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
            return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1e3

        for step, line in enumerate(lines, 11):
            file.write(re.sub(r'"step": \d+', f'"step": {step}', line))
            os.link(kept, kept.with_name(f"step_{step:06d}.parquet"))
            if step % 500 and not (step // 1000 in (5, 18) and step % 50 == 0):
                continue
            file.flush()
            before = sum(process.cpu_times()[:2])
            for path in ("runs", "run?run=run", "notes?run=run", "compare?run=run", "steps?run=run"):
                answer = page.ask(f"/api/{path}", {"If-None-Match": tags.get(path, "")})
                assert answer.status_code == 200
                tags[path] = answer.headers.get("ETag", "")
            used.setdefault(step // 1000, []).append(sum(process.cpu_times()[:2]) - before)
            if step == 5_000:
                early = memory()
        grown = (memory() - early) / 15
        early, late = (np.mean(used[thousand]) for thousand in (5, 18))
    print(f"{grown:.2f} MB in 1,000 steps; {1e3 * early:.0f} ms of a core a poll at 5,000, {1e3 * late:.0f} at 18,000")
    assert grown < 1 and late < 1.5 * early + 0.01


def test_steps_are_told_in_few_words_and_once(tmp_path):
    """A file that comes within the same tick of the file system's clock leaves the folder's times as they were."""
    folder = make_run(tmp_path / "run", steps=40, files=30) / "completions"
    (folder / "step_000013.parquet").unlink()
    (folder / "step_9.txt").touch()
    make_run(tmp_path / "bare", steps=4, files=0)
    with looking(tmp_path) as page:
        assert page.ask("/api/steps?run=bare").json() == {"completions": [], "evaluations": []}
        first = page.ask("/api/steps?run=run")
        assert first.json() == {"completions": [[11, 2, 1], [14, 27, 1]], "evaluations": [[10, 4, 10]]}
        known = {"If-None-Match": first.headers["ETag"]}
        assert page.ask("/api/steps?run=run", known).status_code == 304
        before = folder.stat()
        os.link(folder / "step_000040.parquet", folder / "step_000041.parquet")
        os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
        time.sleep(2.1)
        assert page.ask("/api/steps?run=run", known).json()["completions"][-1] == [14, 28, 1]
        for name in ("step_000012.parquet", "step_000011.parquet"):
            (folder / name).unlink()
        assert page.ask("/api/steps?run=run", known).json()["completions"] == [[14, 28, 1]]


def test_a_step_of_4096_completions_of_1000_tokens(tmp_path):
    folder = make_run(tmp_path / "run", steps=5, files=0)
    write_step(folder / "completions" / "step_000005.parquet", completions_table(5, 5, 4096, 1000))
    with looking(tmp_path) as page:
        page.ask("/api/runs")
        with Stopwatch(page) as watch:
            for path in (
                "listing",
                "rows?rows=0,1,2,3,4,5,6,7",
                "row?row=4000",
                "tokens?row=4000",
                "search?text=carry",
            ):
                word = "&" if "?" in path else "?"
                assert page.ask(f"/api/{path}{word}run=run&kind=completions&step=5").status_code == 200
                watch(path)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_said(tmp_path, page):
    def tried(*arguments):
        command = [sys.executable, "look.py", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, encoding="utf-8")
        return done.returncode, done.stderr

    code, said = tried(str(tmp_path / "none"))
    assert code == 1 and "is no folder" in said and "Traceback" not in said
    code, said = tried(str(tmp_path), "--port", str(page.port))
    assert code == 1 and "--port" in said and "Traceback" not in said


def test_other_hosts_get_a_warning(tmp_path):
    with looking(tmp_path, "--host", "0.0.0.0") as page:
        assert "unencrypted" in page.log.read_text(encoding="utf-8")


def test_a_run_folder_itself_can_be_given(page):
    with looking(page.folder / "one") as alone:
        assert [run["name"] for run in alone.ask("/api/runs").json()["runs"]] == ["one"]
        assert alone.ask("/api/run?run=one").status_code == 200


def test_an_empty_folder_fills(tmp_path):
    with looking(tmp_path) as page:
        assert page.ask("/api/runs").json()["runs"] == []
        make_run(tmp_path / "new", steps=3, files=1)
        assert [run["name"] for run in page.ask("/api/runs").json()["runs"]] == ["new"]
