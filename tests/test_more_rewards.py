"""Judge, verification, code in the sandbox, SQuAD's scores, choices, instructions, use of tools, rewards of turns."""

import asyncio
import contextlib
import http.server
import json
import math
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from server_fixture import free_port

from config import ConfigError, TrainConfig, check
from envs.tools import chat
from plugins import load_function
from rewards import (
    RewardError,
    code_tests,
    exact_match,
    few_turns,
    log_metric,
    multiple_choice,
    repetition,
    score,
    squad_em,
    squad_f1,
    tool_use,
    turn_ends,
)
from rollouts import Trajectory
from runlog import rollout_metrics
from safety import asking, sandbox
from safety.limits import run_limited
from scoring import judge
from scoring.boxes import boxes
from scoring.calls import calls
from scoring.constraints import follows
from scoring.instructions import INSTRUCTIONS, instructions
from scoring.programs import all_pass, passes
from scoring.reward_model import reward_model
from scoring.sql import sql, written


def trajectory(text: str, row: dict | None = None, turns: int = 1, mask: list[int] | None = None) -> Trajectory:
    mask = mask or [1, 1]
    row, n = row or {"prompt": "q", "answer": "a"}, len(mask)
    return Trajectory(row, 0, [1], [5] * n, mask, [0.0] * n, [0.0] * n, turns=turns, info={"completion": text})


class Judge(http.server.BaseHTTPRequestHandler):
    """Answers with the next of `said`, the last one again and again: a text; (text, finish_reason); a status, or
    (status, headers); bytes that it never stops sending; None, to break the connection. Keeps what it was sent."""

    said, seen, structured = [], [], True

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body | {"path": self.path, "token": self.headers["Authorization"]})
        if "response_format" in body and not self.server.structured:
            return self.answer(400, {"error": {"message": "response_format is not supported"}})
        said = self.server.said
        one = said.pop(0) if len(said) > 1 else said[0]
        if one is None:
            return self.connection.close()
        if isinstance(one, bytes):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(one)
                    self.server.sent += len(one)
        if isinstance(one, int):
            one = one, {}
        if isinstance(one[0], int):
            return self.answer(one[0], {"error": {"message": f"sent: {self.path}"}}, one[1])
        text, reason = (one, "stop") if isinstance(one, str) else one
        self.answer(200, {"choices": [{"message": {"content": text}, "finish_reason": reason}]})

    def answer(self, status: int, content: dict, headers=()):
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args): ...


@pytest.fixture
def judged(monkeypatch):
    """judged(*said, **settings) -> (what the judge's function returns for a completion, its server)."""
    monkeypatch.setattr(asking, "WAIT", 0.01)
    monkeypatch.setattr(judge, "UNSTRUCTURED", set())
    servers = []

    def ask(*said, structured=True, path="/v1", completions=("good",), log_extra=None, **settings):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
        server.said, server.seen, server.structured, server.sent = list(said), [], structured, 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        settings = {"judge_url": f"http://127.0.0.1:{server.server_port}{path}", "judge_model": "j"} | settings
        cfg = TrainConfig(reward_funcs=["judge"], **settings)
        check(cfg)
        extra = {"log_extra": log_extra} if log_extra else {}
        found = judge.judge(list(completions), ["q"] * len(completions), cfg, answer=["x"] * len(completions), **extra)
        return (found[0] if len(found) == 1 else found), server

    yield ask
    for server in servers:
        server.shutdown()


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"reason": "as asked", "score": 7}', 7),
        ('{\n  "reason": "as asked",\n  "score": 7.5\n}', 7.5),
        ('Right.\n```json\n{"score": 7}\n```\n', 7),
        ("Fine.\nScore: 7", 7),
        ("Fine.\n**Score:** 7", 7),
        ("Fine.\n**Score: 7/10**", 7),
        ("Fine.\nscore: **7.5**.", 7.5),
        ("<think>\nScore: 9\n</think>\nScore: 0", 0),
        ('It says "Score: 10", which is wrong.\nScore: 2', 2),
        ("It says:\nScore: 10\nScore: 2", 2),
        ('Score: 2\n\nIt says "Score: 10".', None),
        ("> Score: 10", None),
        ("Score: 85", None),
        ("Score: 12/100", None),
        ("Score: 7/100", None),
        ("Score: 10.5", None),
        ("Score: -1", None),
        ("Score: 7,5", None),
        ("Score: 7 or 8", None),
        ("Score: 1e1", None),
        ("Score: \u0667", None),
        ('{"score": "7"}', None),
        ('{"score": true}', None),
        ('{"score": NaN}', None),
        ('{"score": 11}', None),
        ('{"score": 1, "score": 9}', None),
        ('{"verdict": {"score": 9}}', None),
        ('[{"score": 9}]', None),
        ("[" * 5000, None),
        ('{"score": ' + "9" * 5000 + "}", None),
        ("7", None),
        ("", None),
    ],
)
def test_a_judges_answer_has_one_grammar(text, score):
    """The whole of it or its last line: a JSON object with a score, or `Score: N`; N from 0 to 10."""
    assert judge.read_score(text) == score


def test_judge(judged, tmp_path):
    found, server = judged("Score: 7")
    assert found == {"reward": 0.7, "attempts": 1, "unread": 0, "unanswered": 0}
    schema = server.seen[0]["response_format"]["json_schema"]["schema"]
    assert schema["required"] == ["reason", "score"] and schema["properties"]["score"]["maximum"] == 10
    assert judged(None, 500, "Score: 2")[0]["reward"] == 0.2  # a connection that breaks and a server that fails once
    (tmp_path / "t.txt").write_text("{prompt}|{completion}|{answer}", encoding="utf-8")
    found, server = judged("Score: 7", judge_template=str(tmp_path / "t.txt"))
    assert server.seen[-1]["messages"] == [{"role": "user", "content": "q|good|x"}]
    (tmp_path / "latin.txt").write_bytes(b"Judge:\ncaf\xe9 {completion}")
    for wrong, message in (
        (dict(judge_url=None), "needs --judge_url"),
        (dict(judge_url="host:8000/v1"), "http://"),
        (dict(judge_template="none.txt"), "no such file"),
        (dict(judge_template=str(tmp_path / "latin.txt")), "latin.txt, line 2: not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(TrainConfig(**{"judge_url": "http://x/v1", "judge_model": "j", "reward_funcs": ["judge"]} | wrong))


def test_what_a_judge_says_in_another_form_is_asked_once_more(judged):
    shown = []
    found, server = judged("Score: 85", "Score: 3", log_extra=lambda *given: shown.append(given))
    assert found == {"reward": 0.3, "attempts": 2, "unread": 0, "unanswered": 0} and len(server.seen) == 2
    assert "Score: 85" not in str(server.seen[1]) and "score" in server.seen[1]["messages"][0]["content"]
    assert shown == [("judge", ["Score: 3"])]
    for said in ("I cannot say.", ("Score: 1", "length"), ("Score: 1", "content_filter"), ('{"score": 1}', "length")):
        found, server = judged(said, log_extra=lambda *given: shown.append(given))
        assert found == {"reward": None, "attempts": 2, "unread": 1, "unanswered": 0} and len(server.seen) == 2
        assert (
            shown[-1][1][0].startswith("(not counted: ")
            and (said if isinstance(said, str) else said[0]) in shown[-1][1][0]
        )
    assert "--judge_max_tokens" in shown[-1][1][0]


def test_what_the_judge_did_not_score_is_unrewarded_counted_and_shown(judged):
    judged("Score: 7")
    cfg = TrainConfig(reward_funcs=["judge"], judge_url=f"http://127.0.0.1:{free_port()}/v1", judge_model="j")
    group = [trajectory("good")]
    asyncio.run(score(group, {"judge": judge.judge}, cfg))
    assert group[0].info["unrewarded"] == 1 and group[0].info["rewards"]["judge/unanswered"] == 1
    assert "cannot be reached" in group[0].info["extra"]["judge"]


def test_a_judge_that_is_gone_for_good_ends_the_run(monkeypatch):
    """Not one that comes back, nor one whose scores nothing is learned from: of two judges each is looked at."""
    clock = [0.0]
    monkeypatch.setattr(rollout_metrics, "_SILENT", {})
    monkeypatch.setattr(rollout_metrics.time, "time", lambda: clock[0])
    domains = [{"name": name, "judge_url": f"http://{name}:1/v1", "judge_model": "j"} for name in ("gone", "here")]
    cfg = TrainConfig(reward_funcs=["judge", "length"], domains=domains)

    def step(gone: int, settings=cfg):
        clock[0] += 70
        info = {"judge": math.nan, "judge/attempts": 1, "length": 1.0}
        said = {"judge": "(not counted: http://gone:1 answered 401 Unauthorized; look at the token it was sent)"}
        group = []
        for domain, unanswered in (("gone", gone), ("gone", 1), ("here", 0)):
            t = trajectory("x")
            t.row["domain"], t.info["extra"] = domain, said
            t.info |= {"rewards": info | {"judge/unanswered": unanswered}, "reward_timeouts": 0}
            group.append(t)
        rollout_metrics.check_failed([group], settings)

    for gone in (*[1] * 9, 0, *[1] * 9):
        step(gone)
    message = r"judge j at http://gone:1 .*last 10 steps.*10 minutes: http://gone:1 answered 401.*sent\. .*--resume"
    with pytest.raises(RuntimeError, match=message):
        step(1)
    step(0)
    for _ in range(15):
        clock[0] -= 60  # quick steps: it may be on its way back
        step(1)
    weightless = replace(cfg, reward_weights=[0.0, 1.0])
    for _ in range(15):
        step(1, settings=weightless)


def test_warnings_of_servers_are_said_again_after_an_hour(monkeypatch, caplog):
    clock = [1e6]
    monkeypatch.setattr(asking, "WARNED", {})
    monkeypatch.setattr(asking.time, "monotonic", lambda: clock[0])
    for _ in range(2):
        for _ in range(3):
            asking.warned("http://x is busy")
            clock[0] += 600
        for number in range(100):
            asking.warned(f"http://x said {number}")
        clock[0] += 3600
    said = [record.getMessage() for record in caplog.records]
    assert said.count("http://x is busy") == 2 and len(said) == 2 * asking.MOST_WARNINGS


def test_a_server_without_structured_output_is_asked_once_for_it(judged):
    found, server = judged("Score: 7", structured=False, completions=["a"])
    assert found["reward"] == 0.7 and ["response_format" in body for body in server.seen] == [True, False]
    cfg = TrainConfig(reward_funcs=["judge"], judge_url=f"http://127.0.0.1:{server.server_port}/v1", judge_model="j")
    assert judge.judge(["b"], ["q"], cfg)[0]["reward"] == 0.7
    assert ["response_format" in body for body in server.seen] == [True, False, False]


def test_a_busy_judge_is_waited_for(judged, caplog):
    asking.WARNED.clear()
    start = time.monotonic()
    found, server = judged((429, {"Retry-After": "1"}), 503, 503, 503, 503, "Score: 7")
    assert found["reward"] == 0.7 and 1 < time.monotonic() - start < 5
    assert f"http://127.0.0.1:{server.server_port} is busy (429" in caplog.text
    start = time.monotonic()
    found, server = judged((429, {"Retry-After": "3600"}), reward_timeout=2)
    assert found["unanswered"] == 1 and time.monotonic() - start < 2 and len(server.seen) == 1
    start = time.monotonic()
    found, server = judged((503, {"Retry-After": "soon"}), reward_timeout=2)
    assert found["unanswered"] == 1 and 1 < time.monotonic() - start < 2 and len(server.seen) > 3


def test_retry_after_has_one_reader():
    given = {None: None, "": None, "soon": None, "nan": None, "inf": None, "3": 3, "1.5": 1.5, "-2": 0}
    given |= {"Wed, 21 Oct 2015 07:28:00 GMT": 0, "Mon, 99999999999 Jan 2030 00:00:00 GMT": None}
    given |= {"Mon, 01 Jan 2030 00:00:00 +99999999999999": None}
    assert {text: asking.retry_after(text) for text in given} == given


def test_log_metric_names_the_metric_that_is_no_number():
    for wrong in (None, "much", [1, 2]):
        with pytest.raises(TypeError, match=r"log_metric\('x', .*no number"):
            log_metric([])("x", wrong)


def test_answers_without_end_and_redirections_are_not_followed(judged):
    shown = []
    found, server = judged(b" " * 2**20, log_extra=lambda *given: shown.append(given))
    assert found["unread"] == 1 and server.sent < 4 * asking.MOST_BYTES + 2**25 and "MiB" in shown[-1][1][0]
    _, elsewhere = judged("Score: 9")
    target = f"http://127.0.0.1:{elsewhere.server_port}/v1/chat/completions"
    found, server = judged((307, {"Location": target}), log_extra=lambda *given: shown.append(given))
    assert found["unanswered"] == 1 and "redirects to http://127.0.0.1:" in shown[-1][1][0] and len(elsewhere.seen) == 1


def test_keys_in_a_judges_address_are_used_and_not_shown(judged, caplog):
    shown, key, password = [], "sk-0123456789", "pass-word-1"
    found, server = judged(401, path=f"/v1?api_key={key}", log_extra=lambda *given: shown.append(given))
    assert server.seen[0]["path"] == f"/v1/chat/completions?api_key={key}" and found["unanswered"] == 1
    url = f"http://me:{password}@127.0.0.1:{free_port()}/v1?api_key={key}"
    judged("", judge_url=url, log_extra=lambda *given: shown.append(given))
    for text in (str(shown), caplog.text):
        assert key not in text and password not in text and "127.0.0.1" in text


def test_other_models_are_asked_in_the_same_way(judged, monkeypatch):
    """A simulated user or a tool: chat. A reward model that is served."""
    _, server = judged("", completions=())
    url = f"http://127.0.0.1:{server.server_port}"
    server.said = [503, None, "Hello."]
    assert chat(f"{url}/v1", "m", [{"role": "user", "content": "Hi"}], "token") == "Hello."
    assert server.seen[-1]["token"] == "Bearer token" and len(server.seen) == 3
    for wrong in ("localhost:8000/v1", "http://[::1/v1", "http://host:port/v1", "http:///v1"):
        with pytest.raises(RuntimeError, match="no URL such as http://host:8000/v1"):
            chat(wrong, "m", [])
    server.said = [b" " * 2**20]
    with pytest.raises(RuntimeError, match=f"{url} answered with over 16 MiB"):
        chat(f"{url}/v1", "m", [{"role": "user", "content": "Hi"}])
    server.said = [(503, {"Retry-After": "3600"})]
    outcome = asyncio.run(run_limited(lambda: chat(f"{url}/v1", "m", []), {}, 5))
    assert "busy" in str(outcome[1]) and "3600 s; the time limit of 5 s" in str(outcome[1])
    monkeypatch.setattr("scoring.reward_model.served", lambda url: ("m", None))
    server.said = ["no classes here"]
    with pytest.raises(RuntimeError, match="answered without data.*--runner pooling"):
        reward_model(["a"], ["b"], TrainConfig(reward_model=url))


class TokenKeeper(http.server.BaseHTTPRequestHandler):
    tokens: list[str | None] = []

    def do_POST(self):
        self.tokens.append(self.headers["Authorization"])
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b'{"choices": [{"message": {"content": "Score: 5"}}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args): ...


def test_the_judge_is_sent_its_own_token_only(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), TokenKeeper)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_address[1]}"
    cfg = TrainConfig(judge_url=f"{place}/v1", judge_model="j", server_urls=["http://127.0.0.1:1"])
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    monkeypatch.setenv("VLLM_SERVER_TOKEN", "of-the-policy\n")

    def sent() -> str | None:
        assert judge.judge(["x"], ["q"], cfg)[0]["reward"] == 0.5
        return TokenKeeper.tokens[-1]

    assert sent() is None
    cfg.server_urls = ["http://127.0.0.1:1", place + "/"]  # it is the policy's own server
    assert sent() == "Bearer of-the-policy"
    cfg.server_token = "given"
    assert sent() == "Bearer given"
    monkeypatch.setenv("JUDGE_TOKEN", "of-the-judge\n")
    assert sent() == "Bearer of-the-judge"
    server.shutdown()


def test_a_template_knows_columns_only():
    row = {"prompt": "q {answer}", "answer": {"a": 1}, "completion": "{prompt.__class__} {0} }{"}
    assert judge.fill_in("{{{prompt}}} {answer}: {completion}", row) == (
        "{q {answer}} {'a': 1}: {prompt.__class__} {0} }{"
    )
    for wrong in ("{prompt.__class__}", "{prompt[0]}", "{completion:>9999999999}", "{answer!r}", "{}", "{anwser}", "{"):
        with pytest.raises(ValueError, match="the judge's template: .*in braces stand prompt, answer, completion"):
            judge.fill_in(wrong, row)


def test_verification_comes_first():
    async def verify(trajectory):
        await asyncio.sleep(5 if trajectory.info["completion"] == "hang" else 0)
        if trajectory.info["completion"] == "broken":
            raise OSError("no data base")
        return len(trajectory.info["completion"])

    def by_length(completions, verification, **columns):
        return [None if found is None else float(found) for found in verification]

    by_length.verify = verify
    cfg = TrainConfig(reward_timeout=0.3, reward_funcs=["x"])
    group = [trajectory("four"), trajectory("hang")]
    asyncio.run(score(group, {"by_length": by_length}, cfg))
    assert [t.info["reward"] for t in group] == [4.0, 0.0] and group[1].info["unrewarded"] == 1
    with pytest.raises(RewardError, match="its verify raised OSError: no data base"):
        asyncio.run(score([trajectory("broken")], {"by_length": by_length}, cfg))


def test_rewards_of_turns():
    mask = [1, 1, 0, 1, 0, 0, 1]
    assert turn_ends(mask) == [1, 3, 6] and turn_ends([0, 0]) == [] and turn_ends([1]) == [0]
    cfg = TrainConfig(reward_funcs=["a", "b"], reward_weights=[1.0, 10.0])

    def by_turn(completions, **columns):
        return [{"turns": [0.5, 0.0, 1.0], "seen": 3}]

    def whole(completions, **columns):
        return [1.0]

    t = trajectory("x", turns=3, mask=mask)
    asyncio.run(score([t], {"by_turn": by_turn, "whole": whole}, cfg))
    assert t.token_rewards == [0, 0.5, 0, 0, 0, 0, 11.0] and t.info["reward"] == 11.5
    assert t.info["rewards"] == {"by_turn": 1.5, "by_turn/seen": 3.0, "whole": 1.0}
    with pytest.raises(RewardError, match="3 rewards for 2 turns"):
        asyncio.run(score([trajectory("x", turns=2, mask=[1, 0, 1])], {"by_turn": by_turn, "whole": whole}, cfg))


def test_rewards_of_turns_with_nothing_between_them():
    """Some templates write nothing there, and an environment may answer nothing: the mask shows one run."""
    cfg = TrainConfig(reward_funcs=["by_turn"])

    def by_turn(completions, **columns):
        return [{"turns": [1.0, 2.0, 4.0]}]

    mask = [1, 1, 1, 0, 1]
    ends = [{"end": 2}, {"end": 3}, {"end": 5}]
    t = trajectory("x", turns=3, mask=mask)
    t.info["turns"] = ends
    asyncio.run(score([t], {"by_turn": by_turn}, cfg))
    assert t.token_rewards == [0, 1, 2, 0, 4] and t.info["reward"] == 7
    for turns in ([], [{}] * 3, ends[:2], [{"end": 2}, {"end": 4}, {"end": 5}], [{"end": 2}, {"end": 3}, {"end": 9}]):
        t = trajectory("x", turns=3, mask=mask)
        t.info["turns"] = turns
        with pytest.raises(RewardError, match="3 turns, whose tokens are 2 runs in loss_mask; let .* where each ends"):
            asyncio.run(score([t], {"by_turn": by_turn}, cfg))


def test_code_in_the_sandbox(monkeypatch, caplog):
    """Tests are counted one by one; leaving early, printing or hanging passes none."""
    monkeypatch.setattr(sandbox, "allow_uncontained", True)  # so that this runs everywhere
    right = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
    tests = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "for n in range(3):\n    assert add(n, 0) == n"]
    half = "def add(a, b): return int(a) + b"
    cheats = ["import sys; sys.exit(0)", "print('passed ' * 100)", "while True: pass", "syntax error ("]
    large = "x = '" + "a" * 400_000 + "'\ndef add(a, b): return a + b"
    scores = code_tests([right, half, *cheats, large], [tests] * 7)
    assert [one["reward"] for one in scores] == pytest.approx([1.0, 2 / 3, 0, 0, 0, 0, 1.0])
    assert [one["timeout"] for one in scores] == [0, 0, 0, 0, 1, 0, 0]
    assert code_tests([right] * 2, [None, []]) == [None, None]
    with pytest.raises(ValueError, match="the test 'assert add' is not python|must be a list of python statements"):
        code_tests([right], [[3]])
    assert code_tests.executes_code

    monkeypatch.setattr(sandbox.sys, "executable", "/nowhere/python")
    assert code_tests([right], [tests]) == [{"reward": 0.0, "timeout": 0.0, "error": 1.0}]
    assert "code_tests could not run a program" in caplog.text


def test_a_program_that_could_not_be_run_is_not_wrong(monkeypatch, caplog):
    """all_pass where the sandbox starts for some tests only: what ran may show a fault; else the score is not known."""
    monkeypatch.setattr(sandbox, "allow_uncontained", True)
    monkeypatch.setattr("safety.limits._WARNED", set())

    def run(code, given, *rest, **options):
        if given == "busy":
            raise sandbox.SandboxError("Resource temporarily unavailable")
        return sandbox.Result(given, "", 0, False)

    monkeypatch.setattr("scoring.programs.run_python", run)
    ran, fails, busy = ["1", "1", None], ["1", "2", None], ["busy", "1", None]
    cases = [json.dumps(tests) for tests in ([ran], [ran, busy], [fails, busy], [busy, busy])]
    assert all_pass(["```python\nprint(input())\n```"] * 4, cases) == [
        {"reward": 1.0, "passed": 1.0, "error": 0.0},
        {"reward": None, "passed": 1.0, "error": 0.5},
        {"reward": 0.0, "passed": 0.0, "error": 0.5},
        {"reward": None, "passed": None, "error": 1.0},
    ]
    assert caplog.text.count("all_pass could not run a program") == 1


@pytest.mark.parametrize("fence", ["```py\n", "```Python\n", "```python3\n", "```python \n", "```\n"])
def test_a_block_in_another_language_is_not_the_program(fence, monkeypatch):
    """The end of one block is not the beginning of the next."""
    monkeypatch.setattr(sandbox, "allow_uncontained", True)
    text = f"First:\n```bash\npip install numpy\n```\nThen:\n{fence}def add(a, b):\n    return a + b\n```\nDone."
    assert code_tests([text], [["assert add(1, 2) == 3"]])[0]["reward"] == 1
    within_list = f"1. The function:\n\n   {fence}   def add(a, b):\n       return a + b\n\n   ```\n2. Done."
    assert code_tests([within_list], [["assert add(1, 2) == 3"]])[0]["reward"] == 1
    assert written("```python\nimport sqlite3\n```\nSo:\n```SQL\nSELECT 1\n```") == "SELECT 1"


def test_programs_print_much_and_return_tuples(monkeypatch):
    monkeypatch.setattr(sandbox, "allow_uncontained", True)
    assert passes("print(' '.join(['1'] * 15000))", "", " ".join(["1"] * 15000), None)
    assert passes("def f(a):\n    return (a, [(a,)])", [1], [1, [[1]]], "f")
    for program, wrapped in (("return [5]", True), ("return 5", True), ("return [5]", False)):
        assert passes(f"def f(a):\n    {program}", [1], [5], "f", wrapped)
    assert not passes("def f(a):\n    return 5", [1], [5], "f")


def test_rows_to_which_a_reward_does_not_apply():
    """None in a column, as rows of other tasks have it."""
    assert calls(["x"], [None]) == boxes(["[1, 2]"], [None]) == follows(["x"], [None]) == sql(["x"], [None], [None])
    assert calls(["x"], [None]) == all_pass(["x"], [None]) == all_pass(["x"], ["[]"]) == [None]
    assert judge.fill_in("Reference: {answer}", {"answer": None}) == "Reference: "


def test_several_right_answers_come_in_any_sequence():
    several = np.array(["Paris", "Paris city"])
    for wanted in (several, tuple(several), list(several)):
        assert exact_match(["paris."], [wanted]) == squad_em(["Paris"], [wanted]) == [1]
    assert exact_match(["", "*", "!"], ["*"] * 3) == [0, 1, 0]  # a sign is an answer, too


def test_calls_are_paired_in_any_order():
    wanted = [{"name": "f", "arguments": {"a": 1, "b": b}} for b in (2, 3)]
    text = '<tool_call>{"name": "f", "arguments": {"a": 1, "b": 3}}</tool_call>'
    assert calls([text] * 2, [wanted, wanted[::-1]]) == [{"reward": 0.25, "arguments": 0.5, "exact": 0.0}] * 2


def test_a_number_without_end_is_no_box():
    for text in ("[0, 0.5, 10, 10] as in [1]", "[1, 2, 3, 4] no, [0,0.5,10,10], of [2, 5]", "[[0, 0.5, 10, 10]]"):
        assert boxes([text], [[0, 0.5, 10, 10]])[0]["reward"] == 1
    outside = boxes(["[-1, 0.5, 10, 10]"], [[0, 0.5, 10, 10]])[0]
    assert outside["format"] == 1 and outside["iou"] == pytest.approx(10 / 11)
    assert boxes([f"[1, 1, {'9' * 400}, 2]"], [[0, 0.5, 10, 10]])[0] == {"reward": 0.0, "iou": 0.0, "format": 0.0}


def test_squad():
    """The numbers of SQuAD's own examples of what counts as equal."""
    pairs = [("The  Eiffel Tower!", "eiffel tower", 1, 1), ("a tower in Paris", "the Eiffel Tower", 0, 2 * 1 / (3 + 2))]
    pairs += [("", "x", 0, 0), ("<answer>Rome</answer>", ["Paris", "Rome"], 1, 1)]
    for given, wanted, em, f1 in pairs:
        assert squad_em([given], [wanted]) == [em] and squad_f1([given], [wanted]) == [pytest.approx(f1)]
    assert squad_em(["x"], [None]) == [None]


def test_repetition():
    assert repetition([[1, 2, 3, 4, 5], [1, 2, 3, 1, 2, 3], [1], [7] * 10]) == pytest.approx([0, -1 / 4, 0, -7 / 8])


def test_choices():
    said = ["B", "(b) or (C)", "The answer is C.", "<answer>D) Paris</answer>", "I don't know", "A: no. B: yes.", None]
    right = ["B", "C", "(C)", 3, "A", "A", None]
    assert multiple_choice([s or "" for s in said], right) == [1, 1, 1, 1, 0, 0, None]


@pytest.mark.parametrize(
    "right, text",
    [
        *(("C", text) for text in ("The answer is C) H2O", "C) B12", "C) Vitamin D", "**C** (CO2 has 2 O, H2 is 1)")),
        *(("A", text) for text in ("The answer is (A) E. coli", "Answer: A) the hepatitis B virus", "A: H\u2082O")),
        *(
            ("D", text)
            for text in ("Answer: D. The F1 score", "D. A-cell", "(A) is wrong, D is right", "A) is it not, D")
        ),
        *(("B", text) for text in ("The answer is A. No wait, it is B.", "The answer is (A). No, B.", "\\boxed{B}")),
        *(("B", text) for text in ("The answer is (A) or rather (B)", "_B_", "\u7b54\u6848\u662fB\u3002", "1. A 2. B")),
    ],
)
def test_a_letter_of_a_formula_is_no_choice(right, text):
    assert multiple_choice([text], [right]) == [1]


def test_a_choice_may_be_a_number_in_any_form():
    assert multiple_choice(["B"] * 3, [1, "1", np.int64(1)]) == [1] * 3


FOLLOWED = {  # instruction -> (arguments, texts that follow it, texts that do not)
    "keywords:existence": ({"keywords": ["red", "fox"]}, ["A fox, Red."], ["A foxy red.", ""]),
    "keywords:forbidden_words": ({"forbidden_words": ["red"]}, ["reddish"], ["Red!"]),
    "keywords:frequency": ({"keyword": "a", "frequency": 2, "relation": "less than"}, ["a"], ["a b a"]),
    "keywords:letter_frequency": ({"letter": "o", "let_frequency": 2, "let_relation": "at least"}, ["Oho"], ["hi o"]),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, ["it's all good"], ["two words"]),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "at least"}, ["A. B!"], ["A, b..."]),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, ["a\n***\nb"], ["a\n\nb"]),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        ["x\n\nSo it is"],
        ["x\n\nis", "so", "a\n\nso\n\nb"],
    ),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, ["* a\n- b"], ["* a", "**a**\n**b**"]),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, ["*a* and **b**"], ["*a*", "* a\n* b"]),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1 a Section 2 b"],
        ["Section 1"],
    ),
    "detectable_format:title": ({}, ["<<A title>>\nx"], ["<< >>", "<a>"]),
    "detectable_format:json_format": ({}, ['{"a": 1}', "```json\n[1]\n```"], ["{a: 1}"]),
    "detectable_format:constrained_response": ({}, ["My answer is maybe."], ["maybe"]),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, ["x\np.s. y"], ["x"]),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, ["[name] of [city]"], ["[name]"]),
    "startend:end_checker": ({"end_phrase": "The end."}, ["x. the end."], ["The end. x"]),
    "startend:quotation": ({}, ['"x"'], ['"x', '"']),
    "change_case:english_lowercase": ({}, ["all low."], ["Not"]),
    "change_case:english_capital": ({}, ["ALL."], ["ALl"]),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "less than"},
        ["ONE Two"],
        ["ONE TWO"],
    ),
    "punctuation:no_comma": ({}, ["a; b"], ["a, b"]),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi"}, ["Say hi\nhi"], ["hi"]),
    "combination:two_responses": ({}, ["a******b"], ["a******a", "a"]),
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_an_instruction(name):
    arguments, good, bad = FOLLOWED[name]
    for text in (*good, *bad):
        (result,) = instructions([text], [[name]], [[arguments | {"of_parquet": None}]])
        assert result == {name: float(text in good), "reward": float(text in good)}, text


def test_instructions_of_a_row():
    names = ["punctuation:no_comma", "change_case:english_lowercase"]
    (result, nothing) = instructions(["Hm <answer>One</answer>", "x"], [names, None], [[{}, None], None])
    assert result == {names[0]: 1, names[1]: 0, "reward": 0.5} and nothing is None
    twice = [{"keywords": ["zebra"]}, {"keywords": ["hello"]}]
    assert instructions(["Hello"], [["keywords:existence"] * 2], [twice]) == [{"keywords:existence": 0, "reward": 0.5}]
    unchecked, given = "language:response_language", {"language": "de"}  # IFEval's, which nothing here checks
    assert instructions(["x", "x"], [[unchecked], [unchecked, names[0]]], [[given], [given, {}]]) == [
        None,
        {names[0]: 1, "reward": 1},
    ]
    with pytest.raises(ValueError, match="no instruction 'language:klingon'; there are keywords:existence"):
        instructions(["x"], [["language:klingon"]], [[{}]])


def test_use_of_tools():
    def of(*calls):
        return trajectory("x", turns=3) if not calls else played(calls)

    def played(calls):
        made = trajectory("x", turns=2)
        made.info["turns"] = [{"info": {"calls": [{"call": c, "failed": c == "broken"} for c in calls]}}, {"info": {}}]
        return made

    assert tool_use([of(), of("a 1", "a 2"), of("a 1", "a 1"), of("a 1", "broken")]) == [None, 1, 0.5, 0.5]
    assert few_turns([of(), of("a 1")], TrainConfig(max_turns=5)) == [-0.5, -0.25]


def test_the_coding_example(tmp_path):
    """What each task asks for passes its tests, and something else does not."""
    rows = load_function("examples/coding.py:rows")("test", 0)[:10]
    wanted = ["x + {}", "{} * x", "x - {}", None, "x ** 2 - {}", "x % {}", "max(x, {})", "x > {}", "[x, {}]"]
    right = [w and f"def f(x):\n    return {w}" for w in wanted]
    asked = [[int(n) for n in re.findall(r"\d+", row["prompt"][0]["content"])] for row in rows]
    programs = [p.format(a[0]) for p, a in zip(right, asked, strict=False) if p]
    tests = [row["tests"] for row, p in zip(rows, right, strict=False) if p]
    assert [score["reward"] for score in code_tests(programs, tests)] == [1.0] * 8
    assert all(score["reward"] < 1 for score in code_tests(["def f(x):\n    return 77"] * 8, tests))


def test_first_mistakes_with_choices_and_instructions():
    for wanted in ("red", "8"):
        with pytest.raises(ValueError, match="is no letter from A to H"):
            multiple_choice(["B"], [wanted])
    with pytest.raises(ValueError, match="instruction keywords:existence with {}: .*'keywords'"):
        instructions(["x"], [["keywords:existence"]], [[{}]])
    with pytest.raises(ValueError, match="has 1 names, kwargs 0"):
        instructions(["x"], [["punctuation:no_comma"]], [[]])
