"""JSON over HTTP, as judges, tools and clients ask (network/http.py), and secrets (network/secrets.py)."""

import json
import ssl
import subprocess

import pytest
from answering import FINE, answering

from config import TrainConfig, load_config, public_config
from network import http, secrets
from vllm_client import ServerError, VLLMClient

pytestmark = pytest.mark.quick


@pytest.fixture
def server():
    with answering(FINE) as made:
        yield made


@pytest.fixture(autouse=True)
def no_secrets(monkeypatch):
    monkeypatch.setattr(secrets, "_read", {})
    monkeypatch.setattr(secrets, "_learned", set())


BUSY = (503, "busy", {"Retry-After": "0"})


@pytest.mark.parametrize("first", [[None], [BUSY, BUSY]])
def test_asks_again_after_a_broken_connection_and_a_busy_server(server, first):
    server.answers = [*first, FINE]
    assert http.ask("POST", f"{server.url}/v1/x?key=a", 10, {"a": 1}, "tökén") == {"fine": 1}
    assert len(server.asked) == len(first) + 1
    path, token, body = server.asked[-1]
    assert (path, token.encode("latin-1").decode(), json.loads(body)) == ("/v1/x?key=a", "Bearer tökén", {"a": 1})


@pytest.mark.parametrize("first", [None, BUSY])
def test_what_must_not_be_done_twice_is_asked_once(server, first):
    server.answers = [first]
    with pytest.raises(http.NoAnswer, match=f"{server.url}/push"):
        http.ask("POST", f"{server.url}/push", 10, {}, using=http.session(again=False))
    assert len(server.asked) == 1
    server.answers = [first, FINE]
    assert http.ask("GET", f"{server.url}/info", 10, using=http.session(again=False)) == {"fine": 1}


@pytest.mark.parametrize(
    "answer, status, said",
    [
        ("hang", 0, "no answer within 0.3 s"),
        ((401, "", {}), 401, "token"),
        ((307, "", {"Location": "http://elsewhere:1/x"}), 307, "elsewhere:1"),
        ((200, "<html>", {}), 200, "no JSON object"),
    ],
)
def test_no_answer_names_the_server_and_what_it_did(server, answer, status, said):
    server.answers = [answer]
    with pytest.raises(http.NoAnswer, match=said) as error:
        http.ask("POST", f"{server.url}/v1/x?key=hidden", 0.3, {})
    assert error.value.status == status and len(server.asked) == 1
    assert f"{server.url}/v1/x" in str(error.value) and "key=hidden" not in str(error.value)


def test_a_server_that_is_not_there_is_an_error_with_its_address(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(http.NoAnswer, match=f"{server.url}/v1.*refused") as error:
        http.ask("GET", f"{server.url}/v1?key=hidden", 10)
    assert "hidden" not in str(error.value)
    with pytest.raises(ServerError, match=f"{server.url} was not ready within 0.1 s"):
        VLLMClient([server.url], token="x").wait_ready(0.1)


def test_certificates_are_checked_by_requests_ca_bundle(server, tmp_path, monkeypatch):
    words = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -subj /CN=a "
    words += "-addext subjectAltName=IP:127.0.0.1"
    subprocess.run(words.split(), cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = server.url.replace("http:", "https:")
    with pytest.raises(http.NoAnswer, match="CERTIFICATE_VERIFY_FAILED"):
        http.ask("GET", url, 10)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", f"{tmp_path}/cert")
    assert http.ask("GET", url, 10) == {"fine": 1}


def test_addresses():
    assert http.route("https://host/v1/?key=x", "/models") == "https://host/v1/models?key=x"
    assert http.origin("HTTP://Host/v1") == "http://host:80" == http.origin("http://host:80")
    given = load_config(TrainConfig, ["--server_urls", "http://a:1/", "https://[::1]:2"])
    assert given.server_urls == ["http://a:1", "https://[::1]:2"]
    for wrong in ("localhost:8000", "http://a:port", "http://"):
        for flag in ("--server_urls", "--teacher_urls"):
            with pytest.raises(ValueError):
                load_config(TrainConfig, [flag, wrong])


def test_a_secret_is_taken_out_of_the_environment_and_hidden(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_SERVER_TOKEN", ' s3cret"token\n')
    assert secrets.read("VLLM_SERVER_TOKEN") == 's3cret"token' == secrets.read("VLLM_SERVER_TOKEN")
    assert "VLLM_SERVER_TOKEN" not in secrets.os.environ
    (tmp_path / "judge").write_text("from-a-file\n")
    monkeypatch.setenv("JUDGE_TOKEN_FILE", str(tmp_path / "judge"))
    assert secrets.read("JUDGE_TOKEN") == "from-a-file" and secrets.read("JUDGE_TOKEN", "given") == "given"
    monkeypatch.setenv("WANDB_API_KEY", "of-wandb")
    shown = secrets.hide(['{"a": "s3cret\\"token"}', {"b": ("from-a-file", 's3cret"token of-wandb')}, 3])
    assert shown == ['{"a": "***"}', {"b": ("***", "*** ***")}, 3]
    shown = public_config(TrainConfig(run_name="of-wandb", judge_url="http://j?key=unnamed"))
    assert (shown["run_name"], shown["judge_url"]) == ("***", "http://j?key=unnamed")
    monkeypatch.setenv("OTHER_TOKEN_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="OTHER_TOKEN_FILE"):
        secrets.read("OTHER_TOKEN")
