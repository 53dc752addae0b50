"""Judge, verification, code in the sandbox, SQuAD's scores, rewards of turns."""

import asyncio
import http.server
import json
import threading

import pytest

import judge
from config import ConfigError, TrainConfig, check
from rewards import RewardError, code_tests, repetition, score, squad_em, squad_f1, turn_ends
from rollouts import Trajectory


def trajectory(text: str, row: dict | None = None, turns: int = 1, mask: list[int] | None = None) -> Trajectory:
    mask = mask or [1, 1]
    row, n = row or {"prompt": "q", "answer": "a"}, len(mask)
    return Trajectory(row, 0, [1], [5] * n, mask, [0.0] * n, [0.0] * n, turns=turns, info={"completion": text})


class Judge(http.server.BaseHTTPRequestHandler):
    """Scores 7 where the answer has "good", fails first and then scores 2 for "slow", never scores "odd"."""

    seen: list[str] = []

    def do_POST(self):
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        again = question in Judge.seen
        Judge.seen.append(question)
        status = 500 if "slow" in question and not again else 200
        text = "Fine.\nScore: 7" if "good" in question else "Score: 2" if "slow" in question else "I cannot say."
        body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args): ...


def test_judge(monkeypatch, tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(judge, "WAIT", 0.01)
    cfg = TrainConfig(
        judge_url=f"http://127.0.0.1:{server.server_address[1]}/v1", judge_model="j", reward_funcs=["judge"]
    )
    check(cfg)
    group = [trajectory(text) for text in ("good", "slow", "odd")]
    asyncio.run(score(group, {"judge": judge.judge}, cfg))
    assert [t.info["reward"] for t in group] == [0.7, 0.2, 0.0]
    assert [t.info["unrewarded"] for t in group] == [0, 0, 1]
    assert group[1].info["rewards"]["judge/attempts"] == 2 and sum("odd" in q for q in Judge.seen) == 3
    cfg.judge_template = str(tmp_path / "t.txt")
    (tmp_path / "t.txt").write_text("{prompt}|{completion}|{answer}")
    assert judge.judge(["good"], ["q"], cfg, answer=["x"])[0]["reward"] == 0.7 and Judge.seen[-1] == "q|good|x"
    server.shutdown()
    for wrong, message in (
        (dict(judge_url=None), "needs --judge_url"),
        (dict(judge_template="none.txt"), "no such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(TrainConfig(**{"judge_url": "http://x/v1", "judge_model": "j", "reward_funcs": ["judge"]} | wrong))


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


def test_code_in_the_sandbox():
    """Tests are counted one by one; leaving early, printing or hanging passes none."""
    right = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
    tests = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "for n in range(3):\n    assert add(n, 0) == n"]
    half = "def add(a, b): return int(a) + b"
    cheats = ["import sys; sys.exit(0)", "print('passed ' * 100)", "while True: pass", "syntax error ("]
    scores = code_tests([right, half, *cheats], [tests] * 6)
    assert [one["reward"] for one in scores] == pytest.approx([1.0, 2 / 3, 0, 0, 0, 0])
    assert [one["timeout"] for one in scores] == [0, 0, 0, 0, 1, 0]


def test_squad():
    """The numbers of SQuAD's own examples of what counts as equal."""
    pairs = [("The  Eiffel Tower!", "eiffel tower", 1, 1), ("a tower in Paris", "the Eiffel Tower", 0, 2 * 1 / (3 + 2))]
    pairs += [("", "x", 0, 0), ("<answer>Rome</answer>", ["Paris", "Rome"], 1, 1)]
    for given, wanted, em, f1 in pairs:
        assert squad_em([given], [wanted]) == [em] and squad_f1([given], [wanted]) == [pytest.approx(f1)]
    assert squad_em(["x"], [None]) == [None]


def test_repetition():
    assert repetition([[1, 2, 3, 4, 5], [1, 2, 3, 1, 2, 3], [1], [7] * 10]) == pytest.approx([0, -1 / 4, 0, -7 / 8])
