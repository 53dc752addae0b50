"""The trainer's end of the wire: asks vLLM servers (vllm_server.py) for completions and pushes new weights to them.

    client = VLLMClient(["http://127.0.0.1:8000"], token="...")
    client.wait_ready(timeout=300)
    completions = await client.generate(prompt_ids, n=8, max_tokens=64)       # every rank, for its own prompts
    client.connect_weights(device)                                            # rank 0 only, once
    client.begin_push(); client.send_bucket([(name, tensor), ...]); client.finish_push(version=1)

Weights travel as bytes: the tensors of a bucket are packed into one flat uint8 buffer, their names, dtypes, shapes and
checksums are announced over HTTP, and the server's workers read the buffer where it lies, if they are on this machine
(serving/shared.py). Else it is broadcast in a torch process group of this process and the workers - one group a server,
so that a dead server is known by its address. The whole bucket must be gathered before `send_bucket` is called: nothing
here takes part in a collective of the trainer. It travels while the caller gathers the next one. What both ends must do
alike is in serving/wire.py.

Every wait has a limit (`timeout` for control and transfer, `request_timeout` for one generation) and its error says
which server was waited for. What changes nothing on a server is asked again where that may help (`_call`); the steps of
a push never are. Answers are checked in serving/answers.py. No part of vLLM is imported.
"""

import asyncio
import base64
import concurrent.futures
import contextlib
import io
import itertools
import json
import os
import random
import secrets
import socket
import ssl
import threading
import time
import uuid
from dataclasses import dataclass
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import requests
import torch

from cli import ConfigError
from safety import addresses, asking, credentials
from safety.limits import warn_once
from serving import answers, shared, wire
from serving.changes import Changes
from serving.experts import decoded
from serving.rendezvous import Rendezvous
from serving.wire import (
    broadcast,
    checksums,
    fold,
    in_thread,
    layout,
    local_address,
    not_finite,
    open_group,
    pack,
    some,
    wait_for,
)

# --------------------------------------------------------------------------------------------------------------------
# The client
# --------------------------------------------------------------------------------------------------------------------

MOST_BYTES = 1 << 26  # of an answer, beside the sampled tokens that were asked for
TOKEN_BYTES = 128  # of JSON, for a token and its log-prob
# What is asked again: every GET, and these, which may be repeated as they change nothing, or nothing more. Whether a
# step of a push whose answer was lost has been taken cannot be known: pushes begin anew instead.
REPEATABLE = {"/generate", "/sleep", "/adapters/check"}
# Steps of a push of whole weights; those of adapters alone are below /adapters.
ROUTES = {"connect": "/init_weight_transfer_engine", "start": "/start_weight_update", "bucket": "/update_weights"}
ROUTES |= {"finish": "/finish_weight_update", "abort": "/abort_weight_update"}
BUSY = {429, 502, 503, 504}  # too many requests; a proxy or the server is busy, or starts
BROKEN_SECONDS = 10.0  # for which a server that refuses or cuts connections is asked again; a busy one: `timeout`
BEAT_SECONDS = 10.0  # after which a run says again that it holds its adapter's name; serving/adapters.py waits LEASE
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


@dataclass
class Completion:
    """One sampled sequence. `len(token_ids) == len(logprobs)`; a sampled end-of-turn token is included."""

    token_ids: list[int]
    logprobs: list[float]  # under the distribution the tokens were drawn from (temperature and truncation applied)
    finish_reason: str  # "stop" | "length"
    policy_version: int  # oldest weights that sampled any of its tokens
    prompt_ids: list[int]  # as the server expanded them (images)
    policy_version_last: int | None = None  # newest weights that sampled any of them; None: the same
    routed_experts: np.ndarray | None = (
        None  # [tokens, layers, k] that prompt and completion went through, but the last
    )


@dataclass
class Described:
    """A bucket that the servers have."""

    what: dict[str, list]  # names, dtypes, shapes
    starts: list[int]
    checksums: list[int]
    moves: list[torch.Tensor] | None  # where words of the trainer's bucket lie in it (wire.moved); None: hard to say


@dataclass
class Link:
    """What is open to one server for pushing weights."""

    url: str
    session: str
    store: Rendezvous
    group: object = None
    shares: bool = False  # its workers read this process's memory


def is_here(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    return local_address(host, 1) in {address[0] for *_, address in socket.getaddrinfo(host, 1)}


def drop_group(link: Link, abort: bool):
    link.store.close()
    if abort and link.group is not None:
        link.group.abort()
    link.group = link.store = None


def encode_image(image) -> str:
    """base64 of an image file given as bytes, or of a PIL image (as PNG: lossless). Text is taken to be base64."""
    if not isinstance(image, (bytes, str)):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        image = buffer.getvalue()
    return image if isinstance(image, str) else base64.b64encode(image).decode()


class VLLMClient:
    """Talks to one or several servers that serve the same model.

    Args:
        urls: of the servers; a request goes to the one with the fewest sequences under way.
        token: bearer token; when not given, VLLM_SERVER_TOKEN or what is in the file VLLM_SERVER_TOKEN_FILE names.
        timeout: seconds for a control request, for a bucket and for setting up the transfer.
        request_timeout: seconds for one `generate`. A server that dies is noticed long before.
        over: how weights travel: memory that both ends share, nccl or gloo; auto: the fastest that works.
        changes_only: the servers keep the buckets of a push, for `send_changes`; `changes` keeps this end's.
        ca: PEM file by which certificates of https:// servers are checked; when not given, what SSL_CERT_FILE or
            REQUESTS_CA_BUNDLE names, else the usual authorities.
        client_cert: PEM file with the certificate and key to show to servers that ask for one.
    """

    def __init__(
        self,
        urls: list[str],
        token: str | None = None,
        timeout: float = 60.0,
        request_timeout: float = 600.0,
        over: str = "auto",
        changes_only: bool = False,
        ca: str | None = None,
        client_cert: str | None = None,
    ):
        if not urls:
            raise ValueError("VLLMClient needs at least one server url, such as http://127.0.0.1:8000")
        self.urls = addresses.checked(urls, "urls")
        self.ca = ca or os.environ.get("SSL_CERT_FILE") or os.environ.get("REQUESTS_CA_BUNDLE") or None
        self.client_cert = client_cert
        if any(url.startswith("https:") for url in self.urls):
            check_tls_files(self.ca, client_cert)
        self.token = credentials.read("VLLM_SERVER_TOKEN", token)
        self.timeout, self.request_timeout, self.over = timeout, request_timeout, over
        self.tokenizer = self.rope_index = None
        self.convert = lambda named: named  # (name, tensor) pairs as the trainer has them -> as a checkpoint has them
        self.image_bytes = 0  # sent since the start, as base64
        self._load = [0] * len(self.urls)  # sequences under way, by server
        self._turn = os.getpid()  # ranks start at different servers
        self._links, self._infos = [], []  # open connections; what the servers say of themselves
        self.vocab_size: int | None = None  # of their model, once they have been asked
        self._device: torch.device | None = None
        self._transport = torch.device("cpu")  # where the packed bucket lies
        self._buffers: list = []  # with `bytes` and `place`, as Shared; one is packed while the other travels
        self._checksums: list[int] | None = None  # of what was sent in the push under way
        self._sending: concurrent.futures.Future | None = None  # the bucket under way
        self.receives_weights = True  # whether pushes go through this process
        self.weight_dtype: torch.dtype | None = None  # of the servers
        self.changes = Changes() if changes_only else None
        self._described: list[Described] = []  # with `changes`, the buckets that the servers keep
        self._push, self._base = "", None  # the push under way or last; the complete one that it changes
        self._sent_buckets = self.sent_bytes = 0  # of the push under way or last
        self.server_seconds: dict[str, float] = {}  # of the last push, at the first server: receive, check, load
        # Per server, the name it took when this run's trainer connected. Where it answers with another one it was
        # started anew or belongs to another trainer, whatever number its weights have. None: not looked at.
        self.instances: dict[str, str] | None = None
        self.tells_experts = False  # whether completions are to come with the experts of their tokens
        # Adapters alone travel: their name on the servers, and [rank, inputs, outputs] of each by its layer.
        self.adapter: str | None = None
        # The run that holds the adapter's name there, 32 hexadecimal digits; None: whoever connects last has it.
        self.owner: str | None = None
        self.run: str | None = None  # the run's name, for those whom a server refuses on its behalf
        self._beating: threading.Event | None = None  # set to end the thread that says that this run is there
        self.adapter_shapes: dict[str, list[int]] = {}

    # -- requests ----------------------------------------------------------------------------------------------------

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
                    if isinstance(error.__cause__, requests.RequestException) and error.patience:
                        error.args = (credentials.mask(self._diagnose(url, f"{method} {path}", error.__cause__)),)
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
        headers = credentials.bearer(self.token) | {"Accept-Encoding": "identity"}
        sampled = (body or {}).get("n", 0) * (body or {}).get("max_tokens", 0)
        limits = (MOST_BYTES + TOKEN_BYTES * sampled, time.monotonic() + timeout)
        options = dict(json=body, headers=headers, timeout=(10, timeout), stream=True, allow_redirects=False)
        try:
            with requests.Session() as session:
                session.trust_env = False  # no proxies for loopback, no .netrc in place of the token
                session.verify, session.cert = self.ca or True, self.client_cert
                with session.request(method, url + path, **options) as answer:
                    too_much = not_ours(answer.url, f"with over {limits[0] / 2**20:.0f} MiB")
                    text = asking.read_body(answer, *limits, too_much)
        except requests.exceptions.SSLError as error:
            raise tls_trouble(url, self.ca, error) from error
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
        while time.monotonic() < deadline:
            try:
                with socket.create_connection((host, port), timeout=5):
                    time.sleep(0.2)
            except OSError as gone:
                return (
                    f"{url} is gone: no connection ({gone.strerror or gone}) after {what} failed. Its terminal says "
                    f"why; start it again (python vllm_server.py --model ... --port {port}) and resume the run."
                )
        asks = url.startswith("https:") and not self.client_cert
        wants = " If it was started with --ssl-cert-reqs, it wants a --client_cert." * asks
        return f"{url} cut the connection during {what} ({error}) but still listens; look at its terminal.{wants}"

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        n: int = 1,
        max_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        min_tokens: int = 0,
        stop_token_ids: list[int] | None = None,
        seed: int | None = None,
        images: list | None = None,
        expanded=None,
    ) -> list[Completion]:
        """`n` completions of one prompt, from the least loaded server; ServerError, never part of them. Cancelled, the
        server stops sampling them, too.

        With images, `prompt_ids` has one placeholder token an image, as the chat template writes it; the server
        expands it and the completion's `prompt_ids` says to what (`expanded` is for in-process generators).
        """
        body = dict(prompt_ids=list(prompt_ids), n=n, max_tokens=max_tokens, min_tokens=min_tokens, seed=seed)
        body["request_id"] = uuid.uuid4().hex
        body |= dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, stop_token_ids=stop_token_ids)
        if self.tells_experts:
            body["routed_experts"] = True
        if self.adapter is not None:
            body["adapter"] = self.adapter
        if images:
            body["images"] = [encode_image(image) for image in images]
            self.image_bytes += sum(map(len, body["images"]))
        count = len(self.urls)
        index = min(range(count), key=lambda i: (self._load[i], (i - self._turn) % count))
        self._turn, self._load[index] = index + 1, self._load[index] + n
        try:
            answer = await self._wait_alive(index, body)
        finally:
            self._load[index] -= n
        return self._completions(self.urls[index], body, answer)

    async def _wait_alive(self, index: int, body: dict) -> dict:
        """POST /generate, looking now and then whether the server still lives: a frozen machine sends no reset."""
        url = self.urls[index]
        given_up = threading.Event()
        call = (url, "POST", "/generate", body, self.request_timeout, None, given_up)
        request = asyncio.wrap_future(in_thread(self._call, *call))
        waited_for = {request}
        try:
            while True:
                done, _ = await asyncio.wait(waited_for, timeout=10, return_when=asyncio.FIRST_COMPLETED)
                if request in done:
                    return request.result()
                if done:
                    (look,) = done
                    look.result()
                    waited_for = {request}
                elif waited_for == {request}:
                    look = in_thread(self._call, url, "GET", "/health", None, min(self.timeout, 30))
                    waited_for = {request, asyncio.wrap_future(look)}
        except asyncio.CancelledError:  # nobody waits for the answers any more
            given_up.set()
            in_thread(self._call, url, "POST", "/abort_requests", {"request_ids": [body["request_id"]]})
            raise
        finally:
            given_up.set()
            for one in waited_for:
                one.cancel()

    def can_tell_experts(self) -> bool:
        return all(info["tells_experts"] for info in self.server_info())

    def _completions(self, url: str, asked: dict, answer: dict) -> list[Completion]:
        instance = None if self.instances is None else self.instances[url]
        try:
            found = self._checked(url, "POST /generate", answers.generated, answer, asked, self.vocab_size, instance)
        except PermissionError:
            raise ServerError(
                f"{url} was started anew, or another trainer has connected to it, since this run pushed its weights: "
                "what it samples is not this run's policy. Give each run a server of its own, and resume the run."
            ) from None
        versions = dict(policy_version=found.policy_version, policy_version_last=found.policy_version_last)
        return [
            Completion(
                one.token_ids,
                one.logprobs,
                one.finish_reason,
                prompt_ids=found.prompt_ids,
                routed_experts=one.routed_experts and decoded(one.routed_experts.model_dump()),
                **versions,
            )
            for one in found.samples
        ]

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
        infos = self._on_all([(url, "GET", "/server_info", None) for url in self.urls])
        for url, info in zip(self.urls, infos, strict=True):
            self._checked(url, "GET /server_info", answers.checked, info, answers.Described)
        self.vocab_size = min(info["vocab_size"] for info in infos)
        return infos

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

    def check_adapters(self, shapes: dict[str, list[int]]):
        """ServerError unless every server can serve adapters of these [rank, inputs, outputs], given by layer."""
        self._on_all([(url, "POST", "/adapters/check", {"modules": shapes}) for url in self.urls])

    def sleep(self):
        """The servers drop weights and KV cache, and give their memory back. The next push wakes them."""
        states = self._on_all([(url, "POST", "/sleep", None) for url in self.urls])
        for url, state in zip(self.urls, states, strict=True):
            if self._checked(url, "POST /sleep", answers.checked, state, answers.State).state != "asleep":
                raise ServerError(f"{url} is {state['state']} after POST /sleep; look at its terminal")

    # -- pushing weights ---------------------------------------------------------------------------------------------

    def connect_weights(self, device: torch.device | str = "cpu"):
        """Open a process group with every server; drops older ones, also those of another trainer.

        Weights are read from shared memory where trainer and server are on one machine and not on different GPUs, which
        is asked by letting the workers read a random number there. NCCL where they have different GPUs. Else gloo,
        through host memory.
        """
        self._drop_groups()
        self._device, self._infos = torch.device(device), self.server_info()
        self._check_apart()
        self.weight_dtype = getattr(torch, self._infos[0]["dtype"])
        backend = self._pick_backend()
        self._transport = self._device if backend == "nccl" else torch.device("cpu")
        self._buffers = [None, None]
        probe = shared.probe() if backend == "gloo" and self.over != "gloo" else None
        futures = []
        for url, info in zip(self.urls, self._infos, strict=True):
            address = local_address(urlsplit(url).hostname, addresses.place_of(url)[2])  # loopback for loopback
            link = Link(url, uuid.uuid4().hex, Rendezvous(secrets.token_hex(32), address, self.timeout))
            self._links.append(link)
            init = {"secret": link.store.secret, "address": address, "port": link.store.port, "backend": backend}
            init |= {"timeout": self.timeout, "world_size": 1 + info["world_size"], "keep": self.changes is not None}
            init |= {"probe": probe and probe.place}
            who = {"run": self.run} if self.adapter is None else {"owner": self.owner}
            path, body = self._route("connect", {"session": link.session, "init_info": init} | who)
            futures.append(in_thread(self._call, url, "POST", path, body, self.timeout + 10))
            futures.append(in_thread(self._open, link, init, probe))
        try:
            joined = self._gather(futures, "the transfer groups")[::2]
            what = (f"POST {path}", answers.checked)
            forms = [
                self._checked(link.url, *what, answer, answers.Connected)
                for link, answer in zip(self._links, joined, strict=True)
            ]
        except BaseException:
            self.close()
            raise
        self.instances = {link.url: form.instance for link, form in zip(self._links, forms, strict=True)}
        self._check_memory()
        if self.owner is not None and self.adapter is not None and self._beating is None:
            self._beating = threading.Event()
            threading.Thread(target=self._beat, args=(self._beating,), daemon=True).start()

    def _beat(self, ended: threading.Event):
        """In a thread: hold the adapter's name."""
        while not ended.wait(BEAT_SECONDS):
            self._say("lease")

    def _say(self, step: str):
        """Of the adapter's name, to every server; one that is gone is met elsewhere."""
        body = {"adapter": self.adapter, "owner": self.owner}
        for url in self.urls:
            with contextlib.suppress(ServerError):
                self._call(url, "POST", f"/adapters/{step}", body, min(self.timeout, BEAT_SECONDS), again=False)

    def _route(self, step: str, body: dict) -> tuple[str, dict]:
        """Path and body of a step of a push."""
        if self.adapter is None:
            return ROUTES[step], body
        return f"/adapters/{step}", body | {"adapter": self.adapter}

    def _check_apart(self):
        """One server under two names would take each for another trainer."""
        known: dict[str, str] = {}
        for url, info in zip(self.urls, self._infos, strict=True):
            if (other := known.setdefault(info["server"], url)) != url:
                raise ServerError(f"{other} and {url} are one and the same server; give it once in --server_urls.")

    def _check_memory(self):
        """Say which servers of this machine cannot read this process's memory."""
        if self._transport.type == "cuda" or self.over == "gloo":
            return
        cannot = [link.url for link in self._links if not link.shares]
        if self.over == "memory" and cannot:
            self.close()
            raise ServerError(
                f"{', '.join(cannot)} cannot read this process's memory: another machine, container or user, or not "
                "Linux. Leave --push_over memory out."
            )
        for url in cannot:
            if is_here(urlsplit(url).hostname):
                warn_once(f"{url} cannot read this process's memory (another container or user?): weights go by gloo.")

    def _open(self, link: Link, init: dict, probe: shared.Shared | None):
        if init["backend"] == "nccl":
            torch.cuda.set_device(self._device)  # the thread's own setting
        world, backend, limit, address = (init[key] for key in ("world_size", "backend", "timeout", "address"))
        try:
            link.group = open_group(link.store, link.store.secret, 0, world, backend, limit, address)
            link.store.close()  # all have come
            link.shares = probe is not None and wire.all_equal(link.group, world, probe.bytes, limit)
        except (RuntimeError, TimeoutError, PermissionError) as error:
            raise ServerError(f"{link.url} did not join the transfer group ({init['backend']}): {error}") from error

    def _pick_backend(self) -> str:
        """Of the process groups. NCCL wants a GPU of its own at each end."""
        nccl = self._device.type == "cuda" and all(info["device"] == "cuda" for info in self._infos)
        if nccl:
            mine = str(torch.cuda.get_device_properties(self._device).uuid)
            nccl = not any(mine in info["devices"] for info in self._infos)
        if self.over == "nccl" and not nccl:
            raise ServerError("--push_over nccl wants trainer and servers on different GPUs; leave it out")
        return "nccl" if nccl and self.over in ("auto", "nccl") else "gloo"

    def begin_push(self):
        """Open an update. The servers pause, unless adapters alone travel; sequences under way are kept. Connects again
        after a failure."""
        if not self._links:
            if self._device is None:
                raise ServerError("begin_push before connect_weights: call connect_weights(device) once, on rank 0")
            self.connect_weights(self._device)
        what = {} if self.adapter is None else {"modules": self.adapter_shapes}
        self._step("start", [what for _ in self._links])
        self._checksums, self._push = [], uuid.uuid4().hex
        self._sent_buckets = self.sent_bytes = 0

    def send_bucket(self, named: list[tuple[str, torch.Tensor]]):
        """Send whole tensors, on any device, to every server. Returns when they are packed and on their way: they may
        change then. An error on the way is raised by the next call, which waits for the arrival.

        They travel in the dtypes of `wire.travels_as`. Peak extra memory: two buckets, one that travels and one that is
        packed. FloatingPointError naming tensors that hold nan or inf, before anything of the bucket is sent; ends the
        push.
        """
        self._check_open()
        if not named:
            return
        given, named = named, self.convert(named)
        dtypes = [wire.travels_as(tensor, self.weight_dtype) for _, tensor in named]
        shapes = [list(tensor.shape) for _, tensor in named]
        starts, _, total = layout(dtypes, shapes)
        bucket = self._take_buffer(total)
        packed = pack(named, dtypes, bucket, starts)
        bad, sums = not_finite(packed), checksums(bucket, starts)  # reads it back, so it is complete when handed over
        self._settle()
        if bad:  # also what fitted float32 and does not fit a server's float16
            reason = f"nan or inf in {some(bad)}"
            self.abort_push(reason)
            raise FloatingPointError(
                f"{reason}, as {str(self.weight_dtype).removeprefix('torch.')}: these weights were not pushed. Look at "
                "loss and gradient norm of the last steps, and resume from a checkpoint before them with a lower "
                "learning rate."
            )
        what = {"names": [name for name, _ in named], "dtypes": [str(d).removeprefix("torch.") for d in dtypes]}
        described = Described(what | {"shapes": shapes}, starts, sums, None)
        if self.changes is not None:
            described.moves = wire.rearranged(given, named, self.convert, self.weight_dtype, bucket)
            self._described[self._sent_buckets : self._sent_buckets + 1] = [described]
        self._send(described, bucket, None)

    def can_change(self, number: int) -> bool:
        """Whether bucket `number` of the push under way may be sent by `send_changes`, as far as this process knows."""
        known = self._described[number : number + 1]
        return not self.receives_weights or (self._base is not None and bool(known) and known[0].moves is not None)

    def send_changes(self, found: torch.Tensor):
        """Instead of `send_bucket`: what has changed of the servers' bucket since the last push, as `Changes.find`
        gives it. The checksums announced are of the whole tensors, as they are then."""
        self._check_open()
        described, found = self._described[self._sent_buckets], found.to(self._transport)
        places = wire.moved(found >> 32, *described.moves)
        old, new = found.view(torch.int16).view(-1, 4)[:, :2].unbind(1)
        described.checksums = wire.changed_checksums(described.checksums, described.starts, places, new, old)
        bucket = wire.pack_changes(places, new, self._take_buffer(wire.layout_changes(len(places))[2]))
        self._settle()
        self._send(described, bucket, len(places))

    def _check_open(self):
        if self._checksums is None:
            self._settle()  # why there is no push any more
            raise ServerError("send_bucket outside a push: call begin_push first")

    def _send(self, described: Described, bucket: torch.Tensor, changed: int | None):
        """The buffer taken last on its way: a bucket, or so many words that have `changed` of one that servers keep."""
        memory = [self._buffers[0].place if link.shares else None for link in self._links]
        update = described.what | {"checksums": described.checksums, "push": self._push}
        update |= {"base": self._base, "changed": changed}
        self._checksums += described.checksums
        self._sent_buckets, self.sent_bytes = self._sent_buckets + 1, self.sent_bytes + len(bucket)
        bodies = [{"update_info": update | {"memory": place}} for place in memory]
        self._sending = in_thread(self._step, "bucket", bodies, bucket)

    def _take_buffer(self, size: int) -> torch.Tensor:
        """The buffer that was not used last: the other one may still travel. Kept from push to push, as fresh memory
        costs several times what copying into it does."""
        self._buffers.reverse()
        if self._buffers[0] is None or len(self._buffers[0].bytes) < size:
            self._buffers[0] = None  # goes before the larger one comes
            self._buffers[0] = self._make_buffer(size)
        return self._buffers[0].bytes[:size]

    def _make_buffer(self, size: int):
        if any(link.shares for link in self._links):
            try:
                return shared.Shared(max(size, wire.ALIGN))
            except OSError as error:
                warn_once(f"no {size / 1e6:.0f} MB of shared memory ({error.strerror}): weights go by gloo.")
        return SimpleNamespace(bytes=torch.empty(size, dtype=torch.uint8, device=self._transport), place=None)

    def _settle(self):
        """Wait until the bucket under way has arrived; raises what went wrong. `_step` keeps the time."""
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    def _step(self, step: str, bodies: list[dict], bucket: torch.Tensor | None = None) -> list[dict]:
        """One step of a push on all servers. Whatever goes wrong ends the push: the groups may be out of step."""
        path, common = self._route(step, {})
        try:
            bodies = [body | common | {"session": link.session} for link, body in zip(self._links, bodies, strict=True)]
            futures = [
                in_thread(self._call, link.url, "POST", path, body, self.timeout + 10)
                for link, body in zip(self._links, bodies, strict=True)
            ]
            if bucket is not None:
                receivers = [b["update_info"]["memory"] is None for b in bodies]
                self._broadcast(bucket, list(itertools.compress(self._links, receivers)), futures)
            return self._gather(futures, f"{path} on " + ", ".join(link.url for link in self._links))
        except BaseException as error:
            self.abort_push(reason=str(error))
            raise

    def _broadcast(self, bucket: torch.Tensor, links: list[Link], announcements: list):
        if self._transport.type == "cuda":
            torch.cuda.set_device(self._transport)  # the thread's own setting

        def refused():  # a server that turned the announcement down will never receive: say its reason at once
            for future in announcements:
                if future.done():
                    future.result()

        works = [broadcast(link.group, bucket) for link in links]
        for link, work in zip(links, works, strict=True):
            try:
                wait_for(work, self.timeout, f"{link.url} to receive {len(bucket) / 1e6:.1f} MB", refused)
            except (RuntimeError, TimeoutError) as error:
                if isinstance(error, ServerError):
                    raise
                concurrent.futures.wait(announcements, timeout=5)  # its own account of the matter, if it has one
                refused()
                raise ServerError(self._diagnose(link.url, "a weight bucket", error)) from error

    def finish_push(self, version: int):
        """Close the update: every server checks that each of its parameters came exactly once, empties its caches,
        takes `version` and goes on sampling. ServerError names parameters that are missing, unknown or misshapen."""
        self._settle()
        if self._checksums is None:
            raise ServerError("finish_push outside a push: call begin_push first")
        sums, self._checksums = self._checksums, None
        finished = self._step("finish", [{"weight_version": version} for _ in self._links])
        for link, answer in zip(self._links, finished, strict=True):
            what = f"POST {self._route('finish', {})[0]}"
            form = self._checked(link.url, what, answers.checked, answer, answers.Finished)
            if form.checksum != fold(sums) or form.policy_version != version:
                raise ServerError(
                    f"{link.url} has version {form.policy_version}, checksum {form.checksum:016x} after the "
                    f"push of version {version}, checksum {fold(sums):016x}: the weights did not arrive as sent."
                )
        if self._transport.type == "cuda":  # torch's allocator has them for the next push, and passes until then
            self._buffers = [None, None]
        self._base = None if self.changes is None else self._push
        self.server_seconds = finished[0]["seconds"]

    def abort_push(self, reason: str = "the trainer gave up"):
        """Tell the servers, as far as they can still be told, that the push will not be completed. They answer 503 to
        requests until a complete one arrives; of adapters they go on with the version before. Never raises."""
        links, self._checksums = self._links, None
        self.close()
        path, body = self._route("abort", {"reason": reason[:2000]})
        calls = [(link.url, "POST", path, body | {"session": link.session}, 5) for link in links]
        concurrent.futures.wait([in_thread(self._call, *call) for call in calls], timeout=10)

    def close(self):
        """Drop the transfer groups, and let go of the adapter's name; the next push is of all weights."""
        self._drop_groups()
        if self._beating is not None:
            self._beating.set()
            self._beating = None
            self._say("release")

    def _drop_groups(self):
        links, self._links = self._links, []
        self._described, self._base = [], None
        # In threads: a gloo group waits for its pending sends before it goes. Waited for, but not for long: a process
        # that ends while a thread takes a group down is aborted.
        abort = self._transport.type == "cuda"
        concurrent.futures.wait([in_thread(drop_group, link, abort) for link in links], timeout=5)
