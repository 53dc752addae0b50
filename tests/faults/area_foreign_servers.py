"""Servers that are not what they seem: answers that cannot be right, busy and flapping ones, TLS, addresses.

What has to be a vLLM server is the shared one behind a relay, which changes single answers on their way.
"""

import contextlib
import http.server
import json
import math
import ssl
import sys
import threading
from pathlib import Path

import requests
from case import Seen, goes_on, lives, named
from certificates import Authority
from server_fixture import TINY, free_port
from stub_server import INFO, stub

QUICK = "--server_timeout 5 --request_timeout 30 "
DROP = object()


@contextlib.contextmanager
def _relay(at, change=None, certificate=None):
    """(url, paths asked) of a relay to the shared server. change(path, earlier, answer): what to answer instead, as
    (status, headers, content), or DROP; None: nothing else. `earlier`: requests of this path before; `answer`: of the
    server, or None before it is asked - what is changed then, the server does not see."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path, earlier = self.path, asked.count(self.path)
            asked.append(path)
            given = change(path, earlier, None) if change else None
            if given is None:
                headers = {
                    name: self.headers[name] for name in ("Authorization", "Content-Type") if name in self.headers
                }
                answer = requests.request(self.command, at.server.url + path, data=data, headers=headers, timeout=60)
                given = change(path, earlier, answer) if change and answer.ok else None
                given = given or (answer.status_code, {}, answer.content)
            if given is DROP:
                return
            status, headers, content = given
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            with contextlib.suppress(OSError):
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(text))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    relay = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    relay.daemon_threads, scheme = True, "http"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        relay.socket, scheme = context.wrap_socket(relay.socket, server_side=True), "https"
    threading.Thread(target=relay.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"{scheme}://127.0.0.1:{relay.server_port}", asked
    finally:
        relay.shutdown()
        relay.server_close()


def _train(at, url: str, flags: str = ""):
    return at.train(f"--generator vllm --server_urls {url} {QUICK}{flags}")


# ---- answers that cannot be right ------------------------------------------------------------------------------------


def _sample(at, cause: str, **fields) -> Seen:
    """A run whose server changes every sample: each field of it by a function of what it was, or to a value."""

    def change(path, earlier, answer):
        if path != "/generate" or answer is None:
            return None
        content = answer.json()
        for sample in content["samples"]:
            for name, new in fields.items():
                sample[name] = new(sample[name]) if callable(new) else new
        return 200, {}, content

    with _relay(at, change) as (url, asked):
        return named(
            _train(at, url), f"{url} answered POST /generate wrongly: .*{cause}", "vllm_server.py of this version"
        )


def _around(at, cause: str, **fields) -> Seen:
    """The same for fields beside the samples; None: left out."""

    def change(path, earlier, answer):
        if path != "/generate" or answer is None:
            return None
        kept = {name: value for name, value in (answer.json() | fields).items() if value is not None}
        return 200, {}, kept

    with _relay(at, change) as (url, asked):
        return named(
            _train(at, url), f"{url} answered POST /generate wrongly: .*{cause}", "vllm_server.py of this version"
        )


def nan_logprobs(at, server):
    """the server's log-probs are nan, which no comparison finds too large -> named"""
    return _sample(at, "logprobs.*finite", logprobs=lambda old: [math.nan] * len(old))


def positive_logprobs(at, server):
    """the server's log-probs are of probabilities above 1 -> named"""
    return _sample(at, "logprobs.*less than", logprobs=lambda old: [0.5] * len(old))


def text_logprobs(at, server):
    """the server's log-probs are numbers in quotes -> named"""
    return _sample(at, "logprobs.*not '-", logprobs=lambda old: [str(one) for one in old])


def more_tokens_than_asked(at, server):
    """the server answers 320 tokens where 8 were asked for -> named"""
    return _sample(at, "320 token_ids", token_ids=[7] * 320, logprobs=[-1.0] * 320)


def fewer_logprobs(at, server):
    """the server leaves out the last log-prob -> named"""
    return _sample(at, "token_ids and", logprobs=lambda old: old[:-1])


def ids_beyond_the_vocabulary(at, server):
    """the server's token ids lie beyond the model's vocabulary -> named"""
    return _sample(at, "outside the vocabulary", token_ids=lambda old: [10**6] * len(old))


def negative_ids(at, server):
    """the server's token ids are negative, which torch counts from the end -> named"""
    return _sample(at, "token_ids.*not -1", token_ids=lambda old: [-1] * len(old))


def fractions_for_ids(at, server):
    """the server's token ids are 7.5 -> named"""
    return _sample(at, "token_ids.*not 7.5", token_ids=lambda old: [7.5] * len(old))


def empty_samples(at, server):
    """the server's samples have no tokens -> named"""
    return _sample(at, "at least 1", token_ids=[], logprobs=[])


def unknown_end(at, server):
    """the server says that a sample ended by "abort" -> named"""
    return _sample(at, "finish_reason.*not 'abort'", finish_reason="abort")


def fewer_samples(at, server):
    """the server answers no sample -> named"""
    return _around(at, "samples: 0 for the", samples=[])


def another_prompt(at, server):
    """the server answers for another prompt -> named"""
    return _around(at, "prompt_ids: .* that are not", prompt_ids=[1, 2, 3])


def no_version(at, server):
    """the server does not say which weights sampled -> named"""
    return _around(at, "policy_version: field required", policy_version=None)


def an_older_servers_description(at):
    """the server describes itself without half of what a trainer needs -> named"""
    half = {name: INFO[name] for name in ("model", "vocab_size")}
    with stub(lambda path, earlier: half if path == "/server_info" else None) as (url, _):
        return named(_train(at, url), "/server_info wrongly: server: field required", "vllm_server.py of this version")


# ---- busy, flapping and pointing elsewhere ---------------------------------------------------------------------------


def _sometimes(at, trouble, every: int = 2) -> Seen:
    """A run whose server gives `trouble` for every so-manyth request that may be repeated."""

    def change(path, earlier, answer):
        repeatable = path in ("/generate", "/server_info", "/health")
        return trouble if answer is None and repeatable and earlier % every == 0 else None

    with _relay(at, change) as (url, asked):
        end = _train(at, url, "--server_timeout 20 ")
        return goes_on(end, None if "Asking again" in end.text else "nothing was said of it", steps=2)


def busy_sometimes(at, server):
    """every second request is answered with 503 and a page -> survived: asked again"""
    return _sometimes(at, (503, {}, b"<html>starting</html>"))


def too_many_requests(at, server):
    """every second request is answered with 429 and Retry-After: 1 -> survived: asked again then"""
    return _sometimes(at, (429, {"Retry-After": "1"}, {"error": "slowly"}))


def gateway_fails_sometimes(at, server):
    """a proxy answers every second request with 502 -> survived: asked again"""
    return _sometimes(at, (502, {}, b"Bad Gateway"))


def cut_sometimes(at, server):
    """every second connection is cut without an answer -> survived: asked again"""
    return _sometimes(at, DROP)


def busy_for_good(at, server):
    """the server samples nothing and answers 503 for ever -> named: within --server_timeout"""
    change = lambda path, earlier, answer: (503, {}, {"error": "full"}) if path == "/generate" else None  # noqa: E731
    with _relay(at, change) as (url, asked):
        return named(_train(at, url), f"{url} answered POST /generate with 503: full", "asked again for")


def an_hour_of_patience(at, server):
    """the server answers 429 and asks for an hour -> named: at once"""
    busy = (429, {"Retry-After": "3600"}, {"error": "later"})
    with _relay(at, lambda path, earlier, answer: busy if path == "/generate" else None) as (url, asked):
        return named(_train(at, url), "asks for 3600 s", "--server_timeout")


def redirected(at, server):
    """the server redirects /generate to another one -> named: prompts and token do not go there"""
    with stub() as (other, theirs):
        away = (307, {"Location": other + "/generate"}, b"")
        with _relay(at, lambda path, earlier, answer: away if path == "/generate" else None) as (url, _):
            seen = named(_train(at, url), "307, a redirect to", "--server_urls")
        return Seen("leaked", f"{len(theirs)} requests went there") if theirs else seen


def _recovered(at, seen: Seen) -> Seen:
    """`seen`, if the next run on the same server goes well."""
    end = at.train(f"--generator vllm --server_urls {at.server.url} {QUICK}", run="again")
    return seen if end.status == 0 else goes_on(end)


def a_push_that_is_refused_once(at, server):
    """a step of a push is answered with 503 once -> named: it is not sent again"""
    busy = (503, {"Retry-After": "1"}, {"error": "busy"})
    refuse = lambda path, earlier, answer: busy if path == "/update_weights" and answer is None else None  # noqa: E731
    with _relay(at, refuse) as (url, asked):
        seen = named(_train(at, url), "/update_weights with 503", "terminal")
    return Seen("silent", "it was sent again") if asked.count("/update_weights") > 1 else _recovered(at, seen)


def a_push_whose_answer_is_lost(at, server):
    """the answer to the end of a push is lost on the way -> named: nobody can know whether it was taken"""
    lose = lambda path, earlier, answer: DROP if path == "/finish_weight_update" and answer is not None else None  # noqa: E731
    with _relay(at, lose) as (url, asked):
        seen = named(_train(at, url), "cut the connection during .*finish_weight_update", "terminal")
    return Seen("silent", "it was sent again") if asked.count("/finish_weight_update") > 1 else _recovered(at, seen)


def paused(at, server):
    """somebody pauses the server in mid-run -> named: paused, and how it goes on"""

    def pause(path, earlier, answer):
        if path == "/generate" and not earlier and answer is None:
            at.request("POST", "/pause")

    try:
        with _relay(at, pause) as (url, _):
            seen = named(_train(at, url), f"{url} .*is paused", "/resume")
    finally:
        at.request("POST", "/resume")
    sound = lives(at)
    return seen if sound.verdict == "survived" else sound


# ---- addresses -------------------------------------------------------------------------------------------------------


def one_server_twice(at):
    """the same server is given twice -> named: before anything is loaded"""
    return named(_train(at, "http://127.0.0.1:8000 http://127.0.0.1:8000/"), "one server twice", "give it once")


def one_server_under_two_names(at, server):
    """one server is given by two names -> named: not "another trainer" """
    url = at.server.url
    return named(
        _train(at, f"{url} {url.replace('127.0.0.1', 'localhost')}"), "one and the same server", "give it once"
    )


def no_scheme(at):
    """an address without http:// -> named: with the address that was meant"""
    return named(_train(at, "127.0.0.1:8000"), "begins with http://", "Give http://127.0.0.1:8000")


def _secret_in_address(at, url: str) -> Seen:
    end = _train(at, url)
    if "s3cret-in-url" in end.text:
        return Seen("leaked", "the secret is printed")
    return named(end, r"\*\*\*", "VLLM_SERVER_TOKEN")


def password_in_an_address(at):
    """http://user:password@host -> named: masked, and where the token belongs"""
    return _secret_in_address(at, "http://user:s3cret-in-url@127.0.0.1:8000")


def key_in_an_address(at):
    """http://host?api_key=... -> named: masked, and where the token belongs"""
    return _secret_in_address(at, "http://127.0.0.1:8000?api_key=s3cret-in-url")


# ---- TLS -------------------------------------------------------------------------------------------------------------


def tls(at, server):
    """a run through TLS, its certificate signed by an authority of one's own -> survived"""
    authority = Authority(at.given)
    with _relay(at, certificate=authority.sign("server")) as (url, asked):
        return goes_on(_train(at, url, f"--server_ca {authority.file} "), steps=2)


def _certificate(at, cause: str, remedy: str, flags: str = "", **how) -> Seen:
    authority = Authority(at.given)
    with stub(certificate=authority.sign("server", **how)) as (url, _):
        return named(_train(at, url, flags or f"--server_ca {authority.file} "), f"{url}.*{cause}", remedy)


def unknown_authority(at):
    """the server's certificate is signed by nobody known -> named"""
    return _certificate(at, "no secure connection", "--server_ca FILE", flags="--server_timeout 9 ")


def another_authority(at):
    """--server_ca is of another authority -> named"""
    other = Authority(at.given, "other")
    return _certificate(at, "no secure connection", "--server_ca FILE", flags=f"--server_ca {other.file} ")


def expired_certificate(at):
    """the server's certificate has expired -> named"""
    return _certificate(at, "expired", "clocks", days=-2)


def certificate_of_another_host(at):
    """the server's certificate is for another name -> named"""
    return _certificate(at, "not valid for", "name", hosts=("node-a",))


def http_to_a_tls_server(at):
    """http:// for a server that speaks TLS -> named"""
    with stub(certificate=Authority(at.given).sign("server")) as (url, _):
        return named(_train(at, url.replace("https", "http")), "speaks TLS", f"give {url}")


def https_to_a_plain_server(at):
    """https:// for a server that does not speak TLS -> named"""
    with stub() as (url, _):
        return named(_train(at, url.replace("http", "https")), "does not speak TLS", f"give {url}")


def no_such_authority(at):
    """--server_ca names a file that is not there -> named: before anything is loaded"""
    return named(_train(at, "https://127.0.0.1:8000", "--server_ca none.pem "), "none.pem", "give a PEM file")


def _refused(at, *arguments: str) -> object:
    command = ["vllm_server.py", "--model", TINY, "--port", str(free_port()), *arguments]
    return at.ended(at.command(sys.executable, *command))


def key_without_certificate(at, limit=150):
    """a server is started with --ssl-keyfile alone -> named: it does not serve plain HTTP instead"""
    key = Authority(at.given).sign("server")
    return named(_refused(at, "--ssl-keyfile", str(key)), "plain HTTP", "--ssl-certfile")


def certificate_without_its_key(at, limit=150):
    """a server is started with a certificate and another one's key -> named"""
    authority = Authority(at.given)
    files = ("--ssl-certfile", str(authority.file), "--ssl-keyfile", str(authority.sign("other")))
    return named(_refused(at, *files), "TLS cannot use them", "its own key")


def the_page_with_a_key_alone(at):
    """look.py with --ssl-keyfile alone -> named"""
    key = Authority(at.given).sign("page")
    run = at.command(sys.executable, "look.py", str(Path(at.runs)), "--ssl-keyfile", str(key))
    return named(at.ended(run), "plain HTTP", "certificate")
