"""The trainer's end of the wire: asks vLLM servers (vllm_server.py) for completions and pushes new weights to them.

    client = VLLMClient(["http://127.0.0.1:8000"], token="...")
    client.wait_ready(timeout=300)
    completions = await client.generate(prompt_ids, n=8, max_tokens=64)       # every rank, for its own prompts
    client.connect_weights(device)                                            # rank 0 only, once
    client.begin_push(); client.send_bucket([(name, tensor), ...]); client.finish_push(version=1)

Sampling is here. Below it are serving/pushing.py, which sends weights, and serving/servers.py, which asks over HTTP:
time limits, asking again, TLS, errors that name the server. No part of vLLM is imported.
"""

import asyncio
import base64
import io
import os
import threading
import uuid
from dataclasses import dataclass

import numpy as np

from serving.experts import decoded
from serving.pushing import Pusher
from serving.servers import ServerError
from serving.wire import in_thread


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


def encode_image(image) -> str:
    """base64 of an image file given as bytes, or of a PIL image (as PNG: lossless). Text is taken to be base64."""
    if not isinstance(image, (bytes, str)):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        image = buffer.getvalue()
    return image if isinstance(image, str) else base64.b64encode(image).decode()


class VLLMClient(Pusher):
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
        super().__init__(urls, token, timeout, over, changes_only, ca, client_cert)
        self.request_timeout = request_timeout
        self.tokenizer = self.rope_index = None
        self.stop_token_ids: list[int] | None = None  # beside those that the server knows
        self.image_bytes = 0  # sent since the start, as base64
        self.tells_experts = False  # whether completions are to come with the experts of their tokens
        self._load = [0] * len(self.urls)  # sequences under way, by server
        self._turn = os.getpid()  # ranks start at different servers

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
        body |= dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        body["stop_token_ids"] = stop_token_ids or self.stop_token_ids
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

    def can_tell_experts(self) -> bool:
        return all(info["tells_experts"] for info in self.server_info())

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

    def _completions(self, url: str, asked: dict, answer: dict) -> list[Completion]:
        from serving import answers

        instance = None if self.instances is None else self.instances[url]
        try:
            found = self._checked(url, "POST /generate", answers.generated, answer, asked, self.vocab_size, instance)
        except PermissionError:
            own = "a server" if self.adapter is None else f"an adapter (now --adapter {self.adapter}) or a server"
            raise ServerError(
                f"{url} was started anew, or another trainer has connected to it, since this run pushed its weights: "
                f"what it samples is not this run's policy. Give each run {own} of its own, and resume the run."
            ) from None
        versions = dict(policy_version=found.policy_version, policy_version_last=found.policy_version_last)
        return [
            Completion(
                one.token_ids,
                one.logprobs,
                one.finish_reason,
                prompt_ids=found.prompt_ids,
                routed_experts=one.routed_experts
                and self._checked(url, "the experts of POST /generate", decoded, one.routed_experts.model_dump()),
                **versions,
            )
            for one in found.samples
        ]
