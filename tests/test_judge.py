"""The judge: its request, the grammar of its answers, retries, and what it is sent."""

import asyncio
import contextlib
import json
import math

import pytest
from answering import answering
from server_fixture import free_port
from test_rewards import trajectory

from config import ConfigError, TrainConfig, check
from rewards import score
from runlog import rollout_metrics
from scoring import judge

pytestmark = pytest.mark.quick


def answer(said):
    """In a server's form: a text; (text, finish_reason); a status; None, to break the connection."""
    if said is None or isinstance(said, int):
        return said and (
            said,
            json.dumps({"error": {"message": "sent: /v1/chat/completions?api_key=sk-0123456789"}}),
            {},
        )
    text, reason = (said, "stop") if isinstance(said, str) else said
    return 200, json.dumps({"choices": [{"message": {"content": text}, "finish_reason": reason}]}), {}


@pytest.fixture
def judged():
    """judged(*said, **settings) -> (what the judge's function returns for a completion, its server)."""
    servers = contextlib.ExitStack()

    def ask(*said, path="/v1", log_extra=None, **settings):
        server = servers.enter_context(answering(*map(answer, said)))
        settings = {"judge_url": server.url + path, "judge_model": "j"} | settings
        cfg = TrainConfig(reward_funcs=["judge"], **settings)
        check(cfg)
        extra = {"log_extra": log_extra} if log_extra else {}
        (found,) = judge.judge(["good"], ["q"], cfg, answer=["x"], **extra)
        return found, server

    with servers:
        yield ask


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('Right.\n```json\n{"reason": "as asked", "score": 7.5}\n```\n', 7.5),
        ("Fine.\n**Score: 7/10**", 7),
        ("<think>\nScore: 9\n</think>Score: 0", 0),
        ('It says "Score: 10", which is wrong.\nScore: 2', 2),
        ('Score: 2\n\nIt says "Score: 10".', None),
    ],
)
def test_a_judges_answer_has_one_grammar(text, score):
    """Its last line: `Score: N`, or JSON that ends with the score; N from 0 to 10."""
    assert judge.read_score(text) == score


def test_judge(judged, tmp_path):
    found, server = judged("Score: 7")
    assert found == {"reward": 0.7, "attempts": 1, "unread": 0, "unanswered": 0}
    assert judged(None, 500, "Score: 2")[0]["reward"] == 0.2  # a connection that breaks and a server that fails once
    (tmp_path / "t.txt").write_text("{prompt}|{completion}|{answer}", encoding="utf-8")
    found, server = judged("Score: 7", judge_template=str(tmp_path / "t.txt"))
    assert json.loads(server.asked[-1][2])["messages"] == [{"role": "user", "content": "q|good|x"}]
    with pytest.raises(ConfigError, match="needs --judge_url"):
        check(TrainConfig(judge_model="j", reward_funcs=["judge"]))


def test_a_template_knows_columns_only():
    row = {"prompt": "q {answer}", "answer": {"a": 1}, "completion": "{prompt.__class__} {0} }{"}
    assert judge.fill_in("{{{prompt}}} {answer}: {completion}", row) == (
        "{q {answer}} {'a': 1}: {prompt.__class__} {0} }{"
    )
    for wrong in ("{}", "{anwser}", "{"):
        with pytest.raises(ValueError, match="the judge's template: .*columns, prompt, answer, completion"):
            judge.fill_in(wrong, row)


def test_what_a_judge_says_in_another_form_is_asked_once_more(judged):
    shown = []
    found, server = judged("Score: 85", "Score: 3", log_extra=lambda *given: shown.append(given))
    assert found == {"reward": 0.3, "attempts": 2, "unread": 0, "unanswered": 0} and len(server.asked) == 2
    assert shown == [("judge", ["Score: 3"])]
    for said in ("I cannot say.", ("Score: 1", "length")):
        found, server = judged(said, log_extra=lambda *given: shown.append(given))
        assert found == {"reward": None, "attempts": 2, "unread": 1, "unanswered": 0} and len(server.asked) == 2
        assert shown[-1][1][0].startswith("(not counted: ")
    assert "within 4000 tokens: finish_reason 'length'" in shown[-1][1][0]


def test_what_the_judge_did_not_score_is_unrewarded_counted_and_shown(monkeypatch):
    cfg = TrainConfig(reward_funcs=["judge"], judge_url=f"http://127.0.0.1:{free_port()}/v1", judge_model="j")
    one = trajectory("good")
    asyncio.run(score([one], {"judge": judge.judge}, cfg))
    assert one.info["unrewarded"] == 1 and one.info["rewards"]["judge/unanswered"] == 1
    assert "cannot be asked" in one.info["extra"]["judge"]


def test_a_judge_that_is_gone_for_good_ends_the_run(monkeypatch):
    """After ten steps without an answer; not one that comes back in between."""
    monkeypatch.setattr(rollout_metrics, "_SILENT", [0])
    cfg = TrainConfig(reward_funcs=["judge", "length"], judge_url="http://gone:1/v1?api_key=k", judge_model="j")

    def step(unanswered: int):
        t = trajectory("x")
        rewards = {"judge": math.nan, "judge/attempts": 1, "length": 1.0, "judge/unanswered": unanswered}
        t.info |= {"rewards": rewards, "reward_timeouts": 0}
        rollout_metrics.check_failed([[t]], cfg)

    for unanswered in (*[1] * 9, 0, *[1] * 9):
        step(unanswered)
    with pytest.raises(RuntimeError, match="judge at http://gone:1 answered .*last 10 steps.*--resume"):
        step(1)


def test_secrets_go_where_they_belong(judged, caplog, monkeypatch):
    """Keys of an address are used and not shown; the policy's token stays with it."""
    shown, key = [], "sk-0123456789"
    found, server = judged(401, path=f"/v1?api_key={key}", log_extra=lambda *given: shown.append(given))
    assert server.asked[0][0] == f"/v1/chat/completions?api_key={key}" and found["unanswered"] == 1
    assert key not in str(shown) + caplog.text and "127.0.0.1" in str(shown)

    _, elsewhere = judged("Score: 9")
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    monkeypatch.setenv("VLLM_SERVER_TOKEN", "of-the-policy\n")
    cfg = TrainConfig(judge_url=f"{elsewhere.url}/v1", judge_model="j", server_urls=["http://127.0.0.1:1"])

    def sent() -> str | None:
        assert judge.judge(["x"], ["q"], cfg)[0]["reward"] == 0.9
        return elsewhere.asked[-1][1]

    assert sent() is None
    monkeypatch.setenv("JUDGE_TOKEN", "of-the-judge\n")
    assert sent() == "Bearer of-the-judge"
