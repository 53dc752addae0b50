"""Tools that are called by hand, and an environment that somebody plays as the model."""

import asyncio
import json
import queue
import threading
from dataclasses import replace
from functools import partial

import numpy as np

import rollouts
from cli import ConfigError
from envs.tools import Call
from inputs.prompts import SCHEMAS
from looking.answers.rewards import Typed, all_scored, arrays
from looking.answers.rows import begun, own_row, read
from looking.answers.settings import Script
from runlog import samples
from runlog.log import completion_rows
from runlog.tokens import vocabulary_of
from safety.storable import text_of
from vllm_client import Completion


def tools(script: Script, given: dict) -> dict:
    """What the model is told of its tools, in the prompt of a row, and the turns that an environment offers."""
    known = read(script, given)
    own, one = own_row(known, given)
    if own.rollout != "multi_turn":
        return {"tools": [], "several": False, "env": None, "actions": []}

    async def look():
        shown, environment = await begun(one, known["processor"], own)
        listed = [tool.schema()["function"] for tool in environment.tools.values()]
        told = listed, environment.instructions, bool(shown.get(SCHEMAS)), list(map(str, environment.actions()))
        await rollouts.put_away(environment, one, False, own)
        return told

    listed, instructions, by_template, actions = asyncio.run(look())
    return {
        **{"tools": listed, "several": True, "env": own.env, "parser": own.tool_parser, "actions": actions[:32]},
        "told": "by the chat template" if by_template else instructions,
    }


def call(script: Script, given: dict) -> dict:
    """One call of a tool, as the environment makes it for the model."""
    known = read(script, given)
    own, one = own_row(known, given)
    try:
        arguments = json.loads(given.get("arguments") or "{}")
    except ValueError as error:
        raise ConfigError(f"the arguments are no JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise ConfigError('the arguments are a JSON object, as {"name": "value"}.')

    async def made():
        _, environment = await begun(one, known["processor"], own)
        if not hasattr(environment, "toolbox"):
            raise ConfigError(f"--env {own.env} reads its calls itself: play it.")
        wanted = Call(str(given.get("name")), arguments)
        await environment.enter_servers([wanted])
        messages, events = await environment.toolbox.run([wanted], environment.tools)
        await rollouts.put_away(environment, one, False, own)
        return messages[0], events[0]

    message, event = asyncio.run(made())
    told = {"content": text_of(message["content"]), "seconds": event["seconds"], "failed": bool(event["failed"])}
    return told


class Game:
    """A trajectory that somebody plays as the model: the training's own rollout, whose generator waits for a text."""

    def __init__(self, script: Script, known: dict, given: dict):
        self.processor = known["processor"]
        self.own, self.row = own_row(known, given)
        self.own = replace(self.own, num_generations=1, env_errors="stop")
        self.said, self.asked = queue.Queue(), queue.Queue()
        self.spans: list[tuple[int, int]] = []  # of the player's tokens, among all
        self.start = 0  # tokens of the prompt
        threading.Thread(target=self.play, daemon=True).start()

    def play(self) -> None:
        try:
            typed = Typed(self.processor, [])
            typed.generate = partial(self.generate, typed)
            found = asyncio.run(rollouts.call_rollout(self.row, typed, self.own))
            self.asked.put(("end", found[0]))
        except BaseException as error:
            self.asked.put(("error", error))

    async def generate(self, typed: Typed, prompt_ids, *, n=1, max_tokens, **_) -> list[Completion]:
        self.asked.put(("turn", list(prompt_ids), max_tokens))
        text = await asyncio.get_running_loop().run_in_executor(None, self.said.get)
        ids, finish = typed.tokens({"text": text}, max_tokens)
        self.spans.append((len(prompt_ids), len(prompt_ids) + len(ids)))
        return [Completion(ids, [0.0] * len(ids), finish, 0, list(prompt_ids))]

    def next(self) -> dict:
        """What follows: a turn to take, or how it ended."""
        kind, *found = self.asked.get()
        known = vocabulary_of(self.processor)
        if kind == "error":
            raise found[0]
        if kind == "turn":
            ids, left = found
            self.start = self.start or len(ids)
            mask = [any(a <= n < b for a, b in self.spans) for n in range(self.start, len(ids))]
            last = self.spans[-1][1] if self.spans else 0
            spans = [(a - self.start, b - self.start) for a, b in self.spans]
            row = {"prompt_ids": np.array(ids[: self.start]), "token_ids": np.array(ids[self.start :], int)}
            row |= {"tokens/trained": np.array(mask, bool), "turns": [{"start": a, "end": b} for a, b in spans]}
            answer = self.processor.decode(ids[last:])
            return {"over": False, "tokens": samples.token_view(row, known), "answer": answer, "left": left}
        (trajectory,) = found
        functions = all_scored([trajectory], self.own, self.processor)
        total = sum(trajectory.token_rewards)
        (row,) = completion_rows([trajectory], [total], [None], with_tokens=True)
        return {
            **{"over": True, "tokens": samples.token_view(arrays(row), known), "turns": samples.turns(row)},
            **{"finish": trajectory.finish_reason, "reward": total, "functions": functions},
        }


def play(script: Script, given: dict) -> dict:
    """Begin a trajectory of a row; "actions": turns that can be chosen, where the environment names them."""
    known = read(script, given)
    actions = tools(script, given)["actions"]
    script.forget()
    script.game = Game(script, known, given)
    return script.game.next() | {"actions": actions}


def say(script: Script, given: dict) -> dict:
    """The model's next turn."""
    if script.game is None:
        raise ConfigError("nothing is being played; begin anew.")
    if not isinstance(given.get("text"), str):
        raise ConfigError("give the turn's text.")
    script.game.said.put(given["text"])
    return script.game.next()
