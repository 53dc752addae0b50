"""The model for agents: a server on 127.0.0.1 with OpenAI's routes, which records the tokens of each answer.

    POST /v1/chat/completions     n = 1; tools, stop, max_tokens, stream, pictures as data: URLs
    GET  /v1/models

Each key, sent as bearer token, is a conversation, whose calls form a tree. The messages of a call are compared with
earlier ones, and if they continue an exchange, the longest one provides its token ids, as the generator saw and sampled
them. Only new messages after it, such as a tool's result, are rendered and tokenised, with loss_mask 0. Sampled tokens
are never tokenised again, whatever blanks a client puts into a call's JSON.

    call 1   [system, user]                              -> a     row 1: [system user] a
    call 2   [system, user, a, tool]                     -> b     row 1: [system user] a [tool] b
    call 3   [other system, user]                        -> c     row 2: [other system user] c
    call 4   [system, user, a, tool]   (asked again)     -> d     row 3: [system user a tool] d
    call 5   [system, summary, user]   (compacted)       -> e     row 4: [system summary user] e

Brackets have loss_mask 0: each answer is trained on once. Messages that continue no exchange, or one that is not the
end of a row, begin another row of the same trajectory; so does a history whose earlier thinking the chat template
removes. In a history that the agent rewrote, the model's answers are ordinary text.

Parameters that would change the sampling distribution, such as a temperature other than the run's, are not used; a
warning names each once. Requests that cannot be answered, such as n = 2 or logprobs, get an error in OpenAI's form.
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
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
UNSUPPORTED = {"logprobs", "top_logprobs", "functions", "function_call", "audio", "modalities", "prediction"}
DEFAULTS = {"frequency_penalty": 0, "presence_penalty": 0, "response_format": {"type": "text"}, "tool_choice": "auto"}
DEFAULTS |= {"parallel_tool_calls": True, "modalities": ["text"]}


class Refused(Exception):
    """An error that is the answer to a call."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code

    def response(self) -> JSONResponse:
        error = {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}
        return JSONResponse({"error": error}, self.status)


@dataclass(eq=False)
class AnsweredCall(Exchange):
    """A call with its answer."""

    schemas: list[dict] | None = None  # of the tools in the chat template
    thinks: bool = False  # whether it, or an exchange that it continues, has thinking
    row: list = field(default_factory=list)  # of exchanges, each of which continues the one before


class Conversation:
    """All calls with one key. They run on the event loop of the rollout, where sampling takes place."""

    def __init__(self, row: dict, generator, cfg: TrainConfig):
        self.row, self.generator, self.cfg = row, generator, replace(cfg, system_prompt=None)
        self.loop = asyncio.get_running_loop()
        self.rows: list[list[AnsweredCall]] = []
        self.known: dict[int, AnsweredCall] = {}  # by `keys_of` its messages, including the answer
        self.under_way: list[concurrent.futures.Future] = []  # calls, including those that have ended
        self.fault = self.loop.create_future()  # an error of the generator, which ends the rollout
        self.template = own_kwargs(row)
        self.home: dict = {}  # notes the server that has the earlier turns

    def fail(self, error: Exception) -> None:
        if not self.fault.done():
            self.fault.set_exception(error)

    # ---- a call ----------------------------------------------------------------------------------------------------

    async def ask(self, body: dict) -> dict:
        """The answer to a call, in the form of OpenAI's API. Refused if it cannot be answered."""
        processor, cfg = self.generator.tokenizer, self.cfg
        try:
            check(body, cfg)
            messages, tools, stops = messages_of(body["messages"]), body.get("tools") or [], body.get("stop") or []
            stops = (*cfg.stop, *([stops] if isinstance(stops, str) else stops))
            keys = keys_of(messages, tools)
            prompt, schemas, previous, new = self.context(messages, keys, tools)
            limit = cfg.max_prompt_length + cfg.max_completion_length
            room = limit - len(prompt.token_ids)
            requested = next((body[key] for key in MOST_TOKENS if body.get(key) is not None), limit)
            max_tokens = min(requested, max(room, 1), cfg.max_turn_length or limit)
        except Refused:
            raise
        except Exception as error:  # templates and decoders may raise anything
            raise Refused(f"the messages of this call cannot be shown to the model: {error!r:.500}") from error
        if room < 1:
            budget = f"--max_prompt_length + --max_completion_length = {limit}"
            fault = f"this conversation has {len(prompt.token_ids)} tokens; the most are {budget}"
            raise Refused(fault, code="context_length_exceeded")
        if max_tokens < 1:
            raise Refused(f"max_tokens is {requested}; give a number from 1 on")
        answer = await answer_to(prompt, max_tokens, self.generator, cfg, self.home, stops)
        # There is no await below, so that simultaneous calls are entered one after another.
        sample, turn = answer.sample, answer.turn
        may_call = [] if body.get("tool_choice") == "none" else tools
        message, calls = read_answer(turn.get("begun", "") + turn["text"], may_call, parser_of(cfg), stops, processor)
        thinks = bool(message.get("reasoning_content")) or bool(previous and previous.thinks)
        events = [{"name": c.name, "call": f"{c.name} {c.arguments}", "failed": int(bool(c.error))} for c in calls]
        turn["info"] = {"calls": events, "tool_calls": [call.as_message() for call in calls if not call.error]}
        exchange = AnsweredCall(prompt, sample, turn, schemas=schemas, thinks=thinks)
        self.known[keys_of([message], tools, keys[-1])[-1]] = exchange
        if previous and previous.row[-1] is previous:
            exchange.row = previous.row
            exchange.row.append(exchange)
        else:
            exchange.row = [exchange]
            self.rows.append(exchange.row)
        if previous:
            previous.turn["observation"] = new
        finish = "tool_calls" if message.get("tool_calls") else sample.finish_reason
        return self.response(message, finish, prompt, sample)

    def context(self, messages: list[dict], keys: list[int], tools: list[dict]) -> tuple:
        """(prompt of the model, schemas in its template, the exchange that it continues or None, the new messages)"""
        processor, cfg = self.generator.tokenizer, self.cfg
        ends = [n for n in range(len(messages) - 1, 0, -1) if keys[n] in self.known]
        previous, new = (self.known[keys[ends[0]]], messages[ends[0] :]) if ends else (None, messages)
        if not is_vision(processor) and any(part["type"] == "image" for m in new for part in parts_of(m["content"])):
            raise Refused("these messages have a picture, and the model takes none")
        forks = cfg.on_rewrite != "append" and previous and previous.thinks
        if previous and not (forks and drops_thinking(new, processor, previous.schemas, **self.template)):
            prompt = next_prompt(previous, new, self.generator, cfg, previous.schemas, **self.template)
            return prompt, previous.schemas, previous, new
        schemas = tools if cfg.tool_parser != "tags" else []  # for tags, our own instructions explain them
        own_instructions = instructions(tools, parser_of(cfg)) if tools else ""
        prompt_row = with_tools(self.row | {"prompt": messages, SCHEMAS: []}, schemas, own_instructions, processor)
        return build_prompt(self.row, self.generator, cfg, prompt_row, math.inf), prompt_row[SCHEMAS], None, messages

    def response(self, message: dict, finish: str, prompt: Prompt, sample) -> dict:
        usage = {"prompt_tokens": len(prompt.token_ids), "completion_tokens": len(sample.token_ids)}
        usage["total_tokens"] = sum(usage.values())
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time())}
        return head | {"model": self.cfg.model_id, "choices": [choice], "usage": usage}

    # ---- the result ------------------------------------------------------------------------------------------------

    def trajectory(self, group: int = 0) -> Trajectory | None:
        """All rows so far, concatenated, as one Trajectory; None before the first answer."""
        if not self.rows:
            return None
        trajectory = trajectory_of(self.row, group, [*map(list, self.rows)])
        trajectory.info["logged"] = [("agent/rows", len(self.rows)), ("agent/calls", trajectory.turns)]
        return trajectory


# ---- reading a call --------------------------------------------------------------------------------------------------


def check(body: dict, cfg: TrainConfig) -> None:
    """Refused if the call cannot be answered; a warning for each parameter that is not used."""
    model = body.get("model")
    if model != cfg.model_id:
        raise Refused(f"the model {shorten(model, 80)} does not exist; {cfg.model_id!r} does", 404, "model_not_found")
    defaults = DEFAULTS | {"temperature": cfg.temperature, "top_p": cfg.top_p or 1}
    changes = {key: value for key, value in body.items() if value is not None and value != defaults.get(key, ())}
    if faults := sorted(key for key in UNSUPPORTED & changes.keys() if changes[key]) or ["n"] * (body.get("n", 1) != 1):
        raise Refused(f"{', '.join(faults)}: this server does not answer with that; leave it out", code="unsupported")
    if changes.get("tool_choice", "none") != "none":
        warn_once(f"--agent: tool_choice {shorten(changes['tool_choice'], 60)} is treated as auto: no call is forced.")
    for key in sorted(changes.keys() - READ - IGNORED):
        notice = f"--agent: a call gave {key}={shorten(changes[key], 60)}, which is not used"
        warn_once(f"{notice}: it would change the sampling distribution. Said once.", kind=f"agent's {key}")
    if not body.get("messages") or body["messages"][-1]["role"] == "assistant":
        raise Refused("`messages` must end with something to answer, not with the assistant's own message")


def messages_of(openai_messages: list[dict]) -> list[dict]:
    """OpenAI's messages in the form of chat templates: arguments of calls are dicts, results have their tool's name."""
    names, messages = {}, []
    for m in openai_messages:
        if m["role"] not in ROLES:
            raise Refused(f"a message has the role {shorten(m['role'], 40)}; known are {', '.join(ROLES)}")
        content = m.get("content")
        content = content if isinstance(content, str) else parts_of(content) or ""
        message = {"role": ROLES[m["role"]], "content": content}
        if calls := m.get("tool_calls"):
            message["tool_calls"] = [parsed_call(call) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        if m["role"] == "assistant" and (reasoning := m.get("reasoning_content") or m.get("reasoning")):
            message["reasoning_content"] = reasoning
        if m["role"] == "tool":
            call_id = m.get("tool_call_id")
            message |= {"tool_call_id": call_id, "name": m.get("name") or names.get(call_id, "")}
        messages.append(message)
    return messages


def parsed_call(call: dict) -> dict:
    function, arguments = call["function"], call["function"].get("arguments") or {}
    with contextlib.suppress(ValueError):  # other text stays text
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def keys_of(messages: list[dict], tools: list[dict], key: int | None = None) -> list[int]:
    """A hash of each beginning of the messages, from none to all, by what all clients repeat: role, text, pictures,
    names and arguments of calls; not ids, thinking, or the blanks of JSON. key: the hash of preceding messages."""
    keys = [hash(json.dumps(tools, sort_keys=True, default=str)) if key is None else key]
    for message in messages:
        parts = parts_of(message.get("content"))
        text = "\n".join(part["text"] for part in parts if part["type"] == "text").strip()
        calls = [parsed_call(call)["function"] for call in message.get("tool_calls") or ()]
        calls_text = json.dumps([[call["name"], call["arguments"]] for call in calls], sort_keys=True)
        images = tuple(str(part.get("image")) for part in parts if part["type"] == "image")
        keys.append(hash((keys[-1], ROLES[message["role"]], text, calls_text, images)))
    return keys


# ---- the answer ------------------------------------------------------------------------------------------------------


def read_answer(text: str, tools: list[dict], parser: str, stops: tuple[str, ...], processor) -> tuple[dict, list]:
    """(the assistant's message, with thinking, text and calls as separate fields; all calls, including unreadable
    ones). If no call can be read, calls stay text."""
    calls = read_calls(text, tools, parser) if tools else []
    readable = [call.as_message()["function"] for call in calls if not call.error]
    reasoning, content = thinking(text)
    content = before_calls(content, parser) if readable else content
    for stop in stops:
        content = content.partition(stop)[0]
    content = pattern_of(processor).sub("", content)
    message = {"role": "assistant", "content": content}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}  # the older name, and vLLM's newer one
    if readable:
        items = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in readable]
        ids = (f"call_{uuid.uuid4().hex[:24]}" for _ in items)
        message["tool_calls"] = [{"id": i, "type": "function", "function": f} for i, f in zip(ids, items, strict=True)]
        message["content"] = content.strip() or None
    return message, calls


def thinking(text: str) -> tuple[str, str]:
    """(thinking, text outside it). An answer that was cut within its thinking has no text after it."""
    for begin, end in THINKING:
        head, tag, _ = text.partition(end)
        if tag and (begin in head or begin == "<think>"):
            return head.rpartition(begin)[2].strip(), outside_thinking(text).replace(end, "").lstrip("\n")
        if begin in text:
            return text.partition(begin)[2].strip(), text.partition(begin)[0]
    return "", text


def before_calls(text: str, parser: str) -> str:
    """A turn's text before its first call; "" if the format does not tell where calls begin."""
    format = FORMATS.get(parser)
    calls = format["fields"].get("tool_calls", {}) if isinstance(format, dict) else {}
    opening = calls.get("open_pattern") or re.escape(calls.get("open") or "")
    match = re.search(opening, text) if opening else None
    return text[: match.start()] if match else ""


def chunks(answer: dict, with_usage: bool):
    """The answer as server-sent events."""
    (choice,), usage = answer["choices"], answer["usage"]
    message = choice["message"]
    calls = [{"index": n} | call for n, call in enumerate(message.get("tool_calls") or ())]
    fields = {key: value for key, value in message.items() if key != "tool_calls"}
    deltas = [({"role": "assistant", "content": ""}, None), (fields | ({"tool_calls": calls} if calls else {}), None)]
    head = answer | {"object": "chat.completion.chunk", "usage": None}
    for delta, finish in [*deltas, ({}, choice["finish_reason"])]:
        chunk_choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        yield f"data: {json.dumps(head | {'choices': [chunk_choice]})}\n\n"
    if with_usage:
        yield f"data: {json.dumps(head | {'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


# ---- the server ------------------------------------------------------------------------------------------------------


class Recorder:
    """Serves all conversations of this process, from its own thread, since a rollout's loop may be blocked."""

    def __init__(self):
        self.conversations: dict[str, Conversation] = {}
        routes = [Route("/v1/chat/completions", self.completions, methods=["POST"]), Route("/v1/models", self.models)]
        handlers = {404: self.nothing, 405: self.nothing, Refused: lambda request, error: error.response()}
        app = Starlette(routes=routes, exception_handlers=handlers)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        for name in ("NO_PROXY", "no_proxy"):
            os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", timeout_keep_alive=60))
        threading.Thread(target=server.run, args=([listener],), name="recorder of agents", daemon=True).start()

    def open(self, conversation: Conversation) -> str:
        """Register a conversation; returns its key."""
        key = secrets.token_urlsafe(16)
        self.conversations[key] = conversation
        return key

    def close(self, key: str) -> None:
        """Cancel the conversation's calls under way; later ones will be refused."""
        conversation = self.conversations.pop(key)
        for call in conversation.under_way:
            call.cancel()
        if not conversation.fault.done():
            conversation.fault.cancel()

    def of(self, request: Request) -> Conversation:
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key not in self.conversations:
            fault = "no conversation has this key, or it has ended: use the api_key that the agent was given"
            raise Refused(fault, 401, "invalid_api_key")
        return self.conversations[key]

    async def completions(self, request: Request) -> Response:
        try:
            conversation = self.of(request)
            try:
                body = dict(json.loads(await request.body()))
            except (TypeError, ValueError, RecursionError) as error:
                raise Refused(f"the body is no JSON object: {error}") from None
            # Sampling runs on the rollout's loop, and is cancelled if the client disconnects.
            call = asyncio.run_coroutine_threadsafe(conversation.ask(body), conversation.loop)
            conversation.under_way.append(call)
            hangup = asyncio.ensure_future(disconnected(request))
            answer = asyncio.wrap_future(call)
            await asyncio.wait({answer, hangup}, return_when=asyncio.FIRST_COMPLETED)
            hangup.cancel()
            if not answer.done():
                call.cancel()
                return Response(status_code=499)
            result = answer.result()
        except Refused as refused:
            return refused.response()
        except asyncio.CancelledError:  # the conversation was closed meanwhile
            return Refused("the conversation has ended", 401, "invalid_api_key").response()
        except Exception as error:  # the generator's: it ends the run, with its own message
            conversation.loop.call_soon_threadsafe(conversation.fail, error)
            return Refused(f"the trainer cannot sample: {error!r:.300}", 500).response()
        if not body.get("stream"):
            return JSONResponse(result)
        with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        return StreamingResponse(chunks(result, with_usage), media_type="text/event-stream")

    async def models(self, request: Request) -> Response:
        card = {"id": self.of(request).cfg.model_id, "object": "model", "created": 0, "owned_by": "trainer"}
        return JSONResponse({"object": "list", "data": [card]})

    async def nothing(self, request: Request, error: Exception) -> Response:
        routes = "POST /v1/chat/completions and GET /v1/models"
        return Refused(f"{request.method} {request.url.path} is not served; {routes} are", 404).response()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@functools.cache
def recorder() -> Recorder:
    """This process's Recorder, started at the first call."""
    return Recorder()
