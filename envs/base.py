"""Environments: what answers the model between its turns.

    --env frozenlake?slippery=true          # a name in ENVIRONMENTS, arguments of its __init__ behind it
    --env my_env.py:Guess                   # a class of a file; examples/ has some, each with its rows and reward

An environment is one object a trajectory, and a class like this:

    import random
    from envs import Environment

    class Guess(Environment):
        def reset(self, row, seed):                 # -> the prompt: text or chat messages
            self.secret, self.right = random.Random(seed).randint(1, 9), False
            return "Guess my number from 1 to 9."

        async def step(self, text):                 # the model's turn -> (answer to it, reward of the turn, done, info)
            self.right = text.strip() == str(self.secret)
            return "No.", float(self.right), self.right, {"valid": float(text.strip().isdigit())}

        def metrics(self):                          # logged once a trajectory
            return {"success": float(self.right)}

        def actions(self):                          # what --policy random chooses from
            return [str(n) for n in range(1, 10)]

Every method may be plain or async and has --tool_timeout seconds, the constructor too; none of them holds up other
trajectories. One that raises or is late costs its trajectory, which is left out and counted; above --max_failed of a
step the run stops and shows the commonest cause (--env_errors stop: at the first). The seed is the row's column `seed`,
or a number made of its prompt: the members of a group share it. The numbers of `info` are logged, their means over a
trajectory's turns, as rewards/environment/NAME; `score()` is added to the last turn's reward. A turn that is cut by its
length ends the trajectory without a step. `state()` lets --advantage gigpo compare turns that began alike. `close()` is
called at the end, however it ends; with `pooled = True` an instance is reset and played again instead. `tools` is what
the model can call ({name: Tool}); most environments have none and read the text.

`python rollouts.py --env NAME --policy random` plays one without model, server or torch.distributed.
"""

import math
from dataclasses import replace
from functools import partial

from envs.formats import instructions, outside_thinking, parser_of, read_calls
from envs.mcp import TrajectoryServers
from envs.tools import Tool, Toolbox, tools_of


class Environment:
    """What every environment has; a subclass needs `step`, and mostly `reset`."""

    tools: dict[str, Tool] = {}  # the model's in this trajectory, set by reset()
    instructions = ""  # how to call them, for chat templates that do not say
    step_timeout: float | None = None  # seconds; None: --tool_timeout
    pooled = False  # whether an instance may be played again after another reset(), where making one is slow

    def reset(self, row: dict, seed: int) -> list[dict]:
        """Begin anew; returns the prompt as chat messages."""
        prompt = row["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)

    async def step(self, text: str) -> tuple[list[dict], float, bool, dict]:
        """Answer one turn of the model: (messages to it, reward of the turn, done, info)."""
        raise NotImplementedError

    def state(self):
        """The state the environment is in, anything hashable: asked after reset() and each step(). Turns that start in
        equal states of one group are compared by --advantage gigpo. None: not known."""
        return None

    def score(self) -> float | None:
        """What the whole trajectory earns beyond its turns, asked once at its end. None where no turn had a reward,
        either: this environment gives none, and other rewards count alone."""
        return 0.0

    def close(self) -> None:
        """Release what the environment holds; called once, at the end of its trajectory, however that ended."""

    def metrics(self) -> dict[str, float]:
        """Numbers to log about the whole trajectory, asked once at its end."""
        return {}

    def actions(self) -> list[str]:
        """Turns a random policy may choose from, where there are such."""
        return []


class ToolEnvironment(Environment):
    """A bare set of tools: runs the calls of a turn, all at once; a turn without any is the answer.

    Tools of isolated MCP servers talk to this trajectory's own servers, which close() ends.
    """

    begun = ""  # what the prompt has begun the answer with: "<think>\n"
    schemas: list[dict] = []  # of the tools
    servers: TrajectoryServers | None = None  # where a tool is of an isolated MCP server
    step_timeout = math.inf  # calls have limits of their own, and may wait for their turn

    def __init__(self, toolbox: Toolbox, cfg):
        self.toolbox, self.parser = toolbox, parser_of(cfg)

    def reset(self, row, seed):
        tools = self.toolbox.tools
        if any(tool.server for tool in tools.values()):
            self.servers = TrajectoryServers()
            tools = {n: replace(t, call=partial(t.call, self.servers)) if t.server else t for n, t in tools.items()}
        self.offer(tools_of(row, tools))
        return super().reset(row, seed)

    def offer(self, tools: dict[str, Tool]) -> None:
        self.tools, self.schemas = tools, [tool.schema() for tool in tools.values()]
        self.instructions = instructions(self.schemas, self.parser) if tools else ""

    async def step(self, text):
        text = self.begun + text
        calls = read_calls(text, self.schemas, self.parser)
        within = sum(str(call.arguments).count("</answer>") for call in calls)
        if not calls or outside_thinking(text).count("</answer>") > within:
            return [], 0.0, True, {"calls": []}
        if self.servers:  # before the calls: a start does not count as the time of one
            await self.servers.start({self.tools[c.name].server for c in calls if c.name in self.tools} - {None})
        messages, events = await self.toolbox.run(calls, self.tools)
        read = [call.as_message() for call in calls if not call.error]
        return messages, 0.0, False, {"calls": events, "tool_calls": read}

    async def close(self):
        """End this trajectory's own MCP servers."""
        if self.servers is not None:
            await self.servers.close()
