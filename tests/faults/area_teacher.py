"""Teachers' servers that die, change, lie, or answer late, half, twice too much or not at all."""

import contextlib
import http.server
import json
import re
import socket
import threading
import time

from case import Seen, goes_on, named

FLAGS = "--advantage distill --reward_funcs zero --teacher_timeout 8 --prompts_per_step 2 --num_generations 2 "
OURS = "canary-of-the-teacher"


class _Teacher:
    """A server that answers as vLLM does, of a model that gives token t the log-prob -5 - (t % 7) / 7.

    change(path, number, answer): what to send instead, a body, (status, headers, body) or a function that is given the
    handler; None: the answer. number: of this path's requests so far, from 1 on.
    """

    def __init__(self, at, change=None):
        from inputs.processor import load_processor

        tokenizer, server, lock = load_processor("models/tiny"), self, threading.Lock()
        self.asked: dict[str, int] = {}
        self.shift = 0.0  # of all log-probs: another model's

        def completion(body: dict) -> dict:
            def place(token: int) -> dict:
                likeliest = range(1000, 1000 + body["prompt_logprobs"])
                found = {str(one): {"logprob": -3.0 + server.shift, "rank": 1} for one in likeliest}
                return found | {str(token): {"logprob": -5 - (token % 7) / 7 + server.shift, "rank": 99}}

            ids = body["prompt"]
            choice = {"prompt_logprobs": [None, *map(place, ids[1:])], "prompt_token_ids": ids, "text": "", "index": 0}
            return {"model": "teacher", "choices": [choice]}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                with lock:
                    number = server.asked[self.path] = server.asked.get(self.path, 0) + 1
                answer = {
                    "/v1/models": lambda: {"data": [{"id": "teacher", "root": "a/teacher", "max_model_len": 4096}]},
                    "/detokenize": lambda: {"prompt": tokenizer.decode(body["tokens"], skip_special_tokens=False)},
                    "/v1/completions": lambda: completion(body),
                }[self.path]()
                given = change(self.path, number, answer) if change else None
                with contextlib.suppress(OSError):
                    if callable(given):
                        return given(self)
                    status, headers, content = given if isinstance(given, tuple) else (200, {}, given or answer)
                    content = content if isinstance(content, bytes) else json.dumps(content).encode()
                    self.send_response(status)
                    for name, value in ({"Content-Length": str(len(content))} | headers).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)

            do_POST = do_GET

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True).start()
        at.stack.callback(self.stop)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def stop(self) -> None:
        self.http.shutdown()
        with contextlib.suppress(OSError):  # for forks, too, which have inherited it
            self.http.socket.shutdown(socket.SHUT_RDWR)
        self.http.server_close()


def _run(at, change=None, flags: str = "", **how):
    teacher = _Teacher(at, change)
    return at.train(f"{FLAGS}--teacher_urls {teacher.url} {flags}", TEACHER_TOKEN=OURS, **how)


def _in_training(change):
    """`change(answer, number)` of completions that are asked about after the probe at start."""
    return lambda path, number, answer: change(answer, number) if path == "/v1/completions" and number > 1 else None


def _in_choice(**fields):
    """The answers' choice with other fields: values, or functions of the answer's own."""

    def change(answer, number):
        choice = answer["choices"][0]
        for name, value in fields.items():
            choice[name] = value(choice[name]) if callable(value) else value
        return answer

    return _in_training(change)


def _with_logprob(value):
    """The last token's log-prob is another one."""

    def change(scored: list) -> list:
        return [*scored[:-1], {name: one | {"logprob": value} for name, one in scored[-1].items()}]

    return _in_choice(prompt_logprobs=change)


# ---- sound ----------------------------------------------------------------------------------------------------------


def nothing_wrong(at):
    """a teacher without fault -> survived: each token was asked about"""
    end = _run(at)
    return goes_on(end, None if end.status or end.mean("distill/asked") == 1 else "not every token was asked about", 2)


def busy_at_first(at):
    """503 with Retry-After for two requests -> survived: asked again"""
    busy = _in_training(lambda answer, number: (503, {"Retry-After": "1"}, b"{}") if number < 4 else None)
    end = _run(at, busy)
    return goes_on(end, None if end.status or end.mean("distill/asked") == 1 else "not every token was asked about", 2)


def cuts_a_connection(at):
    """a connection is closed without an answer -> survived: asked again"""
    end = _run(at, _in_training(lambda answer, number: (lambda handler: None) if number == 3 else None))
    return goes_on(end, None if end.status or end.mean("distill/asked") == 1 else "not every token was asked about", 2)


def one_of_two_dies(at):
    """two servers, one of them ends after the start -> survived: the other one is asked"""
    first, second = _Teacher(at), _Teacher(at)
    process = at.start(f"{FLAGS}--teacher_urls {first.url} {second.url} --max_steps 3 --teacher_timeout 30")
    at.reached(process, r"step 1/3")
    first.stop()
    end = at.ended(process)
    return goes_on(end, None if end.status or end.mean("distill/asked") == 1 else "not every token was asked about", 3)


def one_of_two_hangs(at, limit=90):
    """two servers, one of them never answers after the start -> survived: the other one is asked in time"""
    first = _Teacher(at, _in_training(lambda answer, number: lambda handler: time.sleep(20)))
    end = at.train(f"{FLAGS}--teacher_urls {first.url} {_Teacher(at).url} ")
    return goes_on(end, None if end.status or end.mean("distill/asked") == 1 else "not every token was asked about", 2)


def one_completion_fails(at):
    """of 32 completions one is answered with an error -> survived: it is left out and counted"""
    change = _in_training(lambda answer, number: (400, {}, {"error": "too odd"}) if number == 5 else None)
    end = _run(at, change, "--prompts_per_step 4 --num_generations 4 ")
    return goes_on(end, None if end.status or end.mean("rollout/failed") else "not counted as failed", 2)


def one_completion_fails_with_stop(at):
    """the same under --env_errors stop -> named: what the teacher answered"""
    change = _in_training(lambda answer, number: (400, {}, {"error": "too odd"}) if number == 5 else None)
    return named(_run(at, change, "--env_errors stop "), "too odd", "terminal|teacher_timeout")


# ---- gone, late, another --------------------------------------------------------------------------------------------


def dies(at, limit=90):
    """the only server ends after the start -> named: which cannot be reached"""
    teacher = _Teacher(at)
    process = at.start(f"{FLAGS}--teacher_urls {teacher.url} --max_steps 500")
    at.reached(process, r"step 2/500")
    teacher.stop()
    return named(at.ended(process), "cannot be reached", "start it again")


def never_there(at):
    """nothing listens at the address -> named: before anything is loaded"""
    end = at.train(FLAGS + "--teacher_urls http://127.0.0.1:9 --server_timeout 2 ")
    if "Loading the policy" in end.text:
        return Seen("ended", "after loading")
    return named(end, "cannot be reached", "started, at this address")


def comes_back_as_another(at, limit=90):
    """busy for 7 s, then answers with another model's log-probs under the same name -> named: not the teacher it was"""
    begun = []

    def change(path, number, answer):
        if path != "/v1/completions" or number < 3:
            return None
        begun.append(time.monotonic())
        if time.monotonic() - begun[0] < 7:
            return 503, {"Retry-After": "1"}, b"{}"
        for place in answer["choices"][0]["prompt_logprobs"][1:]:
            for one in place.values():
                one["logprob"] -= 1.5
        return None

    return named(
        _run(at, change, "--teacher_timeout 30 "), "not the teacher that this run began with", "resume the run"
    )


def another_folder_behind_the_name(at, limit=90):
    """after 7 s without an answer /v1/models names another folder -> named: which one"""
    begun = []

    def change(path, number, answer):
        if path == "/v1/completions" and number > 2:
            begun.append(time.monotonic())
            if time.monotonic() - begun[0] < 7:
                return 503, {"Retry-After": "1"}, b"{}"
        if path == "/v1/models" and begun:
            return {"data": [{"id": "teacher", "root": "another/folder", "max_model_len": 4096}]}
        return None

    return named(_run(at, change, "--teacher_timeout 30 "), "another/folder", "resume the run")


def another_name_in_the_answers(at):
    """answers say that another model made them -> named: which"""
    end = _run(at, _in_training(lambda answer, number: answer | {"model": "somebody"}))
    return named(end, "somebody", "vLLM server")


def late(at, limit=90):
    """answers take longer than --teacher_timeout -> named: who was waited for"""
    slow = _in_training(lambda answer, number: time.sleep(6))
    return named(_run(at, slow, "--teacher_timeout 3 "), r"teacher.*no answer in time", "teacher_timeout")


def letter_by_letter(at, limit=90):
    """an answer's header comes a letter a second -> named: within the limit"""

    def drip(handler):
        for letter in b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" * 3:
            handler.wfile.write(bytes([letter]))
            time.sleep(1)

    end = _run(at, _in_training(lambda answer, number: drip), "--teacher_timeout 4 ")
    return named(end, "teacher.*no answer", "teacher_timeout")


def busy_for_ever(at, limit=90):
    """503 to every question -> named: within the limit"""
    end = _run(at, _in_training(lambda answer, number: (503, {}, b"{}")), "--teacher_timeout 4 ")
    return named(end, "busy", "teacher_timeout")


# ---- answers that cannot be right -----------------------------------------------------------------------------------


def nan(at):
    """a log-prob is NaN -> named: which token's"""
    return named(_run(at, _with_logprob(float("nan"))), "log-prob nan", "vLLM server")


def above_zero(at):
    """a log-prob is 0.5 -> named: a probability above 1"""
    return named(_run(at, _with_logprob(0.5)), r"log-prob 0\.5", "vLLM server")


def a_text_for_a_number(at):
    """a log-prob is the text "-1.0" -> named"""
    return named(_run(at, _with_logprob("-1.0")), r"log-prob '-1\.0'", "vLLM server")


def minus_infinity(at):
    """a log-prob of -9999, as vLLM writes minus infinity -> survived: clipped, and counted as far below"""
    end = _run(at, _with_logprob(-9999.0))
    return goes_on(end, None if end.status or end.mean("distill/far_below") else "not counted", 2)


def fewer_tokens(at):
    """log-probs of all tokens but the last two -> named: how many came"""
    return named(_run(at, _in_choice(prompt_logprobs=lambda scored: scored[:-2])), r"for \d+ of \d+ tokens", "")


def other_tokens(at):
    """the echo of what was asked has other tokens -> named"""
    return named(_run(at, _in_choice(prompt_token_ids=lambda ids: [*ids[:-1], 7])), "other ones than", "proxy")


def without_the_token_itself(at):
    """the likeliest tokens alone, without the one that stands there -> named"""

    def strip(scored):
        return [None, *({"4000": {"logprob": -1.0}} for _ in scored[1:])]

    return named(_run(at, _in_choice(prompt_logprobs=strip)), "without a log-prob of token", "")


def fewer_likeliest(at):
    """2 likeliest tokens where 4 were asked for -> named: the server's limit"""
    fewer = _in_choice(prompt_logprobs=lambda scored: [at and dict([*at.items()][-2:]) for at in scored])
    return named(_run(at, fewer, "--distill_topk 4 "), "likeliest tokens where 4", "max-logprobs")


def no_prompt_logprobs(at):
    """a server that knows no prompt_logprobs -> named: at start"""
    end = _run(at, lambda path, n, answer: {"model": "teacher", "choices": [{}]} if "completions" in path else None)
    return named(end, "without prompt_logprobs", "vLLM server")


def html(at):
    """a page of HTML with status 200 -> named"""
    return named(
        _run(at, _in_training(lambda answer, number: (200, {}, b"<html>Welcome</html>"))), "no JSON object", ""
    )


def error_500(at, limit=90):
    """500 to every question -> named: what it said"""
    end = _run(at, _in_training(lambda answer, number: (500, {}, {"error": {"message": "out of memory"}})))
    return named(end, "500.*out of memory", "terminal")


def too_much(at):
    """an answer of 60 MB -> named: not read to its end"""
    return named(_run(at, _in_training(lambda answer, number: (200, {}, b'"' + b"x" * 60_000_000))), "MiB", "")


def elsewhere(at):
    """a redirection to another host -> named: not followed, the token not sent there"""
    other = _Teacher(at)
    end = _run(at, lambda path, number, answer: (307, {"Location": other.url + path}, b""))
    return Seen("leaked", "it was followed") if other.asked else named(end, "redirects to", "give that address")


# ---- wrong from the start -------------------------------------------------------------------------------------------


def another_vocabulary(at):
    """one token of 4,096 reads otherwise there -> named: which"""

    def change(path, number, answer):
        return {"prompt": re.sub("the", "teh", answer["prompt"], count=1)} if path == "/detokenize" else None

    return named(_run(at, change), r"another vocabulary: token \d+ is", "family")


def no_detokenize(at):
    """a server that cannot tell its vocabulary -> named: at start"""
    end = _run(at, lambda path, number, answer: (404, {}, {"detail": "Not Found"}) if path == "/detokenize" else None)
    return named(end, "404", "")


def a_small_window(at):
    """the server's window holds no prompt with its completion -> named: how large it must be"""
    models = {"data": [{"id": "teacher", "max_model_len": 70}]}
    return named(
        _run(at, lambda path, n, answer: models if "models" in path else None), "window of 70", "max-model-len"
    )


def two_models_and_no_name(at):
    """the server has two models, and --teacher_model is not given -> named: both"""
    models = {"data": [{"id": "teacher"}, {"id": "helper"}]}
    return named(_run(at, lambda path, n, answer: models if "models" in path else None), "helper", "teacher_model NAME")


def two_servers_of_two_models(at):
    """two servers under one name, another model on each -> named: both addresses"""
    first, second = _Teacher(at), _Teacher(at)
    second.shift = -1.0
    end = at.train(f"{FLAGS}--teacher_urls {first.url} {second.url} ")
    return named(end, f"{first.url}.*{second.url}", "servers of one teacher")


def the_wrong_token(at):
    """401 to every request -> named: the token, which is not shown"""
    end = _run(at, lambda path, number, answer: (401, {}, {"error": f"no {OURS}"}))
    return Seen("leaked", "the token is shown") if OURS in end.text else named(end, "401", "TEACHER_TOKEN")


# ---- what the teacher is shown --------------------------------------------------------------------------------------


def a_prompt_function_that_raises(at):
    """--teacher_prompt's function raises for every trajectory -> named: what it raised"""
    path = at.file("hints.py", "def hint(trajectory):\n    raise KeyError('solution')\n")
    return named(at.train(f"{FLAGS}--teacher_prompt {path}:hint "), "raised KeyError.*solution", "")


def a_prompt_function_that_hangs(at, limit=90):
    """it never returns -> named: whose time is over"""
    path = at.file("hints.py", "import time\ndef hint(trajectory):\n    time.sleep(1000)\n")
    return named(
        at.train(f"{FLAGS}--teacher_prompt {path}:hint --reward_timeout 2 "), "took over 2 s", "reward_timeout"
    )


def a_prompt_function_without_a_prompt(at):
    """it returns a number -> named: what a prompt is"""
    path = at.file("hints.py", "def hint(trajectory):\n    return 7\n")
    return named(at.train(f"{FLAGS}--teacher_prompt {path}:hint "), "cannot show", "text, or chat messages")


def a_prompt_column_that_is_not_there(at):
    """--teacher_prompt names no column -> named: the columns there are"""
    return named(at.train(FLAGS + "--teacher_prompt solution "), "solution is no column", "answer")
