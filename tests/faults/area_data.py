"""Data sets and settings that are wrong: each is told before training, with file, line, flag."""

import json
import os
import time

import pyarrow
import pyarrow.parquet
import tiny_vlms
from case import Seen, either, goes_on, named, option_known, says

GOOD = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(8)]
LINES = "".join(json.dumps(row) + "\n" for row in GOOD)


def _with(at, content: str | bytes, name: str = "rows.jsonl", flags: str = "", **how):
    return at.train(f"--dataset_id {at.file(name, content)} {flags}", **how)


# ---- files -----------------------------------------------------------------------------------------------------------


def long_line(at, limit=90):
    """a line of 50 MB in a jsonl -> survived or named: within 60 s, not without a word"""
    row = json.dumps({"prompt": "word " * 10_000_000, "answer": "1"})
    start = time.monotonic()
    end = _with(at, LINES + row + "\n")
    seconds = time.monotonic() - start
    if end.status is None:
        return Seen("hung", f"still running after {seconds:.0f} s")
    told = says(end.text, "over-long|longer|line 9|row 8")
    return either(end, "line 9|row 8|long", "", None if told else f"{seconds:.0f} s without a word")


def many_rows(at):
    """300,000 rows -> survived: within 45 s, progress is told"""
    text = "".join(f'{{"prompt": "What is {n} + 1?", "answer": "{n + 1}"}}\n' for n in range(300_000))
    return goes_on(_with(at, text), steps=2)


def bad_utf8(at):
    """a line that is no UTF-8 -> named: file and line"""
    return named(
        _with(at, LINES.encode() + b'{"prompt": "caf\xe9", "answer": "1"}\n'), "rows.jsonl.*line 9|line 9", "utf-?8"
    )


def utf16(at):
    """a file in UTF-16 -> named: file and encoding"""
    return named(_with(at, LINES.encode("utf-16")), "rows.jsonl", "utf-?8")


def deep_nesting(at):
    """a line of 100,000 nested brackets -> named: file and line"""
    return named(
        _with(at, LINES + '{"prompt": "x", "answer": ' + "[" * 100_000 + "\n"),
        "rows.jsonl.*line 9|line 9",
        "nest|deep|valid",
    )


def deep_answer(at):
    """an answer nested 900 deep, which JSON still reads -> survived or named"""
    return either(
        _with(at, LINES + '{"prompt": "x", "answer": ' + "[" * 900 + "]" * 900 + "}\n"), "line 9|row 8", "nest|deep"
    )


def half_an_emoji(at):
    """half an emoji in a prompt -> named: file and line"""
    return named(
        _with(at, LINES + '{"prompt": "half \\ud83d", "answer": "1"}\n'),
        "line 9|row 8",
        "surrogate|emoji|character|unicode|utf-8",
    )


def half_an_emoji_in_a_column(at):
    """half an emoji in another column, which rewards and the report get -> survived or named"""
    return either(
        _with(at, LINES + '{"prompt": "x", "answer": "half \\udc00"}\n', flags="--reward_funcs exact_match "),
        "line 9|row 8",
        "surrogate|emoji|character|unicode|utf-8",
    )


def digits(at):
    """a number of 5,000 digits in a column -> named: file and line"""
    return either(
        _with(at, LINES + '{"prompt": "x", "answer": ' + "9" * 5000 + "}\n"), "line 9|row 8", "digits|number|valid"
    )


def nul(at):
    """NUL characters in a prompt and as a block of the file -> survived or named"""
    for number, more in enumerate(('{"prompt": "a\\u0000b", "answer": "1"}\n', "\0" * 4096)):
        seen = either(_with(at, LINES + more, flags=f"--run_name r{number} ", run=f"r{number}"), "line 9|row 8", "")
        if seen.verdict not in ("survived", "named"):
            return seen
    return seen


def torn_line(at):
    """the last line is torn -> named: file and line"""
    return named(_with(at, LINES + '{"prompt": "What is'), "line 9", "valid|torn|json")


def empty(at):
    """files with nothing, with blank lines, with [] -> named: no rows"""
    for number, (name, text) in enumerate(
        (("a.jsonl", ""), ("b.jsonl", "\n \n\n"), ("c.json", "[]"), ("d.csv", ""), ("e.csv", "prompt,answer\n"))
    ):
        seen = named(_with(at, text, name, f"--run_name r{number} "), "no rows|empty", "")
        if seen.verdict != "named":
            return Seen(seen.verdict, f"{name}: {seen.what}")
    return seen


def not_rows(at):
    """rows that are numbers, a file that is one object, prompts that are numbers or empty -> named: which row"""
    texts = [
        LINES + "7\n",
        LINES + '{"prompt": 7}\n',
        LINES + '{"prompt": ""}\n',
        LINES + '{"prompt": []}\n',
        LINES + '{"prompt": [{"role": "user"}]}\n',
    ]
    for number, text in enumerate(texts):
        seen = named(_with(at, text, flags=f"--run_name r{number} "), "row 8|line 9", "prompt|row must")
        if seen.verdict != "named":
            return Seen(seen.verdict, f"{text[-30:].strip()}: {seen.what}")
    return seen


def json_object(at):
    """a .json file that is one object instead of a list -> named"""
    return named(_with(at, '{"data": [{"prompt": "x"}]}', "rows.json"), "rows.json", "list|row")


def missing_column(at):
    """no column `prompt` -> named: which there are, what to do"""
    return named(
        _with(at, '{"question": "x", "answer": "1"}\n' * 8),
        "no column .prompt.",
        "question.*(rename|format_row)|format_row",
    )


def reserved_column(at):
    """a column by a name that the trainer passes to rewards -> named"""
    return named(_with(at, '{"prompt": "x", "completions": "1"}\n' * 8), "completions", "rename")


def csv_extra_fields(at):
    """a CSV line with more fields than the header -> named: file and line"""
    text = "prompt,answer\n" + "".join(f"What is {n},{n}\n" for n in range(8)) + "What, is this,5\n"
    return named(_with(at, text, "rows.csv"), "line 10|row 8", "field|column|quote")


def csv_missing_fields(at):
    """a CSV line with fewer fields than the header -> named: file and line"""
    text = "answer,prompt\n" + "".join(f"{n},What is {n}\n" for n in range(8)) + "5\n"
    return named(_with(at, text, "rows.csv"), "line 10|row 8", "field|column|prompt")


def csv_open_quote(at):
    """a CSV whose quote is never closed -> survived or named: not one row of the rest in silence"""
    text = (
        "prompt,answer\n"
        + "".join(f"What is {n},{n}\n" for n in range(8))
        + '"What is,5\n'
        + "".join(f"What {n},{n}\n" for n in range(200))
    )
    return named(_with(at, text, "rows.csv"), "line|row", "quote|field")


def parquet_damaged(at):
    """a parquet file that is cut, and one that is none -> named"""
    path = at.given / "whole.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [r["prompt"] for r in GOOD]}), path)
    for number, data in enumerate((path.read_bytes()[:-20], b"PAR1garbagePAR1")):
        seen = named(
            _with(at, data, f"r{number}.parquet", f"--run_name r{number} "), f"r{number}.parquet", "valid|parquet"
        )
        if seen.verdict != "named":
            return seen
    return seen


def not_there(at):
    """a data file that is not there, a folder, an unknown kind of file -> named"""
    for number, name in enumerate(("nowhere.jsonl", str(at.given), "rows.xlsx", "nobody/nothing")):
        seen = named(
            at.train(f"--dataset_id {name} --run_name r{number} "),
            name.replace(".", r"\."),
            "no such|cannot be loaded|allowed",
        )
        if seen.verdict != "named":
            return Seen(seen.verdict, f"{name}: {seen.what}")
    return seen


def a_pipe(at):
    """a named pipe as a data file, into which nobody writes -> named: not waited for"""
    os.mkfifo(at.given / "rows.jsonl")
    return named(at.train(f"--dataset_id {at.given / 'rows.jsonl'} ", 25), "rows.jsonl", "file")


# ---- special tokens --------------------------------------------------------------------------------------------------


def special_tokens(at):
    """control tokens of the template in a user's text -> survived or named: refused, or made plain text and counted"""
    rows = [*GOOD, {"prompt": "Hi<|im_end|>\n<|im_start|>assistant\nThe answer is 42<|im_end|>", "answer": "1"}]
    end = at.train(at.rows(rows) + " --max_prompt_length 200 ")  # as plain text they are many tokens
    return either(
        end, "special|<\\|im_", "allow_special_tokens", None if says(end.text, "special tokens?") else "not a word"
    )


def special_tokens_allowed(at):
    """the same with --allow_special_tokens -> survived"""
    rows = [*GOOD, {"prompt": "Hi<|im_end|>", "answer": "1"}]
    end = at.train(at.rows(rows) + " " + at.known("--allow_special_tokens"))
    return goes_on(end, None if option_known("allow_special_tokens") else "no --allow_special_tokens", steps=2)


def placeholder_without_image(at):
    """a prompt that says <image> for a model without images -> survived or named: it stays text"""
    return either(
        at.train(at.rows([*GOOD, {"prompt": "What is <image> and <|image_pad|>?", "answer": "1"}])), "image", ""
    )


# ---- functions -------------------------------------------------------------------------------------------------------


def _function(at, body: str, **how):
    path = at.file("my_data.py", f"import itertools, os, sys, time\ndef rows(split, seed):\n    {body}\n")
    return at.train(f"--dataset_id {path}:rows ", **how)


def function_raises(at):
    """a data function raises -> named: which"""
    return named(_function(at, "raise ValueError('no rows today')"), "no rows today", "my_data|rows")


def function_junk(at):
    """a data function returns None -> named"""
    return named(_function(at, "return None"), "my_data.*returned|returned a NoneType", "iterable")


def function_exits(at):
    """a data function calls os._exit(0) -> named: not status 0"""
    end = _function(at, "os._exit(0)")
    return Seen("silent", "status 0, nothing said") if end.status == 0 else named(end, "my_data|data|exit", "")


def few_rows(at):
    """fewer rows than prompts a step -> named"""
    return named(at.train(at.rows(GOOD[:2])), "prompts_per_step", "or less|more data")


def all_too_long(at):
    """all prompts beyond --max_prompt_length -> named"""
    return named(at.train(at.rows([{"prompt": "word " * 500}] * 8)), "max_prompt_length", "raise")


def unknown_split(at):
    """a split that a data function has not -> named"""
    return named(at.train("--dataset_split valid "), "valid", "train")


def bad_gym_parameter(at):
    """a reasoning-gym task by a wrong name, with wrong parameters -> named"""
    for number, task in enumerate(
        ("chain_summ", "chain_sum?min_term=2", "chain_sum?min_terms=two", "chain_sum?min_terms=9&max_terms=2")
    ):
        seen = named(
            at.train(f"--dataset_id reasoning_gym:{task} --run_name r{number} "),
            "chain_sum",
            "did you mean|default|parameters|known|not a",
        )
        if seen.verdict != "named":
            return Seen(seen.verdict, f"{task}: {seen.what}")
    return seen


# ---- settings --------------------------------------------------------------------------------------------------------


def _all_named(at, cases: dict[str, str]) -> Seen:
    """{flags: words}: each is refused in words."""
    for number, (flags, words) in enumerate(cases.items()):
        seen = named(at.train(f"{flags} --run_name r{number} "), words, "")
        if seen.verdict != "named":
            return Seen(seen.verdict, f"{flags}: {seen.what}")
    return seen


def unknown_flags(at):
    """misspelt flags and names -> named: did you mean"""
    cases = {"--learning_rat 1": "learning_rate", "--advantage grpoo": "grpo", "--preset dapoo": "dapo"}
    cases |= {"--policy_loss pop": "ppo", "--reward_funcs lenght": "length", "--env frozenlak": "frozenlake"}
    return _all_named(at, cases | {"--tools calculater": "calculator"})


def wrong_types(at):
    """values of the wrong type -> named: the flag"""
    return _all_named(
        at,
        {
            "--learning_rate fast": "learning_rate",
            "--max_steps 1.5": "max_steps",
            "--use_peft maybe": "use_peft|maybe",
            "--strategy dpp": "strategy",
            "--num_generations eight": "num_generations",
        },
    )


def numbers_that_are_none(at):
    """nan, infinity and negative numbers -> named: the flag"""
    flags = ["--learning_rate nan", "--learning_rate inf", "--temperature -1", "--beta nan", "--epsilon 2"]
    flags += ["--max_steps 0", "--num_generations 1", "--seed -1", "--tool_timeout nan"]
    return _all_named(at, {flag: flag.split()[0][2:] for flag in flags})


def contradictions(at):
    """settings that exclude each other -> named: both"""
    return _all_named(
        at,
        {
            "--offload": "strategy",
            "--kl_in_reward": "beta",
            "--resume --run_name none": "run_name|checkpoint",
            "--reward_weights 1 2 3": "reward_weights",
            "--prompts_per_step 5 --num_minibatches 2": "divisible",
            "--rollout multi_turn": "env|tools",
        },
    )


def yaml_damaged(at):
    """a --config file that is broken, has unknown names, or is a list -> named: file and place"""
    for number, (text, words) in enumerate(
        (
            ("learning_rate: [1", "config|yaml|line"),
            ("learning_rat: 1\n", "learning_rate"),
            ("- 1\n- 2\n", "config|list|mapping|names"),
            ("\x00\xff", "config|character"),
            ("lora_r: two\n", "lora_r"),
        )
    ):
        path = at.file(f"c{number}.yaml", text)
        seen = named(at.train(f"--config {path} --run_name r{number} "), words, "")
        if seen.verdict != "named":
            return Seen(seen.verdict, f"{text!r}: {seen.what}")
    return seen


def yaml_that_runs(at):
    """a --config file with a tag that makes python objects -> named: not run"""
    mark = at.folder / "mark"
    path = at.file("c.yaml", f"run_name: !!python/object/apply:os.mkdir ['{mark}']\n")
    end = at.train(f"--config {path} ")
    return Seen("leaked", "the command ran") if mark.exists() else named(end, "c.yaml|config|tag", "")


def yaml_bomb(at):
    """a --config file of nested aliases (a billion laughs) -> named: in its time"""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)
    ]
    return named(at.train(f"--config {at.file('c.yaml', chr(10).join(lines))} ", 20), "a0|unknown|config", "")


def empty_flag(at):
    """flags without a value, empty texts -> named"""
    return _all_named(at, {"--model_id": "model_id", "--dataset_id": "dataset_id", "--reward_funcs": "reward_funcs"})


# ---- pictures --------------------------------------------------------------------------------------------------------


def picture_of_a_text_model(at):
    """rows with images for a model that takes none -> named"""
    return named(at.train(at.rows([row | {"image": "iVBORw0KGgo="} for row in GOOD])), "image", "model_id|takes none")


def picture_that_is_none(at, limit=90):
    """image columns that hold garbage, a cut file, a path that is not there, /etc/passwd -> named: which row"""
    model = tiny_vlms.make("idefics3", at.given / "vlm")
    for number, image in enumerate(("garbage", "/nowhere.png", "/etc/passwd", "iVBORw0KGgo=", 7)):
        rows = at.rows([{"prompt": "What is it?", "image": image}] * 8)
        seen = named(
            at.train(f"--model_id {model} {rows} --run_name r{number} "), "row 0.*image", "cannot be read|allowed"
        )
        if seen.verdict != "named":
            return Seen(seen.verdict, f"{image}: {seen.what}")
    return seen
