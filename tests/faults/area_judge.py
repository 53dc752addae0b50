"""Judges, reward models and simulated users that answer in odd ways, late, without end or not at all."""

import contextlib
import gzip
import http.server
import json
import re
import socket
import threading
import time

import pandas
from case import Seen, goes_on, named, says, shorten

KEY = "canary-in-the-address"


class _Server:
    """A model's server: `script` is called with (the request's handler, its body, its number from 1)."""

    def __init__(self, at, script):
        self.asked, self.sent, lock = [], 0, threading.Lock()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.asked.append(body | {"path": self.path, "token": self.headers.get("Authorization", "")})
                    number = len(server.asked)
                with contextlib.suppress(OSError):
                    script(self, body, number)

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        at.stack.callback(self.http.shutdown)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


def _answer(handler, status: int, content, **headers) -> None:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _say(handler, text, ending="stop") -> None:
    _answer(handler, 200, {"choices": [{"message": {"content": text}, "finish_reason": ending}]})


def _run(at, script, flags: str = "", url: str = "", **how):
    """(a run of one step with the judge, the judge's server)"""
    server = _Server(at, script)
    url = (url or "URL/v1").replace("URL", server.url)
    flags = f"--reward_funcs judge length --judge_url {url} --judge_model x --prompts_per_step 1 {flags} "
    return at.train(flags + "--max_steps 1 ", **how), server


def _unscored(end, counted: str = "unread") -> str | None:
    """What is wrong, where no completion was to get a score: each is counted and shown."""
    step = end.steps[0] if end.steps else {}
    if "rewards/judge/mean" in step:
        return f"a reward of {step['rewards/judge/mean']}"
    if step.get(f"rewards/judge/{counted}/mean") != 1:
        return f"not counted as {counted}: {[name for name in step if 'judge' in name]}"
    shown = pandas.read_parquet(next((end.run / "completions").glob("step_*.parquet")))
    return None if all(text.startswith("(not counted: ") for text in shown["judge"]) else "not shown"


def _scored(end, reward: float) -> str | None:
    given = end.steps[0].get("rewards/judge/mean") if end.steps else None
    return None if given is not None and abs(given - reward) < 1e-6 else f"a reward of {given} instead of {reward}"


def _says(at, text: str, ending: str = "stop") -> Seen:
    """The judge says this, which is no score."""
    end, server = _run(at, lambda handler, body, number: _say(handler, text, ending))
    wrong = _unscored(end) if end.status == 0 else None
    if not wrong and len(server.asked) != 8:
        wrong = f"{len(server.asked)} questions for 4 completions, each to be asked twice"
    return goes_on(end, wrong, steps=1)


# ---- what it says ----------------------------------------------------------------------------------------------------


def over_the_scale(at):
    """`Score: 85` -> survived: not 1.0; asked once more, unrewarded, counted and shown"""
    return _says(at, "Well done.\nScore: 85")


def another_scale(at):
    """`Score: 12/100` -> survived: not 1.0; asked once more, unrewarded, counted and shown"""
    return _says(at, "Score: 12/100")


def a_comma(at):
    """`Score: 7,5` -> survived: not .7; asked once more, unrewarded, counted and shown"""
    return _says(at, "Score: 7,5")


def quoted_afterwards(at):
    """the verdict, then a sentence that quotes the answer's "Score: 10" -> survived: the quoted one does not count"""
    return _says(at, 'Score: 2\n\nThe answer asks me to write "Score: 10".')


def quoted_before(at):
    """a line "Score: 10" quoted, then the verdict 2 -> survived: the verdict counts"""
    end, _ = _run(at, lambda handler, body, number: _say(handler, "It says:\nScore: 10\nThat is no proof.\nScore: 2"))
    return goes_on(end, _scored(end, 0.2), steps=1)


def cut_off(at):
    """an answer cut off within "Score: 10", finish_reason length -> survived: does not count"""
    return _says(at, "The answer is right.\nScore: 1", "length")


def whole_json_but_cut(at):
    """a whole JSON object whose finish_reason is content_filter -> survived: does not count"""
    return _says(at, '{"reason": "fine", "score": 9}', "content_filter")


def bold(at):
    """`**Score:** 7` -> survived: .7"""
    end, _ = _run(at, lambda handler, body, number: _say(handler, "Right, but long.\n\n**Score:** 7"))
    return goes_on(end, _scored(end, 0.7), steps=1)


def twice_in_json(at):
    """{"score": 1, "score": 9} -> survived: does not count"""
    return _says(at, '{"score": 1, "score": 9}')


def odd_numbers(at):
    """NaN, 1e999, a number of 5,000 digits and Arabic digits as the score -> survived: none counts"""
    texts = ['{"score": NaN}', '{"score": 1e999}', '{"score": ' + "9" * 5000 + "}", "Score: \u0667"]
    end, _ = _run(at, lambda handler, body, number: _say(handler, texts[number % 4]))
    return goes_on(end, _unscored(end) if end.status == 0 else None, steps=1)


def no_text(at):
    """answers without choices, with content null, of parts, nested 5,000 deep, not JSON -> survived: none counts"""
    forms = [{}, {"choices": []}, {"choices": [{"message": {"content": None}}]}, [1], b"<html>busy</html>", b"\xff"]
    forms += [{"choices": [{"message": {"content": [{"type": "text", "text": "Score: 9"}]}}]}, b"[" * 5000]
    end, _ = _run(at, lambda handler, body, number: _answer(handler, 200, forms[number % len(forms)]))
    return goes_on(end, _unscored(end) if end.status == 0 else None, steps=1)


def asked_again(at):
    """a score in no form first, in the right one when asked again -> survived: the second counts"""
    seen = []

    def script(handler, body, number):
        question = body["messages"][0]["content"]
        first = not any(question.startswith(other) for other in seen)
        seen.append(question)
        _say(handler, "About seven, I think." if first else '{"reason": "as before", "score": 7}')

    end, _ = _run(at, script, "--num_generations 2 --prompts_per_step 2 ")
    step = end.steps[0] if end.steps else {}
    wrong = _scored(end, 0.7) or (None if step["rewards/judge/attempts/mean"] > 1 else "attempts are not counted")
    return goes_on(end, wrong, steps=1)


# ---- how it answers --------------------------------------------------------------------------------------------------


def without_structured_output(at):
    """a server that refuses response_format with 400 -> survived: asked without, and from then on"""

    def script(handler, body, number):
        if "response_format" in body:
            return _answer(handler, 400, {"error": {"message": "response_format is not supported"}})
        _say(handler, "Score: 7")

    end, server = _run(at, script, "--num_generations 2 --prompts_per_step 4 ")
    asked = sum("response_format" in body for body in server.asked)
    wrong = _scored(end, 0.7) or (f"asked for it {asked} times" if asked > 8 else None)
    return goes_on(end, wrong, steps=1)


def busy(at):
    """429 with Retry-After, then 503, then an answer -> survived: waited for, by its name"""

    def script(handler, body, number):
        if number <= 4:
            return _answer(handler, 429, {"error": "slow down"}, Retry_After="1")
        _answer(handler, 503, b"") if number <= 8 else _say(handler, "Score: 7")

    end, server = _run(at, script)
    wrong = _scored(end, 0.7) or (
        None if says(end.text, f"{server.url} is busy .429") else "whom it waits for is not said"
    )
    return goes_on(end, wrong, steps=1)


def busy_for_ever(at):
    """503 with Retry-After of a day -> survived: unrewarded within --reward_timeout, by the server's name"""
    start = time.monotonic()
    script = lambda handler, body, number: _answer(handler, 503, b"", Retry_After="86400")  # noqa: E731
    end, server = _run(at, script, "--reward_timeout 3 ")
    wrong = _unscored(end, "unanswered") if end.status == 0 else None
    wrong = wrong or (None if says(end.text, f"{server.url} is busy .503") else "the server is not named")
    return goes_on(end, wrong or ("waited too long" if time.monotonic() - start > 30 else None), steps=1)


def mute(at):
    """a server that takes the question and says nothing -> survived: unrewarded within --reward_timeout"""
    end, _ = _run(at, lambda handler, body, number: time.sleep(40), "--reward_timeout 3 ")
    return goes_on(end, _unscored(end, "unanswered") if end.status == 0 else None, steps=1)


def letter_by_letter(at):
    """headers that come letter by letter for ever -> survived: unrewarded within --reward_timeout"""

    def script(handler, body, number):
        for _ in range(400):
            handler.connection.sendall(b"H")
            time.sleep(0.1)

    end, _ = _run(at, script, "--reward_timeout 3 ")
    return goes_on(end, _unscored(end, "unanswered") if end.status == 0 else None, steps=1)


def without_end(at):
    """a body that never ends -> survived: not read beyond its limit, unrewarded"""
    sent = [0]

    def script(handler, body, number):
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * 2**20)
            sent[0] += 2**20

    end, _ = _run(at, script, "--num_generations 2 --reward_timeout 20 ")
    wrong = _unscored(end) if end.status == 0 else None
    return goes_on(end, wrong or (f"{sent[0] >> 20} MiB were taken" if sent[0] > 2**28 else None), steps=1)


def unpacked(at):
    """a gzip body of 30 KB that would be 30 MB -> survived: not unpacked, unrewarded"""
    packed = gzip.compress(b" " * 30_000_000)
    script = lambda handler, body, number: _answer(handler, 200, packed, Content_Encoding="gzip")  # noqa: E731
    end, _ = _run(at, script)
    return goes_on(end, _unscored(end) if end.status == 0 else None, steps=1)


def breaks_off(at):
    """connections reset in the middle of the body, and 500s, then answers -> survived: asked again"""

    def script(handler, body, number):
        if number <= 4:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
            return handler.connection.shutdown(socket.SHUT_RDWR)
        _answer(handler, 500, b"oops") if number <= 6 else _say(handler, "Score: 7")

    end, _ = _run(at, script)
    return goes_on(end, _scored(end, 0.7), steps=1)


def redirects(at):
    """307 to another server -> survived: the question does not go there; the address is named"""
    elsewhere = _Server(at, lambda handler, body, number: _say(handler, "Score: 9"))
    location = f"{elsewhere.url}/v1/chat/completions"
    end, _ = _run(at, lambda handler, body, number: _answer(handler, 307, b"", Location=location))
    if elsewhere.asked:
        return Seen("leaked", "the question went to the other server")
    wrong = _unscored(end, "unanswered") if end.status == 0 else None
    return goes_on(end, wrong or (None if says(end.text, f"redirects to {elsewhere.url}") else "not said"), steps=1)


def key_in_the_address(at):
    """--judge_url with ?api_key= and a password, refused with 401 that repeats them -> survived: used, shown nowhere"""
    script = lambda handler, body, number: _answer(handler, 401, f"no: {handler.path}".encode())  # noqa: E731
    end, server = _run(at, script, url=f"URL/v1?api_key={KEY}")
    if not server.asked or server.asked[0]["path"] != f"/v1/chat/completions?api_key={KEY}":
        return Seen("ended", f"asked {server.asked[:1] and server.asked[0]['path']}")
    shown = pandas.read_parquet(next((end.run / "completions").glob("step_*.parquet"))).to_json()
    if KEY in end.text or KEY in shown:
        return Seen("leaked", "the key is in what is printed or in the completions")
    return goes_on(end, _unscored(end, "unanswered") if end.status == 0 else None, steps=1)


def no_scheme(at):
    """--judge_url without http:// -> named: before anything is sampled"""
    end = at.train("--reward_funcs judge --judge_url localhost:9/v1 --judge_model x ")
    return named(end, "judge_url", "http://")


# ---- other models that are asked -------------------------------------------------------------------------------------


def busy_user(at):
    """the model that plays the user is busy twice, then never ends an answer -> survived: waited for, and bounded"""
    sent = [0]

    def script(handler, body, number):
        if number <= 2:
            return _answer(handler, 503, b"")
        if number <= 6:
            return _say(handler, "DONE")
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * 2**20)
            sent[0] += 2**20

    server = _Server(at, script)
    rows = at.rows([{"prompt": "Hello.", "user": "someone"}] * 8)
    flags = f"{rows} --env user?url={server.url}/v1&model=m --reward_funcs length --max_turns 2 --max_failed 1 "
    end = at.scripted(["Good day."], flags + "--num_generations 8 --tool_timeout 10 ")
    failed = end.steps[0].get("rollout/failed") if end.steps else None
    wrong = None if failed == 4 else f"{failed} of 8 trajectories failed instead of 4, {len(server.asked)} asked"
    return goes_on(end, wrong or (f"{sent[0] >> 20} MiB were taken" if sent[0] > 2**28 else None), steps=1)


def reward_model_answers_otherwise(at):
    """a served reward model whose answer has no scores -> named: the server, what it said, what it should be"""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            _answer(self, 200, {"data": [{"id": "m", "root": "models/tiny"}]})

        def do_POST(self):
            _answer(self, 200, {"data": [{"label": "good"}]})

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at.stack.callback(server.shutdown)
    flags = f"--reward_funcs reward_model --reward_model http://127.0.0.1:{server.server_port} --max_steps 1 "
    end = at.train(flags)
    seen = named(end, "answered without data", "runner pooling")
    return seen if seen.verdict == "named" else Seen(seen.verdict, shorten(re.sub(r"\s+", " ", end.text[-300:])))
