"""What strangers and mistakes can do to a live server: connections, requests in mid-push, weights, tokens."""

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from server_fixture import ROOT
from transformers import AutoModelForCausalLM

from cli import ConfigError
from safety import credentials
from serving import gate as vllm_gate
from serving import pushing, rendezvous, transfer, wire
from vllm_client import ServerError, VLLMClient

PROMPT = list(range(100, 140))
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def client(server):
    client = VLLMClient([server.url], server.token, timeout=60, request_timeout=120)
    client.wait_ready(10)
    client.connect_weights("cpu")
    yield client
    client.close()


@pytest.fixture(scope="module")
def weights(server):
    """(name, tensor) pairs of the model on disk."""
    return list(AutoModelForCausalLM.from_pretrained(server.model_dir, dtype=torch.float32).named_parameters())


def push(client, named, version):
    client.begin_push()
    client.send_bucket(named[:5])
    client.send_bucket(named[5:])
    client.finish_push(version)


def generate(client, **options):
    return asyncio.run(client.generate(PROMPT, **({"max_tokens": 4} | options)))


def connect(server):
    return socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=30)


def resident(server):
    """MiB of the HTTP process."""
    return psutil.Process(server.process.pid).memory_info().rss / 2**20


def send_until_cut(connection, first, block, limit):
    """(bytes the server let us send, what it answered)."""
    sent = 0
    with contextlib.suppress(OSError):
        connection.sendall(first)
        while sent < limit:
            connection.sendall(block)
            sent += len(block)
    answer = b""
    with contextlib.suppress(OSError):
        answer = connection.recv(4096)
    return sent, answer


# ---- connections ----------------------------------------------------------------------------------------------------

ENDLESS = {
    "headers": (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 10000),
    "one header": (b"GET / HTTP/1.1\r\na: ", b"x" * 65536),
    "an address": (b"GET /", b"x" * 65536),
    "blank lines": (b"", b"\r\n" * 32768),
    "lines behind a body": (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 10000),
}


@pytest.fixture(scope="module", autouse=True)
def half_a_body(server):
    """(what the server answers to half a body, after how many seconds), in the background of all tests here."""
    token = f"Authorization: Bearer {server.token}\r\n".encode()
    head = b"POST /generate HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"
    connection, start = connect(server), time.monotonic()
    connection.sendall(head + token + b'\r\n{"prompt_ids"')
    connection.settimeout(vllm_gate.BODY_SECONDS + 15)
    answer = wire.in_thread(lambda: (connection.recv(4096), time.monotonic() - start))
    yield answer
    connection.close()


@pytest.mark.parametrize("what", ENDLESS)
def test_what_has_no_end_is_cut(server, what):
    """Before the token is seen. 16 MB of headers took 325 MiB, 10 million headers 1.2 GiB."""
    before = resident(server)
    with connect(server) as connection:
        sent, answer = send_until_cut(connection, *ENDLESS[what], limit=16 << 20)
        assert sent < 16 << 20, "the server took all of it"
        assert not answer or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400", b"HTTP/1.1 401")), answer
    assert resident(server) - before < 16
    assert server.request("GET", "/health").status_code == 200


def test_large_headers_get_an_answer_and_usual_ones_pass(server):
    def answer(header):
        with connect(server) as connection:
            token = f"Authorization: Bearer {server.token}\r\n".encode()
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n" + token + header + b"\r\n")
            return connection.recv(4096)

    assert b" 200 " in answer(b"X-Long: " + b"x" * 20_000 + b"\r\n")
    assert b" 200 " in answer(b"".join(b"X-%d: y\r\n" % i for i in range(80)))
    for header in (b"X-Long: " + b"x" * 40_000 + b"\r\n", b"".join(b"X-%d: y\r\n" % i for i in range(120))):
        assert answer(header).startswith(b"HTTP/1.1 431"), header[:20]


def closed(connection):
    connection.settimeout(0)
    try:
        while connection.recv(4096):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_connections_that_ask_for_nothing_are_closed(server):
    """Half a header, none at all, one byte now and then, half a body, half a second request: none stays for ever."""
    token = f"Authorization: Bearer {server.token}\r\n".encode()
    beginnings = {
        "nothing": b"",
        "half a header": b"GET /health HTTP/1.1\r\n",
        "a blank line": b"\r\n",
        "half a second request": b"GET /health HTTP/1.1\r\nHost: h\r\n" + token + b"\r\nGET /hea",
    }
    opened = {what: [connect(server) for _ in range(20)] for what in beginnings}
    for what, connections in opened.items():
        for connection in connections:
            connection.sendall(beginnings[what])
    dripping = connect(server)
    dripping.sendall(b"GET / HTTP/1.1\r\n")
    start, gone = time.monotonic(), None
    while time.monotonic() - start < vllm_gate.HEADER_SECONDS + 8:
        time.sleep(1)
        with contextlib.suppress(OSError):
            dripping.sendall(b"a")
        if gone is None and closed(dripping):
            gone = time.monotonic() - start
    assert gone is not None and gone < vllm_gate.HEADER_SECONDS + 5
    for what, connections in opened.items():
        assert all(closed(connection) for connection in connections), what
        for connection in connections:
            connection.close()
    assert server.request("GET", "/health").status_code == 200


def test_1500_half_open_connections_keep_nobody_out(server, client):
    """More than MAX_STRANGERS: the oldest make room, once they have had the time to say more."""
    opened = []
    for _ in range(1500):
        opened.append(connect(server))
        opened[-1].sendall(b"GET /health HTTP/1.1\r\nHost: h\r\n")
    time.sleep(vllm_gate.GRACE)
    start = time.monotonic()
    assert len(generate(client)) == 1 and time.monotonic() - start < 10
    assert sum(map(closed, opened)) >= 1500 - vllm_gate.MAX_STRANGERS
    for connection in opened:
        connection.close()
    assert len(generate(client)) == 1


@pytest.mark.parametrize("count", [500, 1500])
def test_many_requests_at_once(server, client, count):
    """Also more than MAX_STRANGERS: a burst of a trainer's own."""

    async def many():
        return await asyncio.gather(*(client.generate(PROMPT, max_tokens=2) for _ in range(count)))

    answers = asyncio.run(many())
    assert len(answers) == count and all(1 <= len(one[0].token_ids) <= 2 for one in answers)  # the first may end it


ODD_PATHS = [
    "/",
    "//",
    "/../../etc/passwd",
    "/%2e%2e/",
    "/generate/",
    "/generate%00",
    "/v1/" + "a" * 3000,
    "/GENERATE",
    "*",
]


def test_odd_requests_are_answered(server):
    """Paths x methods, two requests in one, smuggled ones, WebSocket and HTTP/2: an answer, and the server lives."""
    methods = ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
    token = f"Authorization: Bearer {server.token}\r\n".encode()
    for path in ODD_PATHS:
        for method in methods:
            with connect(server) as connection:
                connection.sendall(
                    f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n".encode() + token + b"\r\n"
                )
                status = int(connection.recv(4096).split()[1])
                assert status < 500, (method, path, status)
    raw = {
        "two at once": b"GET /health HTTP/1.1\r\nHost: h\r\n" + token + b"\r\nGET /health HTTP/1.1\r\nHost: h\r\n\r\n",
        "two lengths": b"POST /generate HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 9\r\n" + token + b"\r\nx",
        "smuggled": b"POST / HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n"
        + token
        + b"\r\n0\r\n\r\nG",
        "h2c": b"GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n" + token + b"\r\n",
        "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "websocket": b"GET /v1/realtime HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        "garbage": os.urandom(2000),
    }
    for what, data in raw.items():
        with connect(server) as connection:
            connection.sendall(data)
            answer = connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 "), (what, answer)
            assert what != "websocket" or answer.startswith(b"HTTP/1.1 403"), answer
    assert server.request("GET", "/health").status_code == 200


# ---- requests while a push is under way ------------------------------------------------------------------------------


def requests_that_sample(server):
    model = str(server.model_dir)
    return {
        "/v1/chat/completions": {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        "/v1/completions": {"model": model, "prompt": "hi", "max_tokens": 2},
        "/v1/responses": {"model": model, "input": "hi", "max_output_tokens": 2},
        "/generate": {"prompt_ids": PROMPT, "max_tokens": 2},
    }


def test_vllms_own_routes_in_mid_push(server, client, weights):
    """What changes the engine's state is refused at once; /resume, then a completion, used to kill the engine. What
    samples waits for the end of the push, and gets the new weights."""
    client.begin_push()
    client.send_bucket(weights[:5])
    for path in ("/resume", "/pause", "/reset_prefix_cache", "/sleep", "/wake_up", "/collective_rpc"):
        answer = server.request("POST", path, json={"method": "abort_weight_update"})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5"), path
        assert "push is under way" in answer.json()["error"]["message"]
    assert server.request("GET", "/health").status_code == 200
    assert server.request("GET", "/is_paused").json()["is_paused"]
    asked = {}

    def ask(path, body):
        asked[path] = server.request("POST", path, json=body).status_code

    threads = [threading.Thread(target=ask, args=one) for one in requests_that_sample(server).items()]
    for thread in threads:
        thread.start()
    time.sleep(2)
    assert not asked  # they wait
    client.send_bucket(weights[5:])
    client.finish_push(3)
    for thread in threads:
        thread.join(30)
    assert set(asked.values()) == {200} and len(asked) == 4, asked
    assert server.request("POST", "/resume").status_code == 200


@pytest.mark.parametrize("pushing", [False, True], ids=["", "in mid-push"])
def test_what_is_cancelled_ends_on_the_server(client, weights, pushing, caplog):
    """640 sequences of 450 tokens, of which it samples 256 at a time: what comes after them is answered at once."""

    async def cancelled():
        many = dict(n=16, max_tokens=450, min_tokens=450)
        tasks = [asyncio.create_task(client.generate(PROMPT, **many)) for _ in range(40)]
        await asyncio.sleep(2)
        if pushing:
            await asyncio.to_thread(client.begin_push)
        for task in tasks:
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True)
        )
        if pushing:
            await asyncio.sleep(1)
            await asyncio.to_thread(client.send_bucket, weights)
            await asyncio.to_thread(client.finish_push, 4)
        start = time.monotonic()
        (answer,) = await client.generate(PROMPT, max_tokens=2)
        return answer, time.monotonic() - start

    answer, seconds = asyncio.run(cancelled())
    assert len(answer.token_ids) <= 2 and seconds < 5, seconds
    gc.collect()
    assert "never retrieved" not in caplog.text  # what the server says of requests that it has ended
    assert client._load == [0]


def test_a_push_that_lasts(server, client, weights):
    """OpenAI's clients get a 503 that says when to ask again; /generate waits as long as its client does."""
    client.begin_push()
    start = time.monotonic()
    answer = server.request("POST", "/v1/completions", json=requests_that_sample(server)["/v1/completions"])
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    assert vllm_gate.PUSH_WAIT - 1 < time.monotonic() - start < vllm_gate.PUSH_WAIT + 5
    with contextlib.suppress(ServerError):
        client.abort_push("enough")
    answer = server.request("POST", "/v1/completions", json=requests_that_sample(server)["/v1/completions"])
    assert answer.status_code == 503 and "enough" in answer.text and "Retry-After" not in answer.headers
    assert server.request("POST", "/resume").status_code == 503  # it would sample from weights of no policy
    push(client, weights, 4)
    assert len(generate(client)) == 1


def poisoned(weights, name, value):
    return [(n, torch.full_like(t, value) if n == name else t) for n, t in weights]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_not_sent(server, client, weights, value):
    before = server.request("GET", "/server_info").json()["policy_version"]
    with pytest.raises(FloatingPointError, match=rf"nan or inf in {NORM}.*not pushed.*checkpoint"):
        push(client, poisoned(weights, NORM, value), 5)
    with pytest.raises(ServerError, match=f"503.*nan or inf in {NORM}"):
        generate(client)
    assert server.request("GET", "/server_info").json()["policy_version"] == before
    push(client, weights, 6)
    assert len(generate(client)) == 1


def test_the_server_refuses_weights_that_are_not_finite(server, client, weights, monkeypatch):
    """Of a trainer that does not look: before anything of the bucket is put in place."""
    monkeypatch.setattr(pushing, "not_finite", lambda tensors: [])
    with pytest.raises(ServerError, match=f"422.*nan or inf in {NORM}; the server keeps none of this bucket"):
        push(client, poisoned(weights, NORM, float("nan")), 5)
    with pytest.raises(ServerError, match=f"503.*nan or inf in {NORM}"):
        generate(client)
    monkeypatch.undo()
    push(client, weights, 6)
    logprobs = [lp for one in generate(client, n=4, max_tokens=20) for lp in one.logprobs]
    assert torch.tensor(logprobs).isfinite().all()


def test_not_finite_knows_every_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        good = torch.tensor([1.0, -448.0, 0.0]).to(dtype)
        bad = torch.tensor([1.0, float("nan")]).to(dtype)
        named = [("good", good), ("bad", bad), ("empty", good[:0]), ("count", torch.tensor([1]))]
        assert wire.not_finite(named) == ["bad"], dtype
    assert wire.not_finite([("wide", torch.tensor([1e300], dtype=torch.float64))]) == []
    assert wire.not_finite([("narrow", torch.tensor([1e6]).to(torch.float16))]) == ["narrow"]


# ---- the rendezvous of a push ----------------------------------------------------------------------------------------


def listening():
    """Addresses at which this process listens."""
    return {one.laddr for one in psutil.Process().net_connections("tcp") if one.status == psutil.CONN_LISTEN}


def test_the_transfers_store_wants_the_secret():
    """torch's TCPStore let anybody in, list its keys and change them."""
    store = rendezvous.Rendezvous("the secret", "127.0.0.1", 5)
    assert ("127.0.0.1", store.port) in listening()
    store.set("0", b"an address")
    with pytest.raises((RuntimeError, ValueError)):
        dist.TCPStore("127.0.0.1", store.port, None, False, timeout=timedelta(seconds=2)).list_keys()
    with pytest.raises(PermissionError, match="refused the secret"):
        rendezvous.Joined("another secret", "127.0.0.1", store.port, 5)
    worker = rendezvous.Joined("the secret", "127.0.0.1", store.port, 5)
    assert worker.get("0") == b"an address"
    worker.set("1", b"\x00\xff")
    assert store.get("1") == b"\x00\xff" and worker.check(["0", "1"]) and not worker.check(["2"])
    with pytest.raises(TimeoutError, match=r"waited 0.2 s.*\(2\)"):
        worker.wait(["2"], timedelta(seconds=0.2))
    store.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", store.port), timeout=2)


def test_a_false_trainer_is_known():
    """A worker does not talk to what listens in the trainer's place."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            connection, _ = listener.accept()
            connection.sendall(b"x" * 32)
            connection.recv(64)
            connection.sendall(b"y" * 32)

        pretending = wire.in_thread(pretend)
        with pytest.raises(PermissionError, match="is not the trainer"):
            rendezvous.Joined("the secret", "127.0.0.1", listener.getsockname()[1], 5)
        pretending.result(5)


def test_strangers_do_not_keep_workers_out(monkeypatch):
    monkeypatch.setattr(rendezvous, "PROOF_SECONDS", 1.0)
    store = rendezvous.Rendezvous("the secret", "127.0.0.1", 5)
    strangers = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(rendezvous.STRANGERS + 20)]
    time.sleep(2)
    store.set("0", b"x")
    assert rendezvous.Joined("the secret", "127.0.0.1", store.port, 5).get("0") == b"x"
    for stranger in strangers:
        stranger.close()
    store.close()


def test_members_of_a_group_prove_the_secret():
    """Whoever came in some other way than the store - gloo's own ports ask nobody - gets no weights."""
    store = dist.HashStore()

    def member(rank, secret):
        return wire.open_group(store, secret, rank, 2, "gloo", 10, "127.0.0.1")

    other = wire.in_thread(member, 1, "guessed")
    with pytest.raises(PermissionError, match=r"ranks \[1\] .*do not know the secret"):
        member(0, "right")
    with pytest.raises(PermissionError, match=r"ranks \[0\]"):
        other.result(10)


def test_no_port_of_the_rendezvous_stays_open(server):
    before = listening()
    client = VLLMClient([server.url], server.token, timeout=30)
    client.connect_weights("cpu")
    opened = listening() - before  # gloo's own
    assert client._links[0].store.port not in {address.port for address in opened}
    assert {address.ip for address in opened} <= {"127.0.0.1"}, opened
    client.close()


def test_nothing_is_unpickled():
    """Neither by us, nor by vLLM from what clients send: the workers run with its insecure serialization off."""
    for module in (
        "vllm_client",
        "serving/pushing",
        "serving/servers",
        "vllm_server",
        "serving/transfer",
        "serving/gate",
        "serving/rendezvous",
        "serving/wire",
        "serving/receiver",
    ):
        text = (ROOT / f"{module}.py").read_text(encoding="utf-8")
        for word in ("pickle", "torch.load", "object_list", "all_gather_object", "marshal", "eval("):
            assert word not in text.replace("unpickled", "").replace("no pickles", ""), (module, word)


def test_half_a_body_is_not_waited_for(half_a_body):
    """Its own limit, BODY_SECONDS, counts from the last byte. Only who knows the token gets that far."""
    answer, seconds = half_a_body.result(60)
    assert answer.startswith(b"HTTP/1.1 408") and seconds > vllm_gate.BODY_SECONDS - 1


# ---- secrets --------------------------------------------------------------------------------------------------------


@pytest.fixture
def forget(monkeypatch):
    monkeypatch.setattr(credentials, "_known", set())
    monkeypatch.setattr(credentials, "_read", {})
    for name in ("VLLM_SERVER_TOKEN", "VLLM_SERVER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_secrets_are_read_once_and_masked(forget, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train_grpo.py", "--server_token", "s3cret-token", "--x=s3cret-token"])
    monkeypatch.setenv("VLLM_SERVER_TOKEN", " s3cret-token\n")
    assert credentials.read("VLLM_SERVER_TOKEN") == "s3cret-token" == credentials.read("VLLM_SERVER_TOKEN")
    assert "VLLM_SERVER_TOKEN" not in os.environ
    assert sys.argv[1:] == ["--server_token", "***", "--x=***"]
    assert credentials.mask("token 's3cret-token' of {s3cret-token}") == "token '***' of {***}"
    file = tmp_path / "token"
    file.write_text("other-token\n", encoding="utf-8")
    file.chmod(0o600)
    monkeypatch.setenv("JUDGE_TOKEN_FILE", str(file))
    assert credentials.read("JUDGE_TOKEN") == "other-token"
    assert credentials.read("OTHER_TOKEN") == ""
    with pytest.raises(ConfigError, match="line break at position 4 of 7") as error:
        credentials.read("OTHER_TOKEN", "abc\ndef")
    assert "def" not in str(error.value)
    monkeypatch.setenv("THIRD_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be read"):
        credentials.read("THIRD_TOKEN")


LOOK = """
import os, subprocess, sys
sys.path.insert(0, {root!r})
from safety import credentials
credentials.read("VLLM_SERVER_TOKEN"); credentials.read("OTHER_TOKEN", sys.argv[2])
print(open("/proc/self/cmdline", "rb").read() + open("/proc/self/environ", "rb").read())
print(subprocess.run(["env"], capture_output=True).stdout)
"""


def test_ps_and_children_do_not_see_them(tmp_path):
    command = [sys.executable, "-c", LOOK.format(root=str(ROOT)), "--token", "s3cret-given"]
    env = os.environ | {"VLLM_SERVER_TOKEN": "s3cret-inherited"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=env, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout and "--token" in done.stdout and "PATH=" in done.stdout


@pytest.mark.parametrize("token", ["wrong\n", " wrong ", "falsch-ÄÖÜ-☃", "with space"])
def test_wrong_tokens_are_refused_and_not_shown(server, token):
    with pytest.raises(ServerError, match="refuses the token") as error:
        VLLMClient([server.url], token).server_info()
    assert "wrong" not in str(error.value) and "falsch" not in str(error.value)


class Pusher(pushing.Pusher):
    """Pushes to nobody. A bucket with the tensor "late" is refused, half a second late."""

    sums: list[int] = []  # of what arrived

    def connect_weights(self, device="cpu"):
        self._device, self.weight_dtype, self._buffers = torch.device(device), torch.float32, [None, None]
        store = SimpleNamespace(close=lambda: None)
        self._links.append(pushing.Link(self.urls[0], "a session", store, shares=True))

    def _call(self, url, method, path, body=None, *args):
        if path == "/update_weights" and body["update_info"]["names"] == ["late"]:
            time.sleep(0.5)
            raise ServerError("refused: of the push that was given up")
        return {"policy_version": 1, "checksum": wire.fold(self.sums), "seconds": {}}


@pytest.mark.parametrize("waits", [0.0, 1.0])
def test_a_push_that_was_given_up_does_not_disturb_the_next(waits):
    """Its last bucket is still under way then; waits: seconds in which it is refused before the next one's is sent."""
    pusher = Pusher(["http://127.0.0.1:1"], "t", 5, "auto", False, None, None)
    pusher.connect_weights()
    pusher.begin_push()
    pusher.send_bucket([("late", torch.ones(4))])
    pusher.abort_push()
    pusher.begin_push()
    time.sleep(waits)
    pusher.send_bucket([("a", torch.ones(4))])
    time.sleep(1 - waits)
    pusher.sums = pusher._checksums
    pusher.finish_push(1)


def test_why_a_push_ended_is_told_by_the_next_call():
    pusher = Pusher(["http://127.0.0.1:1"], "t", 5, "auto", False, None, None)
    pusher.connect_weights()
    pusher.begin_push()
    pusher.send_bucket([("late", torch.ones(4))])
    with pytest.raises(ServerError, match="refused"):
        pusher.send_bucket([("a", torch.ones(4))])
    pusher.begin_push()  # anew
    pusher.send_bucket([("a", torch.ones(4))])


@pytest.mark.parametrize(("theirs", "backend"), [("GPU-1", "gloo"), ("GPU-2", "nccl")])
def test_a_shared_gpu_is_known_by_its_uuid(theirs, backend, monkeypatch):
    """From another container, too: those have host names of their own."""
    gpu = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    client = VLLMClient(["http://127.0.0.1:1"], "t")
    worker = SimpleNamespace(device=torch.device("cuda", 0))
    gpu.uuid = theirs
    seen = transfer.TransferWorker.name_device(worker)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-container")
    gpu.uuid = "GPU-1"
    client._device, client._infos = torch.device("cuda", 0), [{"device": "cuda", "devices": [seen]}]
    assert client._pick_backend() == backend
