"""HTTP to one or several vLLM servers: what is asked again and how long, TLS, and errors that name the server.

`Pusher` (pushing.py) adds the pushing of weights, and VLLMClient (vllm_client.py) sampling. Every wait has a
limit, and its error says which server was waited for. What changes nothing on a server is asked again where that may
help (`_call`). Answers are checked in answers.py.
It and `requests` are imported where they are used: a run without a server needs neither.
"""

import concurrent.futures
import json
import os
import random
import socket
import ssl
import threading
import time
import uuid
from urllib.parse import urlsplit

from cli import ConfigError
from safety import addresses, asking, credentials, open_files
from safety.calls import warn_once
from serving.wire import in_thread

MOST_BYTES = 1 << 26  # of an answer, beside the sampled tokens that were asked for and their experts
TOKEN_BYTES = 128  # of JSON, for a token and its log-prob
# What is asked again: every GET, and these, which may be repeated as they change nothing, or nothing more. Whether a
# step of a push whose answer was lost has been taken cannot be known: pushes begin anew instead.
REPEATABLE = {"/generate", "/sleep", "/adapters/check"}
BUSY = {429, 502, 503, 504}  # too many requests; a proxy or the server is busy, or starts
CONNECT_SECONDS = 10.0  # within which a connection is made
BROKEN_SECONDS = 10.0  # for which a server that refuses or cuts connections is asked again; a busy one: `timeout`
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0  # seconds before asking again, twice as long each time; Retry-After may say more


class ServerError(RuntimeError):
    """A server is gone, refused, or gave a wrong answer. The message names it, the cause and what to do.

    patience: for how many seconds asking again may help. after: seconds before which the server will not be asked.
    final: waiting until the server is ready does not help either.
    """

    def __init__(self, message: str, patience: float = 0.0, after: float = 0.0, final: bool = False):
        super().__init__(credentials.mask(message))
        self.patience, self.after, self.final = patience, after, final


def not_ours(url: str, what: str) -> ServerError:
    return ServerError(f"{url} answered {what}, as no vllm_server.py does. Is another program at this address?")


def experts_size(info: dict) -> int:
    """Bytes of base64 that tell the experts of a sample as long as the window. info: of /server_info."""
    return -(-info["max_model_len"] * info.get("expert_bytes", 0) // 3) * 4


def check_tls_files(ca: str | None, client_cert: str | None) -> None:
    """ConfigError for files that TLS cannot use; before anything is sent."""
    context = ssl.create_default_context()
    for flag, path, load, content in (
        ("--server_ca (or SSL_CERT_FILE)", ca, context.load_verify_locations, "the certificate of the server's signer"),
        ("--client_cert", client_cert, context.load_cert_chain, "a certificate and its key"),
    ):
        try:
            if path is not None and load == context.load_cert_chain:
                load(path, password="")  # else it would be asked for
            elif path is not None:
                load(path)
        except OSError as error:  # ssl.SSLError is one
            reason = error.strerror or error
            raise ConfigError(f"{flag}={path}: no usable PEM file ({reason}); give one with {content}.") from None


def speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), 5) as plain, context.wrap_socket(plain, server_hostname=host):
            return True
    except OSError:
        return False


def tls_trouble(url: str, ca: str | None, error: Exception) -> ServerError:
    """What a TLS connection failed at, and what to do about that."""
    text = str(error)
    cause = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or text[-160:]
    if "WRONG_VERSION_NUMBER" in text or "record layer" in text:
        cause, remedy = "it does not speak TLS", f"give http://{urlsplit(url).netloc}, or start it with --ssl-certfile"
    elif "REQUIRED" in text.upper() or "alert" in text:
        remedy = "it wants a certificate of this client (--client_cert), signed by one of its --ssl-ca-certs"
    elif "mismatch" in text or "not valid for" in text:
        remedy = "give the server's address by a name that is in its certificate, or have one made for this name"
    elif "expired" in text or "not yet valid" in text:
        remedy = "have a new certificate made, and look at the clocks of both machines"
    elif "CERTIFICATE_VERIFY_FAILED" in text:
        remedy = "give the PEM file of who signed its certificate: --server_ca FILE, or SSL_CERT_FILE"
        remedy += f" (now: {ca or 'the system'})"
    else:
        remedy = "look at the server's terminal, and at what stands between it and this machine"
    return ServerError(f"{url}: no secure connection ({cause}). What to do: {remedy}.", final=True)


class Servers:
    """One or several servers that serve the same model. VLLMClient says what the arguments are."""

    def __init__(self, urls: list[str], token: str | None, timeout: float, ca: str | None, client_cert: str | None):
        if not urls:
            raise ValueError("VLLMClient needs at least one server url, such as http://127.0.0.1:8000")
        self.urls = addresses.checked(urls, "urls")
        self.ca = ca or os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE") or None
        self.client_cert = client_cert
        if any(url.startswith("https:") for url in self.urls):
            check_tls_files(self.ca, client_cert)
        self.token = credentials.read("VLLM_SERVER_TOKEN", token)
        self.timeout = timeout
        self.vocab_size: int | None = None  # of their model, once they have been asked
        self.most_experts = 0  # bytes in which they tell the experts of one sample, at most

    def wait_ready(self, timeout: float = 300.0):
        """Return when every server answers, and all serve the same model; ServerError naming the one that does not."""
        deadline = time.monotonic() + timeout
        for url in self.urls:
            while True:
                try:
                    self._call(url, "GET", "/health", timeout=5, again=False)
                    break
                except ServerError as error:
                    if error.final:
                        raise
                    if time.monotonic() > deadline:
                        message = f"{url} was not ready within {timeout:g} s. Is it started, at this address? Last: "
                        raise ServerError(message + str(error)) from error
                time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
        keys = ("model", "vocab_size", "hidden_size", "num_layers", "dtype")
        first, *others = self.server_info()
        for url, other in zip(self.urls[1:], others, strict=True):
            if any(first[key] != other[key] for key in keys):
                raise ServerError(
                    f"servers differ: {self.urls[0]} serves { {key: first[key] for key in keys} }, {url} "
                    f"{ {key: other[key] for key in keys} }. Start them with the same --model and --dtype."
                )

    def server_info(self) -> list[dict]:
        """What each server serves: model, architectures, vocab_size, hidden_size, num_layers, max_model_len, dtype,
        policy_version, weights_error, vllm_version, world_size, device, devices, never_sampled, can_sleep, server."""
        from serving import answers

        infos = self._on_all([(url, "GET", "/server_info", None) for url in self.urls])
        for url, info in zip(self.urls, infos, strict=True):
            self._checked(url, "GET /server_info", answers.checked, info, answers.Described)
        self.vocab_size = min(info["vocab_size"] for info in infos)
        self.most_experts = max(experts_size(info) for info in infos)
        return infos

    def check_adapters(self, shapes: dict[str, list[int]]):
        """ServerError unless every server can serve adapters of these [rank, inputs, outputs], given by layer."""
        self._on_all([(url, "POST", "/adapters/check", {"modules": shapes}) for url in self.urls])

    def sleep(self):
        """The servers drop weights and KV cache, and give their memory back. The next push wakes them."""
        from serving import answers

        states = self._on_all([(url, "POST", "/sleep", None) for url in self.urls])
        for url, state in zip(self.urls, states, strict=True):
            if self._checked(url, "POST /sleep", answers.checked, state, answers.State).state != "asleep":
                raise ServerError(f"{url} is {state['state']} after POST /sleep; look at its terminal")

    def _call(
        self,
        url: str,
        method: str,
        path: str,
        body: dict | None = None,
        timeout: float | None = None,
        again: bool | None = None,
        given_up: threading.Event | None = None,
    ) -> dict:
        """One HTTP request; the JSON answer. Anything but a 2xx is a ServerError that carries the server's message.

        again: ask again, as long as that may help: BROKEN_SECONDS where the connection breaks, `timeout` where the
        server says that it is busy. Unset: if the request may be repeated. given_up: nobody waits for it any more.
        """
        import requests

        again = (method == "GET" or path in REPEATABLE) if again is None else again
        given_up, pause, began = given_up or threading.Event(), FIRST_PAUSE, None
        while True:
            if "request_id" in (body or {}):  # what it stood for before may not have ended yet
                body["request_id"] = uuid.uuid4().hex
            # Looked at after the name is set: who gives up sets this first, and ends what then has the name.
            if given_up.is_set():
                raise ServerError(f"{method} {path} was not sent to {url}: nobody waits for the answer any more.")
            try:
                return self._ask(url, method, path, body, timeout or self.timeout)
            except ServerError as error:
                now = time.monotonic()
                began = began or now
                wait = max(error.after, pause * random.uniform(0.5, 1))  # ranks do not come back all at once
                limit = min(error.patience, self.timeout) * again
                if given_up.is_set() or now + wait > began + limit:
                    asked = f" It was asked again for {now - began:.0f} s." if now > began else ""
                    cause = error.__cause__
                    broke = isinstance(cause, requests.RequestException) and not isinstance(cause, requests.Timeout)
                    if broke and error.patience:
                        error.args = (credentials.mask(self._diagnose(url, f"{method} {path}", cause)),)
                    if error.after > limit > 0:
                        asked += (
                            f" It asks for {error.after:.0f} s of patience; --server_timeout is {self.timeout:g} s."
                        )
                    error.args = (f"{error}{asked}",)
                    raise
                warn_once(f"{error} Asking again, for up to {limit:g} s.")
                if given_up.wait(wait):
                    raise
                pause = min(2 * pause, LONGEST_PAUSE)

    def _ask(self, url: str, method: str, path: str, body: dict | None, timeout: float) -> dict:
        import requests

        headers = credentials.bearer(self.token) | {"Accept-Encoding": "identity"}
        asked = body or {}
        sample = TOKEN_BYTES * asked.get("max_tokens", 0) + self.most_experts * asked.get("routed_experts", False)
        limits = (MOST_BYTES + sample * asked.get("n", 0), time.monotonic() + timeout)
        options = dict(
            json=body, headers=headers, timeout=(CONNECT_SECONDS, timeout), stream=True, allow_redirects=False
        )
        try:
            with requests.Session() as session:
                session.trust_env = False  # no proxies for loopback, no .netrc in place of the token
                session.verify, session.cert = self.ca or True, self.client_cert
                with session.request(method, url + path, **options) as answer:
                    too_much = not_ours(answer.url, f"with over {limits[0] / 2**20:.0f} MiB")
                    text = asking.read_body(answer, *limits, too_much)
        except requests.exceptions.SSLError as error:
            raise tls_trouble(url, self.ca, error) from error
        except requests.ConnectTimeout as error:
            raise ServerError(
                f"{url}: no connection within {CONNECT_SECONDS:g} s for {method} {path}. Is it started, is this its "
                "address, and does a firewall let connections through?",
                BROKEN_SECONDS,
            ) from error
        except requests.Timeout as error:
            raise ServerError(
                f"{url} gave no answer to {method} {path} within {timeout:g} s; it hangs, is stopped (kill -CONT lets "
                "it go on), or is overloaded. Look at its terminal, or raise the time limit."
            ) from error
        except requests.RequestException as error:
            place = urlsplit(url)
            if "alert" in str(error):  # TLS 1.3: what the server dislikes of this end comes with its first answer
                raise tls_trouble(url, self.ca, error) from error
            if place.scheme == "http" and speaks_tls(place.hostname, place.port or 80):
                raise ServerError(
                    f"{url} speaks TLS: give https://{place.netloc}, with --server_ca FILE if its certificate is not "
                    "signed by one of the usual authorities.",
                    final=True,
                ) from error
            raise ServerError(f"{url}: {method} {path} failed ({error}).", BROKEN_SECONDS) from error
        if answer.status_code == 401:
            raise ServerError(
                f"{url} refuses the token{'' if self.token else ', of which there is none'}. Give the one the server "
                "was started with, or the one it printed, in VLLM_SERVER_TOKEN or in the file that "
                "VLLM_SERVER_TOKEN_FILE names.",
                final=True,
            )
        if answer.is_redirect or 300 <= answer.status_code < 400:
            raise ServerError(
                f"{url} answered {method} {path} with {answer.status_code}, a redirect to "
                f"{answer.headers.get('Location', 'nowhere')}. It was not followed: prompt and token would go there. "
                "Give the server's own address in --server_urls.",
                final=True,
            )
        try:
            content = json.loads(text or b"{}")
        except (ValueError, RecursionError):
            content = text.decode(errors="replace")[:2000]
        if not answer.ok:
            error = content.get("error", content) if isinstance(content, dict) else content
            message = error.get("message", error) if isinstance(error, dict) else error
            busy = answer.status_code in BUSY and answer.headers.get("x-should-retry") != "false"
            raise ServerError(
                f"{url} answered {method} {path} with {answer.status_code}: {str(message).rstrip('.')}."
                + " Its terminal says more; start it again if it has ended, and resume the run."
                * (answer.status_code >= 500),
                patience=self.timeout * busy,
                after=asking.retry_after(answer.headers.get("Retry-After")) or 0.0,
            )
        if not isinstance(content, dict):
            raise not_ours(url, f"{method} {path} with {content!r:.80}")
        return content

    def _checked(self, url: str, what: str, check, *args):
        """`check(*args)` of serving/answers.py, with the address and what to do in its error."""
        try:
            return check(*args)
        except ValueError as error:
            raise ServerError(
                f"{url} answered {what} wrongly: {error}. Nothing of it is used. Start the vllm_server.py of this "
                "version there, and see that no other program answers at this address."
            ) from None

    def _diagnose(self, url: str, what: str, error: Exception) -> str:
        """The connection broke: is the server gone? A dying process may listen a moment longer than it talks."""
        (_, host, port), deadline = addresses.place_of(url), time.monotonic() + 2
        none_left = (
            f"{what} was not sent to {url}: this process may have no more files open than the {open_files.limit():,} "
            "that it has; every request is one. Raise the limit (ulimit -n), or sample less at a time, and resume the "
            "run."
        )
        if open_files.used_up(error):
            return none_left
        while time.monotonic() < deadline:
            try:
                with socket.create_connection((host, port), timeout=5):
                    time.sleep(0.2)
            except OSError as gone:
                if open_files.used_up(gone):
                    return none_left
                return (
                    f"{url} is gone: no connection ({gone.strerror or gone}) after {what} failed. Its terminal says "
                    f"why; start it again (python vllm_server.py --model ... --port {port}) and resume the run."
                )
        asks = url.startswith("https:") and not self.client_cert
        wants = " If it was started with --ssl-cert-reqs, it wants a --client_cert." * asks
        return f"{url} cut the connection during {what} ({error}) but still listens; look at its terminal.{wants}"

    def _on_all(self, calls: list[tuple]) -> list[dict]:
        """Calls to several servers at once; the first error is raised."""
        return self._gather([in_thread(self._call, *call) for call in calls], "answers from " + ", ".join(self.urls))

    def _gather(self, futures: list, what: str) -> list:
        done, _ = concurrent.futures.wait(futures, self.timeout + 15, return_when=concurrent.futures.FIRST_EXCEPTION)
        for future in done:
            future.result()
        if len(done) < len(futures):
            raise ServerError(f"waited {self.timeout + 15:g} s for {what}; look at the servers' terminals")
        return [future.result() for future in futures]
