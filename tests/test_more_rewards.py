"""Judge, verification, code in the sandbox, SQuAD's scores, choices, instructions, use of tools, rewards of turns."""

import asyncio
import http.server
import json
import re
import threading

import pytest

from config import ConfigError, TrainConfig, check
from plugins import load_function
from rewards import (
    RewardError,
    code_tests,
    few_turns,
    multiple_choice,
    repetition,
    score,
    squad_em,
    squad_f1,
    tool_use,
    turn_ends,
)
from rollouts import Trajectory
from safety import sandbox
from scoring import judge
from scoring.instructions import INSTRUCTIONS, instructions


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
    for wanted in ("red", "1"):
        with pytest.raises(ValueError, match="is no letter from A to H"):
            multiple_choice(["B"], [wanted])
    with pytest.raises(ValueError, match="instruction keywords:existence with {}: .*'keywords'"):
        instructions(["x"], [["keywords:existence"]], [[{}]])
    with pytest.raises(ValueError, match="has 1 names, kwargs 0"):
        instructions(["x"], [["punctuation:no_comma"]], [[]])
