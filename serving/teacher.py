"""Log-probs of given tokens from a teacher's servers, which may be any vLLM server (vllm_server.py, `vllm serve`).

    teacher = TeacherServers(["http://127.0.0.1:8001"], token="...", seconds=120)
    teacher.connect(tokenizer.decode, vocab_size, window=2048)          # once, before anything is trained
    scores = await teacher.score(prompt_ids + token_ids, top=20)

Requests send token ids and read `prompt_logprobs`; the one token that is sampled is thrown away. They go by POST
/v1/completions, which every server has, or, with images, by /inference/v1/generate (--enable-scale-out). An answer that
cannot be used is a TeacherError; nothing is guessed. If a server gives no answer, the next one is asked.
"""

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from config import ConfigError
from inputs.pictures import encode_image
from network import http

PIECE = 1024  # tokens of the vocabulary compared per request


class TeacherError(RuntimeError):
    """A teacher's server gave no usable answer. The message names the server, the fault and what to do."""


@dataclass
class Scores:
    """The teacher's log-probs at every token but the first."""

    logprobs: list[float]  # [n], of the tokens themselves
    top_ids: Tensor  # [n, k] int64: the likeliest tokens, likeliest first
    top_logprobs: Tensor  # [n, k]


@dataclass
class Server:
    url: str
    model: str = ""  # the teacher's name on this server
    load: int = 0  # requests under way


class TeacherServers:
    """One or several servers of one teacher. seconds: limit of one answer."""

    def __init__(self, urls: list[str], token: str = "", seconds: float = 600.0):
        self.servers = [Server(http.base(url)) for url in urls]
        self.seconds, self.session = seconds, http.session(token)
        self.pool = ThreadPoolExecutor(256, "teacher")

    def connect(
        self, decode: Callable[[list[int]], str], vocab_size: int, window: int, top: int = 0, ready: float = 0.0
    ) -> None:
        """ConfigError unless every server serves one model alone, with the policy's vocabulary and a large enough
        window.

        decode: of the policy's tokenizer, special tokens included. vocab_size: of that tokenizer. window: most tokens
        of a prompt with its completion. top: how many likeliest tokens will be requested. ready: seconds to wait for
        servers that are still starting.
        """
        end = time.monotonic() + ready
        for server in self.servers:
            while True:
                try:
                    card = self._card(server)
                    break
                except http.NoAnswer as error:
                    if error.status or time.monotonic() > end:
                        hint = " (TEACHER_TOKEN holds its token)" if error.status == 401 else ""
                        raise ConfigError(f"--teacher_urls: {error}{hint}") from None
                time.sleep(0.5)
            server.model, room = card["id"], card.get("max_model_len") or window + 1
            if room < window + 1:
                remedy = f"start it with --max-model-len {window + 1}, for prompt, completion and one more"
                raise ConfigError(f"--teacher_urls: {server.url} has a window of {room} tokens; {remedy}.")
            self._check_vocabulary(server, decode, vocab_size)
            try:
                self._said(server, [0, 1], top, None, [])
            except (TeacherError, http.NoAnswer) as error:
                hint = f" (--max-logprobs {top} there, or a smaller --distill_topk)" if top else ""
                raise ConfigError(f"--teacher_urls: {error}{hint}") from None

    def _ask(self, server: Server, method: str, path: str, body: dict | None = None) -> dict:
        return http.ask(method, server.url + path, self.seconds, body, using=self.session)

    def _card(self, server: Server) -> dict:
        """The card of the served model, from /v1/models."""
        cards = {card["id"]: card for card in self._ask(server, "GET", "/v1/models").get("data", [])}
        if len(cards) != 1:
            served = ", ".join(cards) or "no model"
            raise ConfigError(f"--teacher_urls: {server.url} serves {served}; give it the teacher alone.")
        return next(iter(cards.values()))

    def _check_vocabulary(self, server: Server, decode: Callable, vocab_size: int) -> None:
        """Every token must read the same on both sides: the server's /detokenize against the policy's tokenizer."""

        for start in range(0, vocab_size, PIECE):
            ids = list(range(start, min(start + PIECE, vocab_size)))
            answer = self._ask(server, "POST", "/detokenize", {"model": server.model, "tokens": ids})
            if answer.get("prompt") != decode(ids):
                fault = f"has another vocabulary: tokens {ids[0]} to {ids[-1]} do not all have the policy's texts"
                remedy = "take a teacher of the policy's family, or train on its answers (supervised) first"
                raise ConfigError(f"--teacher_urls: {server.url} ({server.model}) {fault}; {remedy}.")

    async def score(self, ids: list[int], top: int = 0, images: list | None = None, expanded: list[int] = ()) -> Scores:
        """The teacher's log-probs at every token but the first; TeacherError if they are unusable or late.

        images: in the order of their placeholders in `ids`, which has one for each. expanded: the trainer's ids, with
        placeholders expanded."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, self._score, ids, top, images, expanded)

    def _score(self, ids: list[int], top: int, images: list | None, expanded: list[int]) -> Scores:
        causes = []
        for server in sorted(self.servers, key=lambda server: server.load):
            server.load += 1
            try:
                return self._said(server, ids, top, images, expanded)
            except http.NoAnswer as error:
                causes.append(str(error).rstrip("."))
            finally:
                server.load -= 1
        remedy = f"Look at its terminal; start it again, or raise --request_timeout (now {self.seconds:g} s)."
        raise TeacherError(f"the teacher gave no log-probs: {'; '.join(causes)}. {remedy}")

    def _said(self, server: Server, ids: list[int], top: int, images: list | None, expanded: list[int]) -> Scores:
        if images:
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "prompt_logprobs": top}}
            body["content_parts"] = [{"type": "image_url", "url": encode_image(image)} for image in images]
            answer = self._ask(server, "POST", "/inference/v1/generate", body | {"return_token_ids": True})
            echo, places, ids = answer.get("prompt_token_ids"), answer.get("prompt_logprobs"), list(expanded)
        else:
            body = {"model": server.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": top, "temperature": 0}
            answer = self._ask(server, "POST", "/v1/completions", body | {"return_token_ids": True})
            choice = (answer.get("choices") or [{}])[0]
            echo, places = choice.get("prompt_token_ids", ids), choice.get("prompt_logprobs")
        try:
            if echo != ids:
                raise ValueError("about other tokens than it was asked about")
            return read(ids[1:], places[1:], top)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TeacherError(f"the teacher at {server.url} answered {error}. Is it a vLLM server?") from None


def read(ids: list[int], places: list[dict], top: int) -> Scores:
    """The Scores in vLLM's {token: {"logprob": number}} for each place: its own token's, and the `top` likeliest.
    ValueError if any is missing or not finite."""
    logprobs, likeliest = [], []
    for token, entry in zip(ids, places, strict=True):
        by_token = {int(name): value["logprob"] for name, value in entry.items()}
        top_ids = sorted(by_token, key=by_token.get, reverse=True)[:top]  # the place's own token may be one more
        if len(top_ids) < top:
            raise ValueError(f"with {len(top_ids)} likeliest tokens where {top} were asked for (its --max-logprobs?)")
        if not all(math.isfinite(p) for p in (by_token[token], *map(by_token.get, top_ids))):
            raise ValueError(f"with a log-prob that is not finite for token {token}")
        logprobs.append(float(by_token[token]))
        likeliest.append([(id, by_token[id]) for id in top_ids])
    pairs = torch.tensor(likeliest, dtype=torch.float64).view(len(ids), top, 2)  # float64 holds any id
    return Scores(logprobs, pairs[..., 0].long(), pairs[..., 1].float())
