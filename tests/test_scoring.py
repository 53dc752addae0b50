"""Rewards that take processes or a model: math, reasoning-gym, code in the sandbox, a reward model; IFEval's checks."""

import sys

import pytest
import torch
from live import Process, running
from server_fixture import free_port
from test_rows_as_given import tokenizer_of

from config import ConfigError, TrainConfig, check
from data import load_rows
from rewards import get_reward_function
from safety import sandbox
from scoring.code import code_tests
from scoring.instructions import instructions
from scoring.reward_model import reward_model

# ---- math and reasoning-gym, in processes of their own --------------------------------------------------------------


def graded(cases: list[tuple]) -> tuple[list, list]:
    """(scores, texts) of (answer, text, text, ...)."""
    answers, texts = zip(*((case[0], text) for case in cases for text in case[1:]), strict=True)
    return get_reward_function("math")(completions=list(texts), answer=list(answers)), list(texts)


def test_math():
    right = [
        (r"\frac{1}{2}", r"so \boxed{\frac{2}{4}}", "the answer is 0.5", "\\boxed{\u00bd}", r"\boxed{50\%}"),
        ("x+1", "$1+x$", "<think>x</think><answer>1+x</answer>"),
        ("#### 72", "That makes 72."),
        ("1,234", "1234", r"\boxed{1{,}234}"),
        ("5", "<answer>5 eggs</answer>", "<answer>**5**</answer>", "So 1 2 3 <answer>5", "It is 5 cm\u00b2."),
        (r"\text{Evelyn}", r"\boxed{Evelyn}"),
        (r"2\sqrt{3}", "<answer>2\u221a3</answer>", r"\boxed{\sqrt{12}}"),
        (r"[0,\infty)", "<answer>[0,\u221e)</answer>"),
    ]
    scores, texts = graded(right)
    assert {text: score for text, score in zip(texts, scores, strict=True) if score != 1} == {}
    wrong = [("5", "6", "", "x" * 5000, "<answer>6 eggs</answer>"), ("silent", r"\boxed{listen}"), ("x+1", "x-1")]
    assert not any(graded(wrong)[0])
    assert get_reward_function("math")(completions=["5", "5"], answer=[None, ""]) == [None, None]


def test_math_pays_for_no_sum_that_the_grader_does_itself():
    """The question over again is equal to its answer: where that is a number, a number has to be given."""
    cases = [
        ("408", "<answer>12 * 34</answer>", "So 12 * 34", r"\boxed{x = 12 \cdot 34}"),
        ("3", r"\boxed{\log_2 8}", "<answer>\u221a9</answer>"),
        ("120", r"\boxed{5!}"),
    ]
    assert graded(cases)[0] == [{"reward": 0.0, "unevaluated": 1.0}] * 6
    worked_out = [("408", r"\boxed{12 * 34 = 408}", r"\boxed{x = 408}"), ("-5", r"\boxed{p(2) = -5}"), ("1000", "10^3")]
    assert graded(worked_out)[0] == [1] * 4


def test_reasoning_gym_scores_with_the_parameters_of_the_row():
    tasks = ("chain_sum?size=1", "puzzle24?max_value=6&size=1", "countdown?size=1")
    rows = [load_rows(f"reasoning_gym:{task}", seed=1)[0] for task in tasks]
    function, answer = get_reward_function("reasoning_gym"), rows[0]["answer"]
    columns = {key: [row.get(key) for row in rows] for key in rows[0]}
    said = [f"<think>hm</think><answer>{answer}</answer>", rows[1]["answer"], rows[2]["answer"]]
    assert function(completions=said, **columns) == [1, 1, 1]
    _, above_6, other_numbers = function(completions=["", "9 + 9 + 3 + 3", rows[2]["answer"] + " + 0"], **columns)
    assert above_6 < 0.1 and other_numbers < 0.1
    several = {key: [value] * 3 for key, value in rows[0].items()}
    right, wrong, sentence = function(completions=[answer, "x", f"It is {answer}."], **several)
    assert right == 1 and wrong == 0 and 0 < sentence < 1
    del several["reasoning_gym_task"]  # a data set of someone else's: metadata may be JSON, too
    several["metadata"] = ['{"source_dataset": "chain_sum"}', rows[0]["metadata"], None]
    assert function(completions=[answer] * 3, **several) == [1, 1, None]
    with pytest.raises(ConfigError, match="chain_sun"):
        function(completions=["1"], metadata=[{"source_dataset": "chain_sun"}], answer=["1"])


def test_a_scorer_that_fails_is_seen_not_fatal():
    row = load_rows("reasoning_gym:prime_factorization?size=1")[0]  # its scorer calls int() on whatever stands there
    columns = {key: [value] * 2 for key, value in row.items()}
    values = get_reward_function("reasoning_gym")(completions=["garbage (", row["answer"]], **columns)
    assert values == [{"reward": 0.0, "scorer_error": 1.0}, 1]


# ---- code -----------------------------------------------------------------------------------------------------------


def test_code_in_the_sandbox(monkeypatch):
    """Tests are counted one by one, the last block of python is the program; leaving early or hanging passes none."""
    monkeypatch.setattr(sandbox, "allow_uncontained", True)  # so that this runs everywhere
    right = "First:\n```bash\npip install x\n```\nThen:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
    tests = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'", "for n in range(3):\n    assert add(n, 0) == n"]
    half = "def add(a, b): return int(a) + b"
    cheats = ["import sys; sys.exit(0)", "while True: pass", "syntax error ("]
    scores = code_tests([right, half, *cheats], [tests] * 5)
    assert [one["reward"] for one in scores] == pytest.approx([1.0, 2 / 3, 0, 0, 0])
    assert [one["timeout"] for one in scores] == [0, 0, 0, 1, 0]
    assert code_tests([right] * 2, [None, []]) == [None, None]
    with pytest.raises(ValueError, match="the test 'assert add' is not python|must be a list of python statements"):
        code_tests([right], [[3]])
    monkeypatch.setattr(sandbox.sys, "executable", "/nowhere/python")
    assert code_tests([right], [tests]) == [{"reward": 0.0, "timeout": 0.0, "error": 1.0}]


# ---- instructions ---------------------------------------------------------------------------------------------------

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


def test_every_instruction():
    for name, (arguments, good, bad) in FOLLOWED.items():
        for text in (*good, *bad):
            (result,) = instructions([text], [[name]], [[arguments | {"of_parquet": None}]])
            assert result == {name: float(text in good), "reward": float(text in good)}, (name, text)


def test_instructions_of_a_row():
    names = ["punctuation:no_comma", "change_case:english_lowercase"]
    (result, nothing) = instructions(["Hm <answer>One</answer>", "x"], [names, None], [[{}, None], None])
    assert result == {names[0]: 1, names[1]: 0, "reward": 0.5} and nothing is None
    unchecked, given = "language:response_language", {"language": "de"}  # IFEval's, which nothing here checks
    assert instructions(["x", "x"], [[unchecked], [unchecked, names[0]]], [[given], [given, {}]]) == [
        None,
        {names[0]: 1, "reward": 1},
    ]
    with pytest.raises(ValueError, match="no instruction 'language:klingon'; there are keywords:existence"):
        instructions(["x"], [["language:klingon"]], [[{}]])


# ---- a learned reward model -----------------------------------------------------------------------------------------

CHAT = [[{"role": "user", "content": "2 + 2?"}]] * 3
SAID = ["4", "It is four, I think.", ""]
ANSWERS = [[{"role": "assistant", "content": text}] for text in SAID]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """(folder, tokenizer, model) of a random sequence classifier with one output, whose tokenizer adds a BOS."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder, tokenizer = tmp_path_factory.mktemp("reward") / "model", tokenizer_of(bos=True)
    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)  # as vLLM wants
    config = LlamaConfig(vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **shape)
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer, model


def expected(classifier, texts: list[str] | None = None) -> list[float]:
    """One row at a time, so that nothing is padded."""
    _, tokenizer, model = classifier
    chats = [[*prompt, *answer] for prompt, answer in zip(CHAT, ANSWERS, strict=True)]
    texts = texts or [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    with torch.no_grad():
        rows = [tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in texts]
        return [float(model(**row).logits[0, 0]) for row in rows]


def plain_scores(where: str, classifier) -> None:
    """Where the policy sees text, text is scored: behind one BOS, whoever wrote it."""
    cfg, bos = TrainConfig(reward_model=where, no_apply_chat_template=True), classifier[1].bos_token
    found = reward_model(["4", "4"], ["2 + 2?", bos + "2 + 2?"], cfg)
    assert found == pytest.approx(expected(classifier, [bos + "2 + 2?4"] * 2), abs=1e-4)


def test_scores_are_the_classifiers(classifier):
    """A string prompt is scored as the chat that the policy sees, or as text where that sees text."""
    cfg = TrainConfig(reward_model=str(classifier[0]))
    scores = reward_model(ANSWERS, CHAT, cfg)
    assert scores == pytest.approx(expected(classifier), abs=1e-5) and len(set(scores)) == 3
    assert reward_model(SAID, ["2 + 2?"] * 3, cfg) == pytest.approx(scores, abs=1e-5)
    plain_scores(cfg.reward_model, classifier)
    with pytest.raises(ConfigError, match="reward_model needs --reward_model"):
        check(TrainConfig(reward_funcs=["reward_model"]))


@pytest.mark.slow
def test_scores_of_a_vllm_server(classifier, tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_MODEL_TOKEN", "secret")
    port = free_port()
    # `vllm serve` itself wants a distribution of the name vllm; the CPU build is called otherwise.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(classifier[0])]
    command += f"--port {port} --runner pooling --api-key secret --dtype float32 --max-model-len 256".split()
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    url = f"http://127.0.0.1:{port}"
    with running(Process([*command, "--enforce-eager"], tmp_path / "log", **env)) as server:
        server.answer(f"{url}/health")
        scores = reward_model(ANSWERS, CHAT, TrainConfig(reward_model=url))
        plain_scores(url, classifier)
    assert scores == pytest.approx(expected(classifier), abs=1e-4)
