"""Several turns, token in, token out: sampled tokens are never decoded and tokenised again.

play            the model and an environment, or tools, take turns; it is made of
answer_to       sample the model's next turn, an Exchange
next_prompt     the prompt of the turn after it
trajectory_of   exchanges, also those of an agent (agentic/recorder.py), as a Trajectory
"""

import functools
import math
from dataclasses import dataclass

from config import TrainConfig
from envs.base import ToolEnvironment, call_environment, checked_step, reset, state_of
from inputs.formats import outside_thinking
from inputs.prompts import SCHEMAS, begun_in, drops_thinking, own_kwargs, with_tools
from inputs.trajectory import (
    Completion,
    Trajectory,
    TrajectoryError,
    calls_in,
    end_to_end,
    joined_experts,
    sampling_options,
    spans_of,
)
from inputs.vision import Prompt, build_prompt, check_echo, continued_prompt, prompt_with


@dataclass(eq=False)
class Exchange:
    """A prompt of the model and its answer."""

    prompt: Prompt
    sample: Completion
    turn: dict  # its text, `begun` (the beginning of its text that the prompt contains), reward, observation ...
    state: object = None  # the environment's state before the turn


async def play(row: dict, group: int, environment, generator, cfg: TrainConfig) -> Trajectory:
    """One trajectory. It ends when the environment is done, a turn is cut by its length, max_turns are over, or the
    environment's answer does not fit; that answer is then left out, text and images. TrajectoryError if the environment
    fails."""
    processor = generator.tokenizer
    messages = await reset(environment, row, cfg, processor)
    model_row, schemas = shown_to_model(prompt_row, row, row, messages, environment, processor, cfg)
    kwargs = own_kwargs(row)
    following, drops = functools.partial(next_prompt, **kwargs), functools.partial(drops_thinking, **kwargs)
    prompt = build_prompt(row, generator, cfg, model_row)
    contexts, turns, finish = [[]], [], "stop"  # a context: exchanges, each of which continues the one before
    limit, thinks = len(prompt.token_ids) + cfg.max_completion_length, False
    server_memo: dict = {}  # the server that has the turns so far
    state = await state_of(environment, row, cfg)
    max_length = None if isinstance(environment, ToolEnvironment) else cfg.max_tool_result  # tools' are cut already
    for number in range(cfg.max_turns):
        room = limit - len(prompt.token_ids)
        exchange = await answer_to(prompt, min(room, cfg.max_turn_length or room), generator, cfg, server_memo)
        exchange.state, turn = state, exchange.turn
        contexts[-1].append(exchange)
        turns.append(turn)
        turn |= {"info": {"calls": []} if environment.tools else {}} | ({} if state is None else {"state": str(state)})
        if exchange.sample.finish_reason != "stop":
            finish = "length"
            break
        opening = turn.get("begun", "")
        if isinstance(environment, ToolEnvironment):
            environment.begun = opening
        outcome = await call_environment(environment, "step", row, cfg, text=turn["text"])
        answers, turn["reward"], done, turn["info"] = checked_step(outcome, environment, processor, max_length)
        if done or number + 1 == cfg.max_turns:
            break
        state = await state_of(environment, row, cfg)
        thinks = thinks or outside_thinking(opening + turn["text"]) != opening + turn["text"]
        forks = thinks and cfg.on_rewrite == "fork" and shown_to_model(drops, row, answers, processor, schemas)
        if forks:  # the template renders the whole chat as a new context
            full_row = model_row | {"prompt": [*model_row["prompt"], *chat_of(turns), *answers]}
            prompt = build_prompt(row, generator, cfg, full_row, math.inf)
            limit = cfg.max_prompt_length + cfg.max_completion_length
        else:
            prompt = shown_to_model(following, row, exchange, answers, generator, cfg, schemas)
        if len(prompt.token_ids) >= limit:
            finish = "length"
            break
        turn["observation"] = answers
        contexts += [[]] if forks else []
    score = await add_score(environment, turns, row, cfg)
    trajectory = trajectory_of(row, group, contexts)
    trajectory.finish_reason = finish
    trajectory.info |= score | {"shown": model_row["prompt"], "messages": sum(map(messages_of, turns), [])}
    if cfg.env:  # for rewards that take it, as TRL's take `environments`
        trajectory.info["object"] = getattr(environment, "inner", environment)
    return trajectory


def prompt_row(row: dict, messages: list[dict], environment, processor, cfg: TrainConfig) -> tuple[dict, list[dict]]:
    """(the row with the prompt of its environment, schemas of the environment's tools for the chat template)"""
    # Chat templates do not ask for calls in plain tags; the environment's instructions do.
    schemas = [tool.schema() for tool in environment.tools.values() if cfg.tool_parser != "tags"]
    row = row | {"prompt": messages, SCHEMAS: []}
    return with_tools(row, schemas, environment.instructions, processor, cfg.system_prompt), schemas


def shown_to_model(function, row: dict, *arguments):
    """function(*arguments), which turns an environment's messages into a prompt. Templates and image decoders may raise
    anything at these messages; as TrajectoryError it costs only this trajectory."""
    try:
        return function(*arguments)
    except Exception as error:
        raise TrajectoryError(f"what the environment gave cannot be shown to the model: {error!r:.500}", row) from error


async def answer_to(prompt: Prompt, limit: int, generator, cfg: TrainConfig, home=None, stops=None) -> Exchange:
    """Sample the model's next turn, of at most `limit` tokens; TrajectoryError if there is room for none. home: a dict
    in which the client notes the server that has the earlier turns in its cache. stops: strings that end the turn;
    None: --stop."""
    if limit < 1:
        raise TrajectoryError("a prompt leaves no room for an answer; raise --max_completion_length")
    processor, stops = generator.tokenizer, cfg.stop if stops is None else stops
    options = sampling_options(cfg) | {"max_tokens": limit, "min_tokens": min(cfg.min_completion_length, limit)}
    options |= {"stop": tuple(stops)} if stops else {}
    images = dict(images=prompt.images, expanded=prompt) if prompt.images else {}
    home = {} if home is None else home
    (sample,) = await generator.generate(prompt.sent_ids, n=1, home=home, **images, **options)
    check_echo(prompt, [sample])
    text = processor.decode(sample.token_ids)  # special tokens, too
    if sample.finish_reason == "stop" and not any(stop in text for stop in stops):
        text = processor.decode(sample.token_ids[:-1])  # without the end-of-turn token
    turn = {"text": text, "reward": 0.0, "observation": None, "info": {}, "tokens": len(sample.token_ids)}
    opening = begun_in(prompt.token_ids, processor, cfg)
    return Exchange(prompt, sample, turn | ({"begun": opening} if opening else {}))


def next_prompt(exchange: Exchange, messages: list[dict], generator, cfg: TrainConfig, schemas=None, **args) -> Prompt:
    """The prompt after this exchange: its tokens unchanged, then these messages. schemas, args: the tools and
    settings with which the chat template rendered the prompt."""
    seen = continued_prompt(exchange.prompt, exchange.sample.token_ids)
    return prompt_with(seen, messages, generator, schemas, cfg, **args)


def trajectory_of(row: dict, group: int, contexts: list[list[Exchange]]) -> Trajectory:
    """All tokens seen and sampled, one context after the other; within a context an exchange continues the one before.
    Every turn gets its `start` and `end` among the trajectory's tokens."""
    prompt, ids, mask, logprobs, states = contexts[0][0].prompt, [], [], [], []
    restarts, inputs, turns, experts, spans = [], [], [], [], []
    for number, exchanges in enumerate(contexts):
        num_seen, routed = 0 if number else len(prompt.token_ids), None
        restarts += [len(ids)] if number else []
        for exchange in exchanges:
            sample, new = exchange.sample, exchange.prompt.token_ids[num_seen:]
            start = len(ids) + len(new)
            spans += spans_of(sample, start)
            ids += new + sample.token_ids
            mask += [0] * len(new) + [1] * len(sample.token_ids)
            logprobs += [0.0] * len(new) + sample.logprobs
            states += [None] * len(new) + [exchange.state] * len(sample.token_ids)
            num_seen = len(exchange.prompt.token_ids) + len(sample.token_ids)
            turns.append(exchange.turn | {"start": start, "end": len(ids)})
            routed = joined_experts(routed, sample)
        experts.append(routed)
        # Without images beyond the prompt's, members of a group hold the same tensors: they can share the prompt.
        first, last = exchanges[0].prompt, exchanges[-1].prompt
        inputs.append((last if len(last.images) > len(first.images) else first).model_inputs)
    sent = [*last.sent_ids[len(prompt.sent_ids) :], *sample.token_ids]  # for a teacher, in a server's form
    info = {"completion": turns[-1]["text"], "turns": turns, "spans": spans, "model_inputs": inputs[0]}
    info |= {"routed_experts": end_to_end(experts), "sent": (prompt.sent_ids, sent, len(prompt.images))}
    info |= {"restarts": restarts, "restart_inputs": inputs[1:]}
    info |= {"states": states} if any(state is not None for state in states) else {}
    return Trajectory(
        row=row,
        group=group,
        prompt_ids=prompt.token_ids,
        token_ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        images=max((exchanges[-1].prompt.images for exchanges in contexts), key=len),
        finish_reason=sample.finish_reason,
        turns=len(turns),
        policy_version=min(version for version, _, _ in spans),
        policy_version_last=max(version for version, _, _ in spans),
        info=info,
    )


async def add_score(environment, turns: list[dict], row: dict, cfg: TrainConfig) -> dict:
    """Add the environment's score() to the last turn's reward. Returns {"metrics": its metrics(), "unscored": whether
    no reward applies, since score() was None and no turn had a reward}."""
    score = await call_environment(environment, "score", row, cfg)
    metrics = await call_environment(environment, "metrics", row, cfg)
    turns[-1]["reward"] += score or 0.0
    return {"metrics": metrics, "unscored": score is None and not any(turn["reward"] for turn in turns)}


def chat_of(turns: list[dict]) -> list[dict]:
    """Turns as messages for a chat template, with tool calls as part of their text."""
    messages: list[dict] = []
    for turn in turns:
        answer = {"role": "assistant", "content": turn.get("begun", "") + turn["text"]}
        messages += [answer, *(turn["observation"] or ())]
    return messages


def messages_of(turn: dict) -> list[dict]:
    """A turn as rewards see it: the assistant's message, with parsed `tool_calls` as in TRL and OpenAI's API, then the
    messages that answer it. (In tokenised messages calls are part of the text alone.) `begun` is the beginning of the
    message's content that the prompt contains."""
    answer, *replies = chat_of([turn])
    answer |= {"begun": turn["begun"]} if turn.get("begun") else {}
    calls = turn["info"].get("tool_calls") if calls_in(turn["info"]) else None
    return [answer | ({"tool_calls": calls} if calls else {}), *replies]
