"""Servers of a teacher: any vLLM OpenAI server (`vllm serve`, vllm_server.py) says how likely it finds given tokens.

    teacher = TeacherServers(["http://127.0.0.1:8001"], model=None, token="...", seconds=120)
    teacher.connect(tokenizer.decode, vocab_size, window=2048)          # once, before anything is trained
    said = await teacher.score(prompt_ids + token_ids, top=20)

Token ids are asked about as they are: POST /v1/completions with `prompt_logprobs`, one token sampled and thrown away.
With images, which that route cannot take, vllm_server.py's /generate is asked.

A server is known by its answers: `connect` keeps what it says of a fixed text (PROBE), and after every pause in which
it may have been started anew it is asked for that again. Another model is a TeacherError, as is whatever else cannot be
used; nothing is guessed. Where one of several servers gives no answer the next is asked.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cli import ConfigError, NotNow
from inputs.trajectory import ABOVE_ZERO
from safety import asking
from serving.wire import in_thread

PROBE = 24  # tokens of the fixed text
ALIKE = 0.1  # nats; by more, on average over that text, the same model does not differ from itself in bfloat16
PAUSE = 5.0  # seconds without an answer in which a server may have been started anew
REST = 10  # a server that gives no answer comes last for so many times as long as it was waited for
PIECE = 2048  # tokens of the vocabulary that are compared at a time
REMEDY = "Look at its terminal; start it again, or raise --teacher_timeout"
TOKEN_BYTES = 160  # of JSON, at most, for one token and its log-prob


class TeacherError(RuntimeError):
    """A teacher's server gave no usable answer: which one, what was wrong, what to do."""


@dataclass
class Said:
    """Of each token but the first. top: tokens it finds likeliest, and their log-probs, likeliest first."""

    logprobs: list[float]  # [n]
    top_ids: Tensor  # [n, k] int64
    top_logprobs: Tensor  # [n, k]


@dataclass
class Server:
    url: str
    model: str = ""
    root: str | None = None  # the folder or hub id behind the name, if it tells
    probe: list[float] = field(default_factory=list)
    answered: float = 0.0  # when it last gave an answer, of time.monotonic
    rests: float = 0.0  # until then the others are asked first
    load: int = 0  # requests under way
    lock: threading.Lock = field(default_factory=threading.Lock)


class TeacherServers:
    """One or several servers of one teacher.

    model: its name there; None: the only one that is served. seconds: for one answer. token, ca, client_cert: as
    VLLMClient's. changes: its weights may change meanwhile (the policy's own server), so it is not known by a probe.
    """

    def __init__(
        self,
        urls: list[str],
        model: str | None = None,
        token: str | None = None,
        seconds: float = 120.0,
        ca: str | None = None,
        client_cert: str | None = None,
        changes: bool = False,
    ):
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self.model, self.token, self.seconds, self.tls, self.changes = model, token, seconds, (ca, client_cert), changes

    def connect(
        self, decode: Callable[[list[int]], str], vocab_size: int, window: int, top: int = 0, ready: float = 0.0
    ) -> None:
        """ConfigError unless every server serves one and the same model, by the policy's vocabulary.

        decode: of the policy's tokenizer, special tokens included. vocab_size: tokens it knows. window: most tokens of
        a prompt with its completion. top: likeliest tokens that will be asked for. ready: seconds in which a server
        that is not there yet may come.
        """
        end = time.monotonic() + ready
        for server in self.servers:
            try:
                self._wait(server, end, ready)
                self._check_window(server, window)
                self._check_vocabulary(server, decode, vocab_size)
                ids = [(7919 * n + 13) % vocab_size for n in range(PROBE)]
                server.probe = self._ask(server, ids, top, (), time.monotonic() + self.seconds).logprobs
                server.answered = time.monotonic()
            except (TeacherError, asking.NoAnswer) as error:
                remedies = {401: "TEACHER_TOKEN holds the secret", 400: f"--max-logprobs {top} there, or a smaller k"}
                remedy = remedies.get(getattr(error, "status", None))
                kind, advice = (ConfigError, f" ({remedy}).") if remedy else (NotNow, "")
                raise kind(f"--teacher_urls: {error}{advice}") from None
        self.probe_ids, first = ids, self.servers[0]
        for server in self.servers[1:]:
            if not self.changes and (apart := distance(server.probe, first.probe)) > ALIKE:
                raise ConfigError(
                    f"--teacher_urls: {first.url} serves {first.model} and {server.url} {server.model}, and log-probs "
                    f"of one text differ by {apart:.2g} on average; give servers of one teacher, or a single one."
                )

    async def score(self, ids: list[int], top: int = 0, images: list | None = None, expanded: list[int] = ()) -> Said:
        """What the teacher says of every token but the first; TeacherError if that is nothing usable, or late.

        images: base64 of files, in the order of their placeholders in `ids`, one each; expanded: `ids` as the
        trainer knows them, placeholders expanded."""
        call = asyncio.wrap_future(in_thread(self._score, ids, top, images or (), expanded))
        try:
            return await asyncio.wait_for(call, self.seconds + 5)  # past the limits within: a header, letter by letter
        except TimeoutError:
            where = " and ".join(asking.place(server.url) for server in self.servers)
            raise TeacherError(f"the teacher at {where} gave no answer within {self.seconds:g} s. {REMEDY}.") from None

    def _score(self, ids: list[int], top: int, images, expanded) -> Said:
        end, causes = time.monotonic() + self.seconds, []
        begun = time.monotonic()
        known = sorted(self.servers, key=lambda server: (server.rests > begun, server.load))
        for others, server in zip(reversed(range(len(known))), known, strict=True):
            now = time.monotonic()
            deadline = now + (end - now) / (others + 1)  # one that hangs leaves time to ask the others
            server.load += 1
            try:
                self._recognise(server, top, deadline, others)
                said = self._ask(server, ids, top, images, deadline, expanded)
                self._recognise(server, top, deadline)  # it may have been asked again and again, until it was back
                server.answered = time.monotonic()
                return said
            except asking.NoAnswer as error:
                server.answered, ended = 0.0, time.monotonic()
                causes.append(str(error).rstrip("."))
                if 0 < error.status < 500 and error.status not in asking.BUSY:
                    break  # the question is at fault: another server of the same model would say so, too
                if ended > server.rests:  # else another question has found that out
                    server.rests = ended + REST * (ended - now)
                    asking.warned(f"the teacher at {error}" + "; the next one is asked" * bool(others))
            finally:
                server.load -= 1
        raise TeacherError(f"the teacher gave no log-probs: {'; '.join(causes)}. {REMEDY} (now {self.seconds:g} s).")

    # ---- who is it --------------------------------------------------------------------------------------------------

    def _wait(self, server: Server, end: float, ready: float) -> None:
        """`_look`, once the server is there."""
        while True:
            try:
                return self._look(server, time.monotonic() + min(self.seconds, 30))
            except asking.NoAnswer as error:
                if not error.again:
                    raise
                if time.monotonic() > end:
                    raise TeacherError(
                        f"{error}. It was waited for {ready:g} s (--server_timeout). Is it started, at this address?"
                    ) from error
            time.sleep(0.5)

    def _look(self, server: Server, deadline: float) -> None:
        """Which model is served."""
        found = self._call(server, "GET", "/v1/models", deadline)
        try:
            cards = {card["id"]: card for card in found["data"]}
        except (KeyError, TypeError):
            raise TeacherError(f"{server.url} lists no models at /v1/models; give a vLLM server's address.") from None
        if self.model is not None and self.model not in cards:
            raise TeacherError(f"{server.url} serves {', '.join(cards)}, not --teacher_model={self.model}; give one.")
        if self.model is None and len(cards) != 1:
            raise TeacherError(
                f"{server.url} serves {', '.join(cards)}: say which is the teacher, --teacher_model NAME."
            )
        card = cards[self.model or next(iter(cards))]
        server.model, server.root, server.window = card["id"], card.get("root"), card.get("max_model_len")

    def _check_window(self, server: Server, window: int) -> None:
        if isinstance(server.window, int) and server.window < window + 1:
            raise TeacherError(
                f"{server.url} has a window of {server.window} tokens; prompt, completion and one more need "
                f"{window + 1} (--max_prompt_length + --max_completion_length + 1): --max-model-len {window + 1} there."
            )

    def _check_vocabulary(self, server: Server, decode: Callable, vocab_size: int) -> None:
        """Every token must read the same on both sides: the server's /detokenize against the policy's tokenizer."""

        def differs(ids: range) -> bool:
            body = {"model": server.model, "tokens": list(ids)}
            found = self._call(server, "POST", "/detokenize", time.monotonic() + self.seconds, body)
            return found.get("prompt") != decode(list(ids))

        for start in range(0, vocab_size, PIECE):
            ids = range(start, min(start + PIECE, vocab_size))
            if not differs(ids):
                continue
            while len(ids) > 1:  # which is the first?
                half = ids[: len(ids) // 2]
                ids = half if differs(half) else ids[len(ids) // 2 :]
            raise TeacherError(
                f"{server.url} ({server.model}) has another vocabulary: token {ids[0]} is {decode(list(ids))!r} for "
                "the policy and something else there, so its log-probs would be of other texts. Take a teacher of the "
                "policy's family, or train on a teacher's answers (supervised) first."
            )

    def _recognise(self, server: Server, top: int, deadline: float, others: int = 0) -> None:
        """TeacherError if the server may have been started anew, and serves another model now. others: that can be
        asked if this one gives no answer."""
        with server.lock:  # of many requests after a pause the first asks
            if others and server.rests > time.monotonic():  # in vain
                raise asking.NoAnswer(f"{asking.place(server.url)} has just given no answer to another question")
            if self.changes or time.monotonic() - server.answered < PAUSE:
                return
            before = server.model, server.root
            self._look(server, deadline)
            now = self._ask(server, self.probe_ids, top, (), deadline).logprobs
            if before != (server.model, server.root) or (apart := distance(now, server.probe)) > ALIKE:
                differs = f"it serves {server.root or server.model}, not {before[1] or before[0]}"
                if before == (server.model, server.root):
                    differs = f"log-probs of one text differ by {apart:.2g} nats on average from those at start"
                server.model, server.root = before
                raise TeacherError(
                    f"{server.url} is not the teacher that this run began with: {differs}. Start that one there, and "
                    "resume the run; or begin a new run with this teacher."
                )
            server.answered = time.monotonic()

    # ---- one question -----------------------------------------------------------------------------------------------

    def _call(self, server: Server, method: str, path: str, deadline: float, body=None, most=asking.MOST_BYTES) -> dict:
        left = max(deadline - time.monotonic(), 0.001)
        return asking.ask(method, server.url + path, left, body, self.token, *self.tls, most=most)

    def _ask(self, server: Server, ids, top: int, images, deadline: float, expanded=()) -> Said:
        most = asking.MOST_BYTES + TOKEN_BYTES * (top + 2) * max(len(ids), len(expanded))
        if images:
            body = {"prompt_ids": ids, "images": list(images), "max_tokens": 1, "prompt_logprobs": top}
            answer, ids = self._call(server, "POST", "/generate", deadline, body, most), list(expanded)
            seen, scored = answer.get("prompt_ids"), answer.get("prompt_logprobs")
        else:
            body = {"model": server.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": top}
            body |= {"temperature": 0, "return_token_ids": True}
            answer = self._call(server, "POST", "/v1/completions", deadline, body, most)
            if answer.get("model") != server.model:
                raise wrong(server, f"as {answer.get('model')!r:.80}, not as {server.model}")
            choices = answer.get("choices")
            choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
            seen, scored = choice.get("prompt_token_ids", ids), choice.get("prompt_logprobs")
        if seen != ids:
            count = len(seen) if isinstance(seen, list) else "no"
            raise wrong(server, f"about {count} tokens, other ones than the {len(ids)} that it was asked about")
        if not isinstance(scored, list) or len(scored) != len(ids):
            count = f"for {len(scored)} of {len(ids)} tokens" if isinstance(scored, list) else "without prompt_logprobs"
            raise wrong(server, count)
        return read(server, ids[1:], scored[1:], top)


def wrong(server: Server, what: str) -> TeacherError:
    return TeacherError(
        f"the teacher at {asking.place(server.url)} answered {what}; nothing of it is used. Is it a vLLM server, and "
        "no proxy that changes answers?"
    )


def read(server: Server, ids: list[int], scored: list, top: int) -> Said:
    """From vLLM's {token: {"logprob": number}} of each place: the token that stands there and the `top` likeliest.
    TeacherError for what is missing, no number, or above 0."""
    logprobs, likeliest = [], []
    for place, (token, given) in enumerate(zip(ids, scored, strict=True)):
        try:
            found = {int(name): one["logprob"] for name, one in given.items()}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise wrong(server, f"with {given!r:.80} for token {place + 1}") from None
        if bad := [p for p in found.values() if not (isinstance(p, (int, float)) and -math.inf < p <= ABOVE_ZERO)]:
            raise wrong(server, f"with the log-prob {bad[0]!r:.40} for token {place + 1}")
        if token not in found:
            raise wrong(server, f"without a log-prob of token {place + 1}, {token}")
        best = sorted(found, key=found.get, reverse=True)[:top]  # with the token itself it may be one more
        if len(best) < top:
            raise wrong(server, f"with {len(best)} likeliest tokens where {top} were asked for (its --max-logprobs?)")
        logprobs.append(float(found[token]))
        likeliest.append([(one, found[one]) for one in best])
    pairs = torch.tensor(likeliest, dtype=torch.float64).view(len(ids), top, 2)  # float64 holds any id
    return Said(logprobs, pairs[..., 0].long(), pairs[..., 1].float())


def distance(a: list[float], b: list[float]) -> float:
    """Mean absolute difference."""
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)
