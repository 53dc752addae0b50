"""What an agent sees of the model: a server on 127.0.0.1 with OpenAI's routes, which keeps the tokens of each answer.

    POST /v1/chat/completions     n = 1; tools, stop, max_tokens, stream, pictures as data: URLs
    GET  /v1/models

A key, sent as bearer token, is one conversation. Its calls form a tree: messages are compared with those that the
conversation has seen, and the longest exchange that they continue gives its token ids, as the generator saw and sampled
them. Only what is new behind it, such as a tool's result, is rendered and tokenised, with loss_mask 0. What was sampled
is never tokenised again, whatever blanks a client puts into a call's JSON.

    call 1   [system, user]                              -> a     row 1: [system user] a
    call 2   [system, user, a, tool]                     -> b     row 1: [system user] a [tool] b
    call 3   [other system, user]                        -> c     row 2: [other system user] c
    call 4   [system, user, a, tool]   (asked again)     -> d     row 3: [system user a tool] d
    call 5   [system, summary, user]   (compacted)       -> e     row 4: [system summary user] e

Messages that continue nothing, or not the end of a row, begin a further row of the same trajectory; so does a history
whose earlier thinking the chat template leaves out. In brackets is what has loss_mask 0: each answer is trained once.
Without the exchange - a history that the agent wrote anew - answers of the model in it are text like any other.

What would change the distribution that is sampled from, such as a temperature other than the run's, is not used, and
said once by name. What cannot be answered, such as n = 2 or logprobs, is refused as OpenAI does, by an error.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import math
import os
import re
import secrets
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field, replace

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from config import TrainConfig, shorten
from envs.turns import Exchange, answer_to, next_prompt, trajectory_of
from inputs.formats import FORMATS, THINKING, instructions, outside_thinking, parser_of, read_calls
from inputs.parts import parts_of
from inputs.prompts import SCHEMAS, drops_thinking, is_vision, own_kwargs, pattern_of, with_tools
from inputs.trajectory import Trajectory
from inputs.vision import Prompt, build_prompt
from safety.results import warn_once

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
MOST_TOKENS = ("max_completion_tokens", "max_tokens")
READ = {"messages", "model", "stream", "stream_options", "n", "tools", "tool_choice", "stop", *MOST_TOKENS}
NO_MATTER = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
UNANSWERED = {"logprobs", "top_logprobs", "functions", "function_call", "audio", "modalities", "prediction"}
AS_IT_IS = {"frequency_penalty": 0, "presence_penalty": 0, "response_format": {"type": "text"}, "tool_choice": "auto"}
AS_IT_IS |= {"parallel_tool_calls": True, "modalities": ["text"]}


class Refused(Exception):
    """A call that is answered with an error."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code

    def response(self) -> JSONResponse:
        error = {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}
        return JSONResponse({"error": error}, self.status)


@dataclass(eq=False)
class Answered(Exchange):
    """One call that was answered."""

    schemas: list[dict] | None = None  # of the tools that the chat template was given
    thinks: bool = False  # it, or one that it continues, has thinking
    row: list = field(default_factory=list)  # of exchanges, each of which continues the one before


class Conversation:
    """All calls with one key, on the event loop of the rollout, which samples."""

    def __init__(self, row: dict, generator, cfg: TrainConfig):
        self.row, self.generator, self.cfg = row, generator, replace(cfg, system_prompt=None)
        self.loop = asyncio.get_running_loop()
        self.rows: list[list[Answered]] = []
        self.known: dict[int, Answered] = {}  # by `keys_of` its messages, the answer included
        self.under_way: list[concurrent.futures.Future] = []  # calls, those that have ended included
        self.fault = self.loop.create_future()  # what is wrong with the generator, which no agent can mend
        self.template = own_kwargs(row)
        self.home: dict = {}  # the server that has what came before

    def fail(self, error: Exception) -> None:
        if not self.fault.done():
            self.fault.set_exception(error)

    # ---- a call ----------------------------------------------------------------------------------------------------

    async def ask(self, body: dict) -> dict:
        """The answer to a call, as OpenAI's API has it. Refused if it cannot be answered."""
        processor, cfg = self.generator.tokenizer, self.cfg
        try:
            check(body, cfg)
            messages, tools, stops = messages_of(body["messages"]), body.get("tools") or [], body.get("stop") or []
            stops = (*cfg.stop, *([stops] if isinstance(stops, str) else stops))
            keys = keys_of(messages, tools)
            prompt, schemas, before, new = self.context(messages, keys, tools)
            limit = cfg.max_prompt_length + cfg.max_completion_length
            room = limit - len(prompt.token_ids)
            asked = next((body[key] for key in MOST_TOKENS if body.get(key) is not None), limit)
            most = min(asked, max(room, 1), cfg.max_turn_length or limit)
        except Refused:
            raise
        except Exception as error:  # templates and decoders raise whatever they like at what they are given
            raise Refused(f"what this call asks cannot be shown to the model: {error!r:.500}") from error
        if room < 1:
            said = f"--max_prompt_length + --max_completion_length = {limit}"
            fault = f"this conversation has {len(prompt.token_ids)} tokens; the most are {said}"
            raise Refused(fault, code="context_length_exceeded")
        if most < 1:
            raise Refused(f"max_tokens is {asked}; give a number from 1 on")
        answer = await answer_to(prompt, most, self.generator, cfg, self.home, stops)
        # What follows has no await: calls that were made at the same time are entered one after another.
        sample, turn = answer.sample, answer.turn
        may_call = [] if body.get("tool_choice") == "none" else tools
        message, calls = read_answer(turn.get("begun", "") + turn["text"], may_call, parser_of(cfg), stops, processor)
        thinks = bool(message.get("reasoning_content")) or bool(before and before.thinks)
        events = [{"name": c.name, "call": f"{c.name} {c.arguments}", "failed": int(bool(c.error))} for c in calls]
        turn["info"] = {"calls": events, "tool_calls": [call.as_message() for call in calls if not call.error]}
        exchange = Answered(prompt, sample, turn, schemas=schemas, thinks=thinks)
        self.known[keys_of([message], tools, keys[-1])[-1]] = exchange
        if before and before.row[-1] is before:
            exchange.row = before.row
            exchange.row.append(exchange)
        else:
            exchange.row = [exchange]
            self.rows.append(exchange.row)
        if before:
            before.turn["observation"] = new
        finish = "tool_calls" if message.get("tool_calls") else sample.finish_reason
        return self.response(message, finish, prompt, sample)

    def context(self, messages: list[dict], keys: list[int], tools: list[dict]) -> tuple:
        """(what the model is to see, schemas that its template was given, the exchange that it continues or None, the
        messages that are new)"""
        processor, cfg = self.generator.tokenizer, self.cfg
        ends = [n for n in range(len(messages) - 1, 0, -1) if keys[n] in self.known]
        before, new = (self.known[keys[ends[0]]], messages[ends[0] :]) if ends else (None, messages)
        if not is_vision(processor) and any(part["type"] == "image" for m in new for part in parts_of(m["content"])):
            raise Refused("these messages have a picture, and the model takes none")
        forks = cfg.on_rewrite != "append" and before and before.thinks
        if before and not (forks and drops_thinking(new, processor, before.schemas, **self.template)):
            prompt = next_prompt(before, new, self.generator, cfg, before.schemas, **self.template)
            return prompt, before.schemas, before, new
        schemas = tools if cfg.tool_parser != "tags" else []  # else our own words say how to call
        told = instructions(tools, parser_of(cfg)) if tools else ""
        shown = with_tools(self.row | {"prompt": messages, SCHEMAS: []}, schemas, told, processor)
        return build_prompt(self.row, self.generator, cfg, shown, math.inf), shown[SCHEMAS], None, messages

    def response(self, message: dict, finish: str, prompt: Prompt, sample) -> dict:
        usage = {"prompt_tokens": len(prompt.token_ids), "completion_tokens": len(sample.token_ids)}
        usage["total_tokens"] = sum(usage.values())
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        whole = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time())}
        return whole | {"model": self.cfg.model_id, "choices": [choice], "usage": usage}

    # ---- what has come of it ---------------------------------------------------------------------------------------

    def trajectory(self, group: int = 0) -> Trajectory | None:
        """All rows so far as one Trajectory, each behind the one before; None before the first answer."""
        if not self.rows:
            return None
        trajectory = trajectory_of(self.row, group, [*map(list, self.rows)])
        trajectory.info["logged"] = [("agent/rows", len(self.rows)), ("agent/calls", trajectory.turns)]
        return trajectory


# ---- what a call says ------------------------------------------------------------------------------------------------


def check(body: dict, cfg: TrainConfig) -> None:
    """Refused for what cannot be answered; one line for each parameter that is not used."""
    model = body.get("model")
    if model != cfg.model_id:
        raise Refused(f"the model {shorten(model, 80)} does not exist; {cfg.model_id!r} does", 404, "model_not_found")
    plain = AS_IT_IS | {"temperature": cfg.temperature, "top_p": cfg.top_p or 1}
    given = {key: value for key, value in body.items() if value is not None and value != plain.get(key, ())}
    if wrong := sorted(key for key in UNANSWERED & given.keys() if given[key]) or ["n"] * (body.get("n", 1) != 1):
        raise Refused(f"{', '.join(wrong)}: this server does not answer with that; leave it out", code="unsupported")
    if given.get("tool_choice", "none") != "none":
        warn_once(f"--agent: tool_choice {shorten(given['tool_choice'], 60)} is taken for auto: nothing makes it call.")
    for key in sorted(given.keys() - READ - NO_MATTER):
        said = f"--agent: a call gave {key}={shorten(given[key], 60)}, which is not used"
        warn_once(f"{said}: it would change what is sampled from. Said once.", kind=f"agent's {key}")
    if not body.get("messages") or body["messages"][-1]["role"] == "assistant":
        raise Refused("`messages` must end with something to answer, not with the assistant's own message")


def messages_of(given: list[dict]) -> list[dict]:
    """OpenAI's messages as chat templates take them: arguments of calls are dicts, results have their tool's name."""
    names, messages = {}, []
    for m in given:
        if m["role"] not in ROLES:
            raise Refused(f"a message has the role {shorten(m['role'], 40)}; known are {', '.join(ROLES)}")
        content = m.get("content")
        content = content if isinstance(content, str) else parts_of(content) or ""
        message = {"role": ROLES[m["role"]], "content": content}
        if calls := m.get("tool_calls"):
            message["tool_calls"] = [called(call) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        if m["role"] == "assistant" and (thought := m.get("reasoning_content") or m.get("reasoning")):
            message["reasoning_content"] = thought
        if m["role"] == "tool":
            ident = m.get("tool_call_id")
            message |= {"tool_call_id": ident, "name": m.get("name") or names.get(ident, "")}
        messages.append(message)
    return messages


def called(call: dict) -> dict:
    function, arguments = call["function"], call["function"].get("arguments") or {}
    with contextlib.suppress(ValueError):  # what is no JSON stays text
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def keys_of(messages: list[dict], tools: list[dict], key: int | None = None) -> list[int]:
    """A number for each beginning of the messages, from none to all, by what every client says of them again: role,
    text, pictures, names and arguments of calls; not ids, thinking, the blanks of JSON. key: of what came before."""
    keys = [hash(json.dumps(tools, sort_keys=True, default=str)) if key is None else key]
    for message in messages:
        parts = parts_of(message.get("content"))
        text = "\n".join(part["text"] for part in parts if part["type"] == "text").strip()
        calls = [called(call)["function"] for call in message.get("tool_calls") or ()]
        said = json.dumps([[call["name"], call["arguments"]] for call in calls], sort_keys=True)
        shown = tuple(str(part.get("image")) for part in parts if part["type"] == "image")
        keys.append(hash((keys[-1], ROLES[message["role"]], text, said, shown)))
    return keys


# ---- what the model answered -----------------------------------------------------------------------------------------


def read_answer(said: str, tools: list[dict], parser: str, stops: tuple[str, ...], processor) -> tuple[dict, list]:
    """(the assistant's message: its thinking, text and calls apart; the calls, unreadable ones included). Calls of
    which none can be read stay text."""
    calls = read_calls(said, tools, parser) if tools else []
    good = [call.as_message()["function"] for call in calls if not call.error]
    thought, content = thinking(said)
    content = before_calls(content, parser) if good else content
    for stop in stops:
        content = content.partition(stop)[0]
    content = pattern_of(processor).sub("", content)
    message = {"role": "assistant", "content": content}
    if thought:
        message |= {"reasoning_content": thought, "reasoning": thought}  # its older name, and vLLM's newer one
    if good:
        made = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in good]
        ids = (f"call_{uuid.uuid4().hex[:24]}" for _ in made)
        message["tool_calls"] = [{"id": i, "type": "function", "function": f} for i, f in zip(ids, made, strict=True)]
        message["content"] = content.strip() or None
    return message, calls


def thinking(said: str) -> tuple[str, str]:
    """(thinking, what was said outside of it). What the length cut within its thinking has said nothing."""
    for begin, end in THINKING:
        head, closed, _ = said.partition(end)
        if closed and (begin in head or begin == "<think>"):
            return head.rpartition(begin)[2].strip(), outside_thinking(said).replace(end, "").lstrip("\n")
        if begin in said:
            return said.partition(begin)[2].strip(), said.partition(begin)[0]
    return "", said


def before_calls(text: str, parser: str) -> str:
    """What a turn says before its first call, as far as the format of calls tells where that begins."""
    how = FORMATS.get(parser)
    calls = how["fields"].get("tool_calls", {}) if isinstance(how, dict) else {}
    opening = calls.get("open_pattern") or re.escape(calls.get("open") or "")
    found = re.search(opening, text) if opening else None
    return text[: found.start()] if found else ""


def chunks(answer: dict, with_usage: bool):
    """The answer as server-sent events."""
    (choice,), usage = answer["choices"], answer["usage"]
    message = choice["message"]
    calls = [{"index": n} | call for n, call in enumerate(message.get("tool_calls") or ())]
    said = {key: value for key, value in message.items() if key != "tool_calls"}
    deltas = [({"role": "assistant", "content": ""}, None), (said | ({"tool_calls": calls} if calls else {}), None)]
    head = answer | {"object": "chat.completion.chunk", "usage": None}
    for delta, finish in [*deltas, ({}, choice["finish_reason"])]:
        one = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        yield f"data: {json.dumps(head | {'choices': [one]})}\n\n"
    if with_usage:
        yield f"data: {json.dumps(head | {'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


# ---- the server ------------------------------------------------------------------------------------------------------


class Recorder:
    """Serves all conversations of this process, from a thread of its own: the loop of a rollout may stand still."""

    def __init__(self):
        self.conversations: dict[str, Conversation] = {}
        routes = [Route("/v1/chat/completions", self.completions, methods=["POST"]), Route("/v1/models", self.models)]
        handlers = {404: self.nothing, 405: self.nothing}
        app = Starlette(routes=routes, exception_handlers=handlers)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_keep_alive=60))
        threading.Thread(target=server.run, args=([listener],), name="recorder of agents", daemon=True).start()

    def open(self, conversation: Conversation) -> str:
        """The conversation's key."""
        key = secrets.token_urlsafe(16)
        self.conversations[key] = conversation
        return key

    def close(self, key: str) -> None:
        """Calls that are under way end, later ones are refused."""
        conversation = self.conversations.pop(key)
        for asked in conversation.under_way:
            asked.cancel()
        if not conversation.fault.done():
            conversation.fault.cancel()

    def of(self, request: Request) -> Conversation:
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key not in self.conversations:
            fault = "no conversation has this key, or it has ended: give api_key as the agent was given it"
            raise Refused(fault, 401, "invalid_api_key")
        return self.conversations[key]

    async def completions(self, request: Request) -> Response:
        try:
            conversation = self.of(request)
            try:
                body = json.loads(await request.body())
            except (ValueError, RecursionError) as error:
                raise Refused(f"the body is no JSON: {error}") from None
            if not isinstance(body, dict):
                raise Refused("the body must be an object")
            # On the rollout's loop; a client that has gone is not answered, and what it asked for is not sampled.
            asked = asyncio.run_coroutine_threadsafe(conversation.ask(body), conversation.loop)
            conversation.under_way.append(asked)
            gone = asyncio.ensure_future(disconnected(request))
            answer = asyncio.wrap_future(asked)
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if not answer.done():
                asked.cancel()
                return Response(status_code=499)
            found = answer.result()
        except Refused as refused:
            return refused.response()
        except asyncio.CancelledError:  # the conversation was closed meanwhile
            return Refused("the conversation has ended", 401, "invalid_api_key").response()
        except Exception as error:  # the generator's, which ends the run; its own message is said there
            conversation.loop.call_soon_threadsafe(conversation.fail, error)
            return Refused(f"the trainer cannot sample: {error!r:.300}", 500).response()
        if not body.get("stream"):
            return JSONResponse(found)
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return StreamingResponse(chunks(found, with_usage), media_type="text/event-stream")

    async def models(self, request: Request) -> Response:
        try:
            model = self.of(request).cfg.model_id
        except Refused as refused:
            return refused.response()
        one = {"id": model, "object": "model", "created": 0, "owned_by": "trainer"}
        return JSONResponse({"object": "list", "data": [one]})

    async def nothing(self, request: Request, error: Exception) -> Response:
        served = "POST /v1/chat/completions and GET /v1/models"
        return Refused(f"{request.method} {request.url.path} is not served; {served} are", 404).response()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@functools.cache
def recorder() -> Recorder:
    """This process's, started at the first call."""
    return Recorder()
