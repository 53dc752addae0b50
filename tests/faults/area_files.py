"""Files and functions that are handed in - settings, rows, rewards, templates - and what is read as something else."""

import json
import os
import threading

import pyarrow
import pyarrow.parquet
from case import Seen, either, goes_on, named, says

ROWS = "".join(json.dumps({"prompt": f"What is {n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(8))


def _config(at, content: str | bytes, cause: str, remedy: str = "", flags: str = "") -> Seen:
    return named(at.train(f"--config {at.file('given.yaml', content)} {flags}", 25), cause, remedy)


def _kept(at, content: str):
    """(settings as the run wrote them down, the run)"""
    end = at.train(f"--config {at.file('given.yaml', content)} ")
    path = end.run / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}, end


def _rows(at, content: str | bytes, name: str = "rows.jsonl", flags: str = ""):
    return at.train(f"--dataset_id {at.file(name, content)} {flags}")


# ---- settings --------------------------------------------------------------------------------------------------------


def yaml_key_twice(at):
    """a --config file with a setting twice -> named: which, on which lines"""
    return _config(at, "beta: 0.1\nwarmup_ratio: 0\nbeta: 0\n", "line 3.*`beta` stands there twice", "line 1")


def yaml_key_twice_in_a_domain(at):
    """a domain that has a setting twice -> named: which, on which lines"""
    text = "domains:\n  - name: a\n    reward_timeout: 1\n    reward_timeout: 9\n"
    return _config(at, text, "line 4.*`reward_timeout` stands there twice", "line 3")


def yaml_leading_zero(at):
    """lora_r: 010 -> survived: 10, not 8"""
    kept, end = _kept(at, "lora_r: 010\n")
    return goes_on(end, None if kept.get("lora_r") == 10 else f"read as {kept.get('lora_r')}", steps=2)


def yaml_texts(at):
    """texts such as off, 010, 12:30, 3.10 and a date without quotes -> survived: as they are written"""
    given = {"wandb_project": "off", "hub_repo_id": "010", "judge_model": "12:30", "system_prompt": "3.10"}
    given |= {"reward_model": "2024-01-01"}
    kept, end = _kept(at, "".join(f"{name}: {text}\n" for name, text in given.items()))
    wrong = {name: kept.get(name) for name, text in given.items() if kept.get(name) != text}
    return goes_on(end, f"read as {wrong}" if wrong else None, steps=2)


def yaml_base_60(at):
    """a number written as 12:30 -> named: not 750"""
    return _config(at, "seed: 12:30\n", "seed=12:30", "whole number")


def yaml_true_as_text(at):
    """a name that is true -> named: write it in quotes"""
    return _config(at, "wandb_project: true\n", "wandb_project=true", "quotes")


def yaml_switches(at):
    """switches that are on, yes and off -> survived: as they say"""
    kept, end = _kept(at, "mask_truncated: on\ntool_cache: yes\nlog_completions: off\n")
    read = [kept.get(name) for name in ("mask_truncated", "tool_cache", "log_completions")]
    return goes_on(end, None if read == [True, True, False] else f"read as {read}", steps=2)


def yaml_pipe(at):
    """a named pipe as --config, into which nobody writes -> named: not waited for"""
    os.mkfifo(at.given / "pipe.yaml")
    return named(at.train(f"--config {at.given / 'pipe.yaml'} ", 25), "pipe.yaml.*named pipe", "give a YAML file")


def yaml_folder_and_device(at):
    """a folder, /dev/zero and a file of 40 MB as --config -> named: each"""
    large = at.file("large.yaml", "# nothing\n" * 4_000_000)
    for number, (path, words) in enumerate(((at.given, "directory"), ("/dev/zero", "device"), (large, "larger than"))):
        seen = named(at.train(f"--config {path} --run_name r{number} ", 20), words, "give a YAML file")
        if seen.verdict != "named":
            return Seen(seen.verdict, f"{path}: {seen.what}")
    return seen


def yaml_brackets(at):
    """5,000 brackets in a --config file -> named: where, not a traceback"""
    return _config(at, "lora_targets: " + "[" * 5000 + "]" * 5000, "line 1.*deeper than 100", "flatten")


def yaml_not_utf8(at):
    """a --config file in Latin-1, read where the locale is ASCII -> named: the line"""
    path = at.file("given.yaml", b"seed: 1\n# caf\xe9\n")
    end = at.train(f"--config {path} ", LC_ALL="C", PYTHONUTF8="0")
    return named(end, "given.yaml, line 2: not UTF-8", "save the file as UTF-8")


def yaml_utf8_in_an_ascii_locale(at):
    """a --config file with umlauts in UTF-8, read where the locale is ASCII -> survived: read as UTF-8"""
    path = at.file("given.yaml", "system_prompt: Grüße\n")
    end = at.train(f"--config {path} ", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    kept = json.loads((end.run / "config.json").read_text(encoding="utf-8")) if end.status == 0 else {}
    return goes_on(end, None if kept.get("system_prompt") == "Grüße" else f"read as {kept}", steps=2)


def yaml_bomb_in_a_setting(at):
    """a billion laughs as the value of a setting that exists -> named: in its time"""
    lines = ["lora_targets: &a0 [x, x, x, x, x, x, x, x, x]"]
    names = [
        "reward_funcs",
        "tools",
        "report_to",
        "server_urls",
        "domains",
        "reward_weights",
        "model_id",
        "env",
        "seed",
    ]
    lines += [f"{name}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n, name in enumerate(names, 1)]
    return _config(at, "\n".join(lines), "line \\d.*100,000 values", "")


def yaml_in_itself(at):
    """a list that holds itself, by an alias -> named"""
    return _config(at, "lora_targets: &a [x, *a]\n", "line 1.*holds itself", "")


def yaml_empty(at):
    """an empty --config file, and one of comments alone -> survived: the defaults"""
    for number, text in enumerate(("", "# nothing yet\n")):
        path = at.file(f"c{number}.yaml", text)
        seen = goes_on(at.train(f"--config {path} --run_name r{number} ", run=f"r{number}"), steps=2)
        if seen.verdict != "survived":
            return seen
    return seen


# ---- the run folder --------------------------------------------------------------------------------------------------


def two_files_of_one_name(at):
    """reward files a/r.py and b/r.py -> survived: both are in the run folder, as they were run"""
    code = "def {}(completions, **columns):\n    return [{}] * len(completions)\n"
    first, second = at.file("a/r.py", code.format("one", 1)), at.file("b/r.py", code.format("two", 2))
    end = at.train(f"--reward_funcs {first}:one {second}:two ")
    found = sorted(path.read_text(encoding="utf-8") for path in end.run.rglob("r.py"))
    wanted = sorted((first.read_text(encoding="utf-8"), second.read_text(encoding="utf-8")))
    return goes_on(end, None if found == wanted else f"{len(found)} of 2 copies", steps=2)


def template_called_as_the_runs_own(at):
    """a judge's template called metrics.jsonl, rewards in a folder state.json -> survived: nothing is mixed up"""
    template = at.file("metrics.jsonl", "{prompt} {completion} {{no metrics}}")
    reward = at.file("state.json/r.py", "def r(completions, **columns):\n    return [1.0] * len(completions)\n")
    end = at.train(f"--judge_template {template} --reward_funcs {reward}:r ")
    text = (end.run / "metrics.jsonl").read_text(encoding="utf-8") if end.status == 0 else ""
    wrong = "the template is in metrics.jsonl" if "no metrics" in text else None
    copies = [path for name in ("metrics.jsonl", "r.py") for path in end.run.rglob(name) if path.parent != end.run]
    return goes_on(end, wrong or (None if len(copies) == 2 else f"{len(copies)} of 2 copies"), steps=2)


# ---- rows ------------------------------------------------------------------------------------------------------------


def json_key_twice(at):
    """a row with `answer` twice, in a .jsonl and in a .json -> named: file, line and key"""
    texts = {"rows.jsonl": ROWS + '{"prompt": "x", "answer": "1", "answer": "2"}\n'}
    texts["rows.json"] = "[" + ROWS.strip().replace("\n", ",\n") + ',\n{"prompt": "x", "answer": "1", "answer": "2"}]'
    for number, (name, text) in enumerate(texts.items()):
        seen = named(
            _rows(at, text, name, f"--run_name r{number} "), "line 9: key 'answer' stands there twice", "keep one"
        )
        if seen.verdict != "named":
            return Seen(seen.verdict, f"{name}: {seen.what}")
    return seen


def json_key_twice_deep(at):
    """a message of a prompt with `content` twice -> named: file, line and key"""
    row = '{"prompt": [{"role": "user", "content": "a", "content": "b"}], "answer": "1"}\n'
    return named(_rows(at, ROWS + row), "line 9: key 'content' stands there twice", "keep one")


def json_nan(at):
    """NaN, Infinity and 1e999 in a column -> named: file and line"""
    for number, value in enumerate(("NaN", "-Infinity", "1e999")):
        end = _rows(at, ROWS + f'{{"prompt": "x", "answer": {value}}}\n', flags=f"--run_name r{number} ")
        seen = named(end, f"line 9: {value}", "write")
        if seen.verdict != "named":
            return Seen(seen.verdict, f"{value}: {seen.what}")
    return seen


def parquet_column_twice(at):
    """a .parquet with a column twice -> named: which"""
    columns = [pyarrow.array(["a"] * 8)] * 3
    path = at.given / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=["prompt", "answer", "answer"]), path)
    return named(at.train(f"--dataset_id {path} "), "column 'answer' stands there twice", "name of its own")


def parquet_of_nothing(at):
    """a .parquet of 0 bytes, of 0 rows, of 0 columns -> named"""
    paths = [at.given / f"{n}.parquet" for n in range(3)]
    paths[0].touch()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), paths[1])
    pyarrow.parquet.write_table(pyarrow.table({}), paths[2])
    for number, words in enumerate(("0 bytes", "no rows", "no rows|no column")):
        seen = named(at.train(f"--dataset_id {paths[number]} --run_name r{number} "), words, "")
        if seen.verdict != "named":
            return seen
    return seen


def mcp_key_twice(at):
    """an MCP file with two servers of one name -> named: which, not the last one in silence"""
    path = at.file("mcp.json", '{"mcpServers": {"a": {"command": "x"},\n "a": {"command": "y"}}}')
    return named(at.train(f"--mcp_config {path} "), "mcp.json.*key 'a' stands there twice", "keep one")


def mcp_pipe(at):
    """a named pipe as --mcp_config, into which nobody writes -> named: not waited for"""
    os.mkfifo(at.given / "mcp.json")
    return named(at.train(f"--mcp_config {at.given / 'mcp.json'} ", 25), "mcp.json.*pipe", "JSON file")


def mcp_brackets(at):
    """an MCP file of 100,000 brackets -> named: not a traceback"""
    path = at.file("mcp.json", "[" * 100_000)
    return named(at.train(f"--mcp_config {path} "), "mcp.json.*deeper than 100", "flatten")


def template_pipe(at):
    """a named pipe as --judge_template -> named: not waited for"""
    os.mkfifo(at.given / "t.txt")
    flags = f"--judge_template {at.given / 't.txt'} --reward_funcs judge --judge_url http://x/v1 --judge_model x "
    return named(at.train(flags, 25), "t.txt", "no such file")


# ---- functions -------------------------------------------------------------------------------------------------------


def _function(at, body: str, **how):
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path = at.file("my_data.py", f"import itertools, time\ndef rows(split, seed):\n{lines}")
    return at.train(f"--dataset_id {path}:rows ", **how)


def function_without_end(at, limit=120):
    """a data function whose generator never ends -> named: how many rows, what to do"""
    end = _function(at, "while True:\n    yield {'prompt': 'What is 1 + 1?', 'answer': '2'}")
    return named(end, "my_data.py:rows gave 2,000,000 rows and goes on", "itertools.islice")


def function_that_is_slow(at):
    """a data function that takes 12 s before and between its rows -> survived: says how far it is"""
    body = "rows = [{'prompt': 'What is 1 + 1?', 'answer': '2'}] * 4\n"
    body += "time.sleep(6)\nyield from rows\ntime.sleep(6)\nyield from rows"
    end = _function(at, body)
    told = says(end.text, "my_data.py:rows: 0 rows after 5") and says(end.text, "my_data.py:rows: 4 rows after 10")
    return goes_on(end, None if told else "not a word meanwhile", steps=2)


def function_with_a_long_list(at):
    """a data function that gives a generator with exactly its end -> survived: no limit met"""
    end = _function(at, "return itertools.islice(itertools.repeat({'prompt': 'What is 1 + 1?', 'answer': '2'}), 3000)")
    return goes_on(end, None if says(end.text, "3000 rows") else "not 3000 rows", steps=2)


def rows_through_a_pipe(at):
    """rows through a named pipe into which somebody does write -> named: each rank would read a part"""
    path = at.given / "rows.jsonl"
    os.mkfifo(path)
    threading.Thread(target=lambda: path.write_text(ROWS, encoding="utf-8"), daemon=True).start()
    seen = either(at.train(f"--dataset_id {path} ", 30), "rows.jsonl.*pipe", "give a file")
    with open(path, encoding="utf-8"):  # so that the writer ends
        return seen
