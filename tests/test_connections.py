"""How the client meets servers: addresses, TLS, answers that cannot be right, and what is asked again."""

import asyncio
import base64
import contextlib
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import requests
import uvicorn
from certificates import Authority
from safety.masking import masked
from server_fixture import ROOT, free_port, make_tiny
from stub_server import DROP, GENERATED, INFO, SAMPLE, stub

from cli import ConfigError
from config import TrainConfig
from safety import addresses, asking, credentials
from scoring import judge
from serving import servers
from serving.gate import LimitedProtocol
from vllm_client import ServerError, VLLMClient


def ask(url, n=1, max_tokens=3, **options):
    client = VLLMClient([url], "t", timeout=options.pop("timeout", 3), **options)
    client.vocab_size = 100
    return asyncio.run(client.generate([5, 6], n=n, max_tokens=max_tokens))


# ---- answers that cannot be right -----------------------------------------------------------------------------------

WRONG = {
    "nan": ({"logprobs": [-1, math.nan, -1]}, "samples.0.logprobs.1: .*finite"),
    "minus infinity": ({"logprobs": [-1, -math.inf, -1]}, "samples.0.logprobs.1: .*finite"),
    "a probability above 1": ({"logprobs": [-1, 0.5, -1]}, "samples.0.logprobs.1: .*less than or equal"),
    "log-probs as text": ({"logprobs": ["-1", "-1", "-1"]}, "samples.0.logprobs.0: .*not '-1'"),
    "a log-prob too few": ({"logprobs": [-1, -1]}, "3 token_ids and 2 logprobs"),
    "no log-probs": ({"logprobs": None}, "samples.0.logprobs: .*list"),
    "beyond the vocabulary": ({"token_ids": [7, 100, 9]}, "token id 100 is outside the vocabulary of 100"),
    "a negative id": ({"token_ids": [7, -1, 9]}, "samples.0.token_ids.1: .*not -1"),
    "ids as fractions": ({"token_ids": [7.5, 8, 9]}, "samples.0.token_ids.0: .*not 7.5"),
    "ids as truth values": ({"token_ids": [True, 8, 9]}, "samples.0.token_ids.0: .*not True"),
    "no token": ({"token_ids": [], "logprobs": []}, "samples.0.token_ids: .*at least 1"),
    "more tokens than asked for": ({"token_ids": [7] * 320, "logprobs": [-1.0] * 320}, "320 token_ids, .*max_tokens=3"),
    "another end": ({"finish_reason": "abort"}, "samples.0.finish_reason: .*not 'abort'"),
}
WRONG_AROUND = {
    "two samples for one": ({"samples": [SAMPLE] * 2}, "samples: 2 for the 1 asked for"),
    "no sample": ({"samples": []}, "samples: 0 for the 1 asked for"),
    "samples as a dict": ({"samples": {"0": SAMPLE}}, "samples: .*list"),
    "another prompt": ({"prompt_ids": [5, 7]}, "prompt_ids: 2 tokens that are not the 2 of the prompt sent"),
    "no version": ({"policy_version": None}, "policy_version: .*integer"),
    "a version as text": ({"policy_version_last": "3"}, "policy_version_last: .*not '3'"),
    "OpenAI's form": ({"samples": None, "choices": [{"text": "hi"}]}, "samples: .*list"),
}


@pytest.mark.parametrize("name", WRONG | WRONG_AROUND)
def test_answers_that_cannot_be_right_are_refused(name):
    if name in WRONG:
        given = GENERATED | {"samples": [SAMPLE | WRONG[name][0]]}
    else:
        given = GENERATED | WRONG_AROUND[name][0]
    message = (WRONG | WRONG_AROUND)[name][1]
    with stub(lambda path, _: given) as (url, asked):
        with pytest.raises(
            ServerError, match=f"{url} answered POST /generate wrongly: .*{message}.*Start the vllm_server"
        ):
            ask(url)
        assert len(asked) == 1  # and not asked again: it would be as wrong


EXPERTS = {"dtype": "uint8", "shape": [4, 48, 8], "data": base64.b64encode(bytes(4 * 48 * 8)).decode()}


@pytest.mark.parametrize("asked_first", [True, False])
def test_experts_may_make_an_answer_larger(asked_first, monkeypatch):
    """By what the server says that they take; without that it would be another program's."""
    monkeypatch.setattr(servers, "MOST_BYTES", 1000)
    info, given = INFO | {"expert_bytes": 48 * 8}, GENERATED | {"samples": [SAMPLE | {"routed_experts": EXPERTS}]}
    with stub(lambda path, _: info if path == "/server_info" else given) as (url, _):
        client = VLLMClient([url], "t", timeout=3)
        client.tells_experts = True
        if asked_first:
            client.server_info()
        with contextlib.nullcontext() if asked_first else pytest.raises(ServerError, match="another program"):
            (one,) = asyncio.run(client.generate([5, 6], n=1, max_tokens=3))
            assert one.routed_experts.shape == (4, 48, 8)


@pytest.mark.parametrize(("data", "message"), [("AA=", "padding"), ("AAAA", "3 numbers for the shape")])
def test_damaged_experts_are_named_with_their_server(data, message):
    given = GENERATED | {"samples": [SAMPLE | {"routed_experts": EXPERTS | {"data": data}}]}
    with stub(lambda path, _: given) as (url, _):
        client = VLLMClient([url], "t", timeout=3)
        client.tells_experts = True
        with pytest.raises(ServerError, match=f"{url} answered the experts of POST /generate wrongly: .*{message}"):
            asyncio.run(client.generate([5, 6], n=1, max_tokens=3))


@pytest.mark.parametrize("field", GENERATED)
def test_a_field_that_is_missing_is_named(field):
    given = {name: value for name, value in GENERATED.items() if name != field}
    with stub(lambda path, _: given) as (url, _), pytest.raises(ServerError, match=f"wrongly: {field}: field required"):
        ask(url)


@pytest.mark.parametrize("field", INFO)
def test_a_description_that_lacks_a_field_is_refused(field):
    given = {name: value for name, value in INFO.items() if name != field}
    answer = lambda path, _: given if path == "/server_info" else None  # noqa: E731
    with stub(answer) as (url, _), pytest.raises(ServerError, match=f"/server_info wrongly: {field}: field required"):
        VLLMClient([url], "t", timeout=3).wait_ready(3)


def test_a_sound_answer_is_taken_as_it_is():
    with stub() as (url, _):
        client = VLLMClient([url], "t", timeout=3)
        client.wait_ready(3)
        assert client.vocab_size == 100
        (one,) = asyncio.run(client.generate([5, 6], n=1, max_tokens=3))
    assert (one.token_ids, one.logprobs, one.finish_reason) == tuple(SAMPLE.values()) and one.prompt_ids == [5, 6]


# ---- asked again ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [DROP, (503, {}, b"<html>starting</html>"), (429, {"Retry-After": "1"}, {"error": "slowly"}), (502, {}, b"")],
)
def test_what_passes_is_waited_for(trouble, caplog):
    """Three times in a row, for a GET and for /generate, which gets another name each time."""
    answer = lambda path, earlier: trouble if earlier < 3 else None  # noqa: E731
    start = time.monotonic()
    with stub(answer) as (url, asked):
        assert len(ask(url, timeout=20)) == 1
        names = [body["request_id"] for path, body in asked]
        assert len(names) == 4 == len(set(names))
        VLLMClient([url], "t", timeout=20).server_info()
    seconds = time.monotonic() - start
    assert seconds < 20 and (seconds > 6 or not isinstance(trouble, tuple) or "Retry-After" not in trouble[1])


@pytest.mark.parametrize(
    "trouble, message, most",
    [
        ((503, {}, {"error": "full"}), "503: full.*It was asked again for [12] s", 6),
        ((429, {"Retry-After": "100"}, {"error": "later"}), "429: later.*asks for 100 s .*--server_timeout is 2 s", 2),
        ((429, {"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}, {}), "429.*--server_timeout is 2 s", 2),
        ((503, {"x-should-retry": "false"}, {"error": "no weights"}), "503: no weights", 2),
        ((500, {}, {"error": "broken"}), "500: broken", 2),
        ((404, {}, {"error": "unknown"}), "404: unknown", 2),
        (DROP, "cut the connection during POST /generate.*It was asked again for [12] s", 9),
    ],
)
def test_waiting_has_an_end_that_names_the_server(trouble, message, most):
    start = time.monotonic()
    with stub(lambda *_: trouble) as (url, asked):
        with pytest.raises(ServerError, match=f"(?s){url}.*{message}"):
            ask(url, timeout=2)
        assert len(asked) > 1 if "again" in message else len(asked) == 1
    assert time.monotonic() - start < most


def test_a_connection_that_is_not_made_is_tried_again_and_told_with_the_time_that_it_took(monkeypatch):
    """As where a machine is off, or a firewall drops what comes: here a queue of connections that is full."""
    monkeypatch.setattr(servers, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(servers, "BROKEN_SECONDS", 1.0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        with pytest.raises(ServerError, match="no connection within 0.3 s.*It was asked again for [01] s") as error:
            ask(f"http://127.0.0.1:{address[1]}", timeout=60)
    assert "hangs" not in str(error.value)


@pytest.mark.parametrize("then", ["stays so", "is over"])
def test_no_more_open_files_are_no_fault_of_the_server(then, monkeypatch):
    monkeypatch.setattr(servers, "BROKEN_SECONDS", 0.01)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    diagnose = VLLMClient._diagnose

    def later(*given):
        if then == "is over":
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return diagnose(*given)

    monkeypatch.setattr(VLLMClient, "_diagnose", later)
    with stub(lambda *_: None) as (url, _):
        client = VLLMClient([url], "t", timeout=3)
        client._call(url, "GET", "/server_info")  # opens what is opened once
        os.close(first_free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (first_free, limits[1]))
        try:
            with pytest.raises(ServerError) as caught:
                client._call(url, "GET", "/server_info")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "no more files" in str(caught.value) and "ulimit -n" in str(caught.value), caught.value
    assert not re.search("gone|terminal", str(caught.value))


def test_no_step_of_a_push_is_repeated():
    paths = ["/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"]
    for trouble in (DROP, (503, {"Retry-After": "0"}, {})):
        with stub(lambda *_: trouble) as (url, asked):  # noqa: B023
            client = VLLMClient([url], "t", timeout=5)
            for path in paths:
                with pytest.raises(ServerError):
                    client._call(url, "POST", path, {})
            assert [path for path, _ in asked] == paths


def test_what_is_cancelled_is_not_asked_again():
    async def cancelled(client):
        task = asyncio.create_task(client.generate([5, 6], max_tokens=3))
        await asyncio.sleep(1)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with stub(lambda path, _: (503, {}, {}) if path == "/generate" else None) as (url, asked):
        asyncio.run(cancelled(VLLMClient([url], "t", timeout=30)))
        time.sleep(0.5)
        before = len(asked)
        time.sleep(2)
        assert len(asked) == before


def test_what_is_cancelled_while_it_waits_to_ask_again_is_not_sent():
    async def cancelled(client, asked):
        task = asyncio.create_task(client.generate([5, 6], max_tokens=3))
        while not any(path == "/generate" for path, _ in asked):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # the server asked for a pause of 3 s
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    busy = (503, {"Retry-After": "3"}, {})
    with stub(lambda path, _: busy if path == "/generate" else None) as (url, asked):
        asyncio.run(cancelled(VLLMClient([url], "t", timeout=30), asked))
        time.sleep(1)
        assert [path for path, _ in asked].count("/generate") == 1


def test_redirects_are_not_followed():
    """Prompt and token would go with it."""
    with stub() as (other, theirs), stub(lambda *_: (307, {"Location": f"{other}/x?api_key=s3cret"}, b"")) as (url, _):
        with pytest.raises(ServerError, match="307, a redirect to .*not followed.*--server_urls") as error:
            ask(url)
        with pytest.raises(ServerError, match="not followed"):  # at once: it will not get better
            VLLMClient([url], "t").wait_ready(60)
        assert theirs == [] and "s3cret" not in str(error.value)


# ---- addresses and their secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "urls, message",
    [
        (["127.0.0.1:8000"], "127.0.0.1:8000: an address begins with http:// or https://. Give http://127.0.0.1:8000"),
        (["node-a"], "Give http://node-a"),
        (["ftp://node-a:8000"], "Give http://node-a:8000"),
        ([""], "an address begins with http"),
        (["http://"], "an address begins with http"),
        (["http://h:80000"], "out of range"),
        (["http://h:x"], "Port could not"),
        (["http://h:8000", "http://H:8000/"], "names one server twice, http://h:8000 and http://H:8000/"),
        (["http://h", "http://h:80"], "twice"),
        (["http://user:pa55w0rd@h:8000"], r"http://\*\*\*@h:8000: give the address alone"),
        (["user:pa55w0rd@h:8000"], r"\*\*\*@h:8000: an address begins"),
        (["http://h:8000?api_key=pa55w0rd"], r"\?api_key=\*\*\*: give the address alone"),
    ],
)
def test_addresses_that_are_none_are_refused_before_anything_starts(urls, message):
    for check in (addresses.checked, VLLMClient):
        with pytest.raises(ConfigError, match=message) as error:
            check(urls)
        assert "pa55w0rd" not in str(error.value)


def test_the_scripts_refuse_them_with_one_line_that_shows_no_secret():
    command = [sys.executable, "train_grpo.py", "--server_urls", "http://user:pa55w0rd@h:8000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, encoding="utf-8")
    assert done.returncode == 2 and "give the address alone" in done.stderr and "pa55w0rd" not in done.stderr


def test_one_server_under_two_names_is_said():
    with stub() as (url, _):
        client = VLLMClient([url, url.replace("127.0.0.1", "localhost")], "t", timeout=3)
        with pytest.raises(ServerError, match=f"{url} and .*localhost.* are one and the same server"):
            client.connect_weights()


@pytest.mark.parametrize(
    "text, shown",
    [
        ("http://user:pw@h:1/x", "http://***@h:1/x"),
        ("at http://tok@h, then", "at http://***@h, then"),
        ("https://h/v1?api_key=abc&model=m", "https://h/v1?api_key=***&model=m"),
        ("https://h/?key=1&monkey=2&X-Amz-Signature=zz#f", "https://h/?key=***&monkey=2&X-Amz-Signature=***#f"),
        ('{"url": "http://h?access_token=k"}', '{"url": "http://h?access_token=***"}'),
        ("mail a@b.c about http://h/@home", "mail a@b.c about http://h/@home"),
        ("x?token=1", "x?token=1"),
        ("http://h/v1?max_tokens=512&token=abcdef, then", "http://h/v1?max_tokens=512&token=***, then"),
    ],
)
def test_secrets_in_urls_are_masked(text, shown):
    assert credentials.mask(text) == shown == masked(text, []) == masked({"a": [text]}, [])["a"][0]


def test_masking_takes_no_time_that_grows_with_the_square():
    start = time.monotonic()
    for piece in ("token", "?token", "://a@", "?a", "://", "&key=", "_key"):
        credentials.mask("://?" + piece * 200_000)
    assert time.monotonic() - start < 10  # under 2 on an idle machine


# ---- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


def test_judges_are_asked_over_tls_too(authority, monkeypatch):
    with stub(certificate=authority.sign("good")) as (url, _):
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(asking.NoAnswer, match="(?i)certificate"):
            asking.ask("GET", f"{url}/health", 5)
        assert isinstance(asking.ask("GET", f"{url}/health", 5, None, None, str(authority.file)), dict)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert isinstance(asking.ask("GET", f"{url}/health", math.inf), dict)  # as with --reward_timeout inf
        with pytest.raises(asking.NoAnswer, match="cannot be asked"):
            asking.ask("GET", f"{url}/health", 5, None, None, "none.pem")


def test_the_policys_own_certificates_are_for_its_own_server_only(monkeypatch):
    seen, found = [], {"choices": [{"message": {"content": "Score: 1"}}]}
    monkeypatch.setattr(judge.asking, "ask", lambda *given, **_: seen.append(given[-2:]) or found)
    options = dict(server_urls=["https://h:8000"], server_ca="ca.pem", client_cert="me.pem", judge_model="j")
    for address in ("https://h:8000/v1", "https://other:8000/v1"):
        judge.answer_of("?", TrainConfig(**options, judge_url=address), time.monotonic() + 5)
    assert seen == [("ca.pem", "me.pem"), (None, None)]


def test_a_right_certificate_is_taken_and_a_wrong_one_named(authority, monkeypatch):
    good, other = authority.sign("good"), Authority(authority.folder, "stranger")
    with stub(certificate=good) as (url, _):
        assert len(ask(url, ca=str(authority.file))) == 1
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        assert len(ask(url)) == 1
        monkeypatch.delenv("SSL_CERT_FILE")
        for ca in (None, str(other.file)):
            start = time.monotonic()
            with pytest.raises(
                ServerError, match=f"{url}: no secure connection .*certificate.*--server_ca FILE, or SSL"
            ):
                VLLMClient([url], "t", ca=ca).wait_ready(60)
            assert time.monotonic() - start < 10
        with pytest.raises(ServerError, match=f"speaks TLS: give {url}"):
            VLLMClient([url.replace("https", "http")], "t").wait_ready(60)
    for path, words in (
        (authority.sign("expired", days=-3), "expired.*clocks"),
        (authority.sign("elsewhere", hosts=("node-a",)), "not valid for.*by a name that is in its certificate"),
    ):
        with stub(certificate=path) as (url, _), pytest.raises(ServerError, match=f"no secure connection .*{words}"):
            ask(url, ca=str(authority.file))
    with stub() as (url, _), pytest.raises(ServerError, match="does not speak TLS.*give http://127.0.0.1"):
        ask(url.replace("http", "https"), ca=str(authority.file))


@pytest.mark.parametrize("name", ["ca", "client_cert"])
def test_files_that_are_no_certificates_are_refused_at_once(name, tmp_path):
    (tmp_path / "text").write_text("no certificate", encoding="utf-8")
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path / "text", "")):
        with pytest.raises(ConfigError, match=f"{path}: no usable PEM file .*{words}.*; give one with"):
            VLLMClient(["https://127.0.0.1:1"], "t", **{name: str(path)})


@contextlib.contextmanager
def limited(authority, **options):
    """(url, host, port) of the server's own HTTP end, without vLLM behind it."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    config = uvicorn.Config(
        app, port=free_port(), http=LimitedProtocol, lifespan="off", log_level="critical", loop="uvloop",
        ssl_certfile=str(authority.sign("limited")), **options,
    )  # fmt: skip
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # it runs in a thread
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"https://127.0.0.1:{config.port}"
    finally:
        server.should_exit = True
        thread.join(10)


def test_the_limits_on_strangers_hold_behind_tls(authority):
    with limited(authority) as url:
        get = lambda **more: requests.get(url, verify=str(authority.file), timeout=10, **more).status_code  # noqa: E731
        assert get() == 200
        assert get(headers={"x": "a" * 40_000}) == 431
        assert get(headers={f"x-{n}": "a" for n in range(150)}) == 431


def test_a_server_may_ask_for_a_certificate(authority):
    with limited(authority, ssl_ca_certs=str(authority.file), ssl_cert_reqs=2) as url:
        options = dict(ca=str(authority.file), timeout=2)
        VLLMClient([url], "t", client_cert=str(authority.sign("client")), **options)._call(url, "GET", "/health")
        with pytest.raises(ServerError, match="--client_cert"):
            VLLMClient([url], "t", **options)._call(url, "GET", "/health")
        stranger = Authority(authority.folder, "stranger").sign("mallory")
        with pytest.raises(ServerError, match=url):
            VLLMClient([url], "t", client_cert=str(stranger), **options)._call(url, "GET", "/health")


def test_the_page_speaks_tls(authority, tmp_path):
    good = str(authority.sign("page"))
    command = [sys.executable, "look.py", str(tmp_path), "--ssl-certfile", good, "--ssl-keyfile", good]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8") as page:
        try:
            address = re.search(r"https://\S+", page.stdout.readline())[0]
            assert requests.get(address, verify=str(authority.file), timeout=10).status_code == 200
            with pytest.raises(requests.ConnectionError):
                requests.get(address.replace("https", "http"), timeout=10)
        finally:
            page.terminate()
    for flags, words in ((["--ssl-keyfile", good], "plain HTTP"), (["--ssl-certfile", str(authority.file)], "its key")):
        done = subprocess.run(
            [*command[:3], *flags], cwd=ROOT, capture_output=True, text=True, timeout=60, encoding="utf-8"
        )
        assert done.returncode == 1 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


TRIES = """
import contextlib, io, json, sys
import vllm_server
for words in json.loads(sys.argv[1]):
    args, rest = vllm_server.parse_command_line(["--model", "models/tiny", *words])
    try:
        _, tls = vllm_server.engine_arguments(args, rest)
        print(json.dumps(tls))
    except SystemExit as error:
        print(json.dumps(str(error)))
"""


@pytest.mark.in_turn
def test_arguments_for_tls_reach_the_server_or_are_refused(authority, tmp_path):
    """Nothing that vLLM's parser takes is dropped: every --ssl-* is passed on, or named before the model is loaded."""
    good, ca = str(authority.sign("good")), str(authority.file)
    (tmp_path / "asc.yaml").write_text("api-server-count: 2\n", encoding="utf-8")
    every = ["--ssl-certfile", good, "--ssl-keyfile", good, "--ssl-ca-certs", ca, "--ssl-cert-reqs", "2"]
    cases = {
        (): {},
        (*every, "--ssl-ciphers", "ECDHE+AESGCM", "--enable-ssl-refresh"): {
            "ssl_keyfile": good, "ssl_certfile": good, "ssl_cert_reqs": 2, "ssl_ca_certs": ca,
            "ssl_ciphers": "ECDHE+AESGCM", "enable_ssl_refresh": True,
        },
        ("--ssl-keyfile", good): "--ssl-keyfile: without --ssl-certfile FILE this would serve plain HTTP",
        ("--enable-ssl-refresh",): "--enable-ssl-refresh: without --ssl-certfile",
        ("--ssl-certfile", ca): "--ssl-certfile: TLS cannot use them",
        ("--ssl-certfile", "none.pem"): "there is no file none.pem",
        ("--ssl-certfile", good, "--ssl-cert-reqs", "2"): "would refuse every client; give --ssl-ca-certs",
        ("--ssl-certfile", good, "--ssl-ciphers", "ROT13"): "TLS cannot use them",
        ("-asc", "2"): "--api-server-count cannot be used here",
        ("--config", str(tmp_path / "asc.yaml")): "--api-server-count cannot be used here",
        ("models/other",): "--model-tag cannot be used here: name the model once",
    }  # fmt: skip
    command = [sys.executable, "-c", TRIES, json.dumps([list(words) for words in cases])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, encoding="utf-8")
    found = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in '{"']
    assert len(found) == len(cases), done.stderr[-3000:]
    for (words, wanted), seen in zip(cases.items(), found, strict=True):
        assert wanted in seen if isinstance(wanted, str) else seen == wanted, (words, seen)


DTYPES = """
import vllm_server
from inputs import precision
for slow in (True, False):
    precision.slow_in_bfloat16 = lambda device: slow
    for more in ([], ["--dtype", "bfloat16"]):
        args, rest = vllm_server.parse_command_line(["--model", "models/tiny", *more])
        print("FOUND", vllm_server.engine_arguments(args, rest)[0].dtype)
"""


@pytest.mark.in_turn
def test_a_server_on_a_cpu_without_bfloat16_is_in_float32_unless_told_otherwise():
    command = [sys.executable, "-c", DTYPES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, encoding="utf-8")
    found = [line for line in done.stdout.splitlines() if "FOUND" in line or "in float32" in line]
    told = "vllm_server: in float32, as this CPU has no instructions for bfloat16 (--dtype)"
    assert found == [told, "FOUND float32", "FOUND bfloat16", "FOUND auto", "FOUND bfloat16"], done.stderr[-3000:]


# ---- what a script starts ends with it ------------------------------------------------------------------------------

STARTS = {
    "tests/server_fixture.py": "from server_fixture import start_server; start_server('models/tiny'); time.sleep(600)",
    "tests/live.py": "from live import Process; Process(['sleep', '600'], Path('LOG')); time.sleep(600)",
    "benchmarks/vs_trl.py": "import vs_trl; vs_trl.vllm_server('models/tiny', Path('LOG')).__enter__()",
    "benchmarks/overlap.py": "import overlap; overlap.pinned(0, ['vllm_server.py', '--model', 'models/tiny', '--port', "
    "'PORT', '--exit-with-parent'], Path('LOG')); time.sleep(600)",
}


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("file", STARTS)
def test_what_a_script_starts_ends_with_it(file, ending, tmp_path):
    """Whichever way it ends, and from the first moment on: the server has not even begun to load."""
    make_tiny()
    code = "import sys, time; from pathlib import Path; sys.path[:0] = ['.', 'tests', 'benchmarks']; "
    code += STARTS[file].replace("LOG", str(tmp_path / "log")).replace("PORT", str(free_port()))
    script = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"VLLM_SERVER_TOKEN": "secret"})
    try:
        deadline, started = time.monotonic() + 60, []
        while not started and time.monotonic() < deadline:
            started = [child for child in psutil.Process(script.pid).children() if len(child.cmdline()) > 1]
            time.sleep(0.05)
        assert started, "nothing was started"
        time.sleep(0.5)
        script.send_signal(ending)
        script.wait(20)
        _, alive = psutil.wait_procs(started, timeout=30)  # under a second on an idle machine
        assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
    finally:
        script.kill()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
