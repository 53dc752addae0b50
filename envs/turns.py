"""Several turns, token in, token out: what was sampled is never decoded and tokenised again.

play            the model and an environment, or tools, by turns; made of
answer_to       the model's next turn, an Exchange
next_prompt     what it sees then
trajectory_of   what has come of any exchanges between a model and what answers it; agents' too (agentic/recorder.py)
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
    joined,
    sampling_options,
    spans_of,
)
from inputs.vision import Prompt, build_prompt, check_echo, continued, observed


@dataclass(eq=False)
class Exchange:
    """What the model saw, and what it answered."""

    prompt: Prompt
    sample: Completion
    turn: dict  # what is kept of it: the text; what the prompt had `begun` it with; reward, observation ...
    state: object = None  # the environment's, before it


async def play(row: dict, group: int, environment, generator, cfg: TrainConfig) -> Trajectory:
    """One trajectory. It ends when the environment is done, a turn is cut by its length, max_turns are over, or the
    environment's answer does not fit: it is then left out altogether, text and images together. TrajectoryError if the
    environment fails."""
    processor = generator.tokenizer
    messages = await reset(environment, row, cfg, processor)
    shown, schemas = shown_to_model(begun, row, row, messages, environment, processor, cfg)
    given = own_kwargs(row)
    following, drops = functools.partial(next_prompt, **given), functools.partial(drops_thinking, **given)
    prompt = build_prompt(row, generator, cfg, shown)
    contexts, turns, finish = [[]], [], "stop"  # lists of exchanges, each of which continues the one before
    limit, thinks = len(prompt.token_ids) + cfg.max_completion_length, False
    home: dict = {}  # the server that has the turns so far
    state = await state_of(environment, row, cfg)
    most = None if isinstance(environment, ToolEnvironment) else cfg.max_tool_result  # tools' are cut already
    for number in range(cfg.max_turns):
        room = limit - len(prompt.token_ids)
        exchange = await answer_to(prompt, min(room, cfg.max_turn_length or room), generator, cfg, home)
        exchange.state, turn = state, exchange.turn
        contexts[-1].append(exchange)
        turns.append(turn)
        turn |= {"info": {"calls": []} if environment.tools else {}} | ({} if state is None else {"state": str(state)})
        if exchange.sample.finish_reason != "stop":
            finish = "length"
            break
        opened = turn.get("begun", "")
        if isinstance(environment, ToolEnvironment):
            environment.begun = opened
        outcome = await call_environment(environment, "step", row, cfg, text=turn["text"])
        answers, turn["reward"], done, turn["info"] = checked_step(outcome, environment, processor, most)
        if done or number + 1 == cfg.max_turns:
            break
        state = await state_of(environment, row, cfg)
        thinks = thinks or outside_thinking(opened + turn["text"]) != opened + turn["text"]
        forks = thinks and cfg.on_rewrite == "fork" and shown_to_model(drops, row, answers, processor, schemas)
        if forks:  # what the template makes of it all is another context, and a row of its own
            whole = shown | {"prompt": [*shown["prompt"], *said_in(turns), *answers]}
            prompt = build_prompt(row, generator, cfg, whole, math.inf)
            limit = cfg.max_prompt_length + cfg.max_completion_length
        else:
            prompt = shown_to_model(following, row, exchange, answers, generator, cfg, schemas)
        if len(prompt.token_ids) >= limit:
            finish = "length"
            break
        turn["observation"] = answers
        contexts += [[]] if forks else []
    scored = await judged(environment, turns, row, cfg)
    trajectory = trajectory_of(row, group, contexts)
    trajectory.finish_reason = finish
    trajectory.info |= scored | {"shown": shown["prompt"], "messages": sum(map(messages_of, turns), [])}
    if cfg.env:  # rewards may ask for it, as TRL's do for `environments`
        trajectory.info["object"] = getattr(environment, "inner", environment)
    return trajectory


def begun(row: dict, messages: list[dict], environment, processor, cfg: TrainConfig) -> tuple[dict, list[dict]]:
    """(the row with the prompt that its environment made of it, schemas of its tools for the chat template)"""
    # No chat template asks for plain tags: the environment's own words do.
    schemas = [tool.schema() for tool in environment.tools.values() if cfg.tool_parser != "tags"]
    row = row | {"prompt": messages, SCHEMAS: []}
    return with_tools(row, schemas, environment.instructions, processor, cfg.system_prompt), schemas


def shown_to_model(function, row: dict, *arguments):
    """What `function` makes token ids of. Templates and image decoders raise whatever they like at what an environment
    gave them, and that is this trajectory's fault alone."""
    try:
        return function(*arguments)
    except Exception as error:
        raise TrajectoryError(f"what the environment gave cannot be shown to the model: {error!r:.500}", row) from error


async def answer_to(prompt: Prompt, most: int, generator, cfg: TrainConfig, home=None, stops=None) -> Exchange:
    """The model's next turn, of at most `most` tokens. home: a dict, in which the server is kept that has the turns so
    far. stops: strings that end it; None: --stop."""
    processor, stops = generator.tokenizer, cfg.stop if stops is None else stops
    options = sampling_options(cfg) | {"max_tokens": most, "min_tokens": min(cfg.min_completion_length, most)}
    options |= {"stop": tuple(stops)} if stops else {}
    images = dict(images=prompt.images, expanded=prompt) if prompt.images else {}
    home = {} if home is None else home
    (sample,) = await generator.generate(prompt.sent_ids, n=1, home=home, **images, **options)
    check_echo(prompt, [sample])
    text = processor.decode(sample.token_ids)  # special tokens, too
    if sample.finish_reason == "stop" and not any(stop in text for stop in stops):
        text = processor.decode(sample.token_ids[:-1])  # without the token that ends a turn
    turn = {"text": text, "reward": 0.0, "observation": None, "info": {}, "tokens": len(sample.token_ids)}
    opened = begun_in(prompt.token_ids, processor, cfg)
    return Exchange(prompt, sample, turn | ({"begun": opened} if opened else {}))


def next_prompt(exchange: Exchange, messages: list[dict], generator, cfg: TrainConfig, schemas=None, **how) -> Prompt:
    """What the model sees next: the exchange as it was, token by token, and behind it these messages. schemas, how: the
    tools and settings that the chat template was given with the prompt."""
    return observed(continued(exchange.prompt, exchange.sample.token_ids), messages, generator, schemas, cfg, **how)


def trajectory_of(row: dict, group: int, contexts: list[list[Exchange]]) -> Trajectory:
    """All that was seen and sampled, one context behind the other; in each an exchange continues the one before. Every
    turn gets its `start` and `end` among the trajectory's tokens."""
    prompt, ids, mask, logprobs, states = contexts[0][0].prompt, [], [], [], []
    restarts, inputs, turns, experts, spans = [], [], [], [], []
    for number, exchanges in enumerate(contexts):
        seen, routed = 0 if number else len(prompt.token_ids), None
        restarts += [len(ids)] if number else []
        for one in exchanges:
            sample, new = one.sample, one.prompt.token_ids[seen:]
            start = len(ids) + len(new)
            spans += spans_of(sample, start)
            ids += new + sample.token_ids
            mask += [0] * len(new) + [1] * len(sample.token_ids)
            logprobs += [0.0] * len(new) + sample.logprobs
            states += [None] * len(new) + [one.state] * len(sample.token_ids)
            seen = len(one.prompt.token_ids) + len(sample.token_ids)
            turns.append(one.turn | {"start": start, "end": len(ids)})
            routed = joined(routed, sample)
        experts.append(routed)
        # Members of a group whose images are the prompt's alone hold the same tensors: they can share the prompt.
        first, last = exchanges[0].prompt, exchanges[-1].prompt
        inputs.append((last if len(last.images) > len(first.images) else first).model_inputs)
    sent = [*last.sent_ids[len(prompt.sent_ids) :], *sample.token_ids]  # for a teacher: as a server takes them
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
        token_rewards=[0.0] * len(ids),
        images=max((exchanges[-1].prompt.images for exchanges in contexts), key=len),
        finish_reason=sample.finish_reason,
        turns=len(turns),
        policy_version=min(version for version, _, _ in spans),
        policy_version_last=max(version for version, _, _ in spans),
        info=info,
    )


async def judged(environment, turns: list[dict], row: dict, cfg: TrainConfig) -> dict:
    """Adds the environment's score() to the last turn's reward; {"metrics": its metrics(), "unscored": whether its
    score() was None and no turn had a reward: then no reward applies}."""
    score = await call_environment(environment, "score", row, cfg)
    metrics = await call_environment(environment, "metrics", row, cfg)
    turns[-1]["reward"] += score or 0.0
    return {"metrics": metrics, "unscored": score is None and not any(turn["reward"] for turn in turns)}


def said_in(turns: list[dict]) -> list[dict]:
    """Turns as a chat template is given them again: the calls are in their text."""
    said: list[dict] = []
    for turn in turns:
        answer = {"role": "assistant", "content": turn.get("begun", "") + turn["text"]}
        said += [answer, *(turn["observation"] or ())]
    return said


def messages_of(turn: dict) -> list[dict]:
    """A turn as rewards see it: the assistant's message, with its parsed `tool_calls` as in TRL and OpenAI's API, and
    what answered it. What is tokenised has the calls in its text alone. What the prompt has begun the answer with is
    `begun`, the beginning of its content."""
    answer, *others = said_in([turn])
    answer |= {"begun": turn["begun"]} if turn.get("begun") else {}
    calls = turn["info"].get("tool_calls") if calls_in(turn["info"]) else None
    return [answer | ({"tool_calls": calls} if calls else {}), *others]
