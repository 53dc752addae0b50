"""One environment, without model, server or torch: python rollouts.py --env NAME --policy random"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Callable

from config import ConfigError, TrainConfig
from data import load_rows
from envs import adapters
from envs.base import call_environment, checked_step, reset
from envs.tools import chat, named_tools
from inputs.parts import text_of_parts
from safety import secrets
from safety.sandbox import check_contained

CHANCE = random.Random()  # the random policy's own: an environment may draw from the same seed


def random_policy(environment, messages: list[dict]) -> str:
    actions = environment.actions()
    return CHANCE.choice(actions) if actions else "".join(CHANCE.choices("abc <>/", k=20))


def by_hand(environment, messages: list[dict]) -> str:
    try:
        return input("\nyou: ")
    except EOFError:
        raise SystemExit("\nrollouts.py: the input has ended, the game has not") from None


def openai_policy(url: str, model: str, token: str | None) -> Callable:
    """Asks any OpenAI-compatible server, such as a vllm_server.py.  url: up to and with /v1."""

    def say(environment, messages: list[dict]) -> str:
        try:
            return chat(url, model, messages, token, max_tokens=512)
        except (RuntimeError, OSError) as error:
            raise SystemExit(f"rollouts.py: {error}") from None

    return say


async def watch(environment, policy: Callable, row: dict, cfg: TrainConfig) -> float | None:
    """Play one trajectory with text alone, printing every turn; returns its reward, None where it gives none."""
    messages, total = await reset(environment, row, cfg), 0.0
    if environment.instructions:
        messages = [{"role": "system", "content": environment.instructions}, *messages]
    for message in messages:
        print(f"[{message['role']}] {text_of_parts(message['content'])}")
    for number in range(1, cfg.max_turns + 1):
        text = policy(environment, messages)
        outcome = await call_environment(environment, "step", row, cfg, text=text)
        answers, reward, done, info = checked_step(outcome, environment)
        print(f"\n--- turn {number} ---\n[assistant] {text}")
        for message in answers:
            print(f"[{message['role']}] {text_of_parts(message['content'])}")
        print(f"reward {reward:g}{', done' if done else ''}  {info or ''}")
        messages, total = [*messages, {"role": "assistant", "content": text}, *answers], total + reward
        if done:
            break
    score = await call_environment(environment, "score", row, cfg)
    metrics = await call_environment(environment, "metrics", row, cfg)
    total = None if score is None and not total else total + (score or 0.0)  # as `judged` has it
    print(f"\nreward of the trajectory {'none' if total is None else f'{total:g}'}  {metrics or ''}")
    await adapters.put_away(environment, False, cfg)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Play an environment by hand, at random, or with a served model.")
    parser.add_argument("--env", help="name in ENVIRONMENTS or file.py:Class; NAME?key=value sets arguments")
    parser.add_argument("--tools", nargs="*", default=[], help="instead: names in TOOLS or file.py:function")
    parser.add_argument("--mcp_config", help="and, or instead: JSON file with `mcpServers`")
    parser.add_argument("--tool_parser", default="hermes", help="how calls are written (envs/formats.py)")
    parser.add_argument("--tool_timeout", type=float, default=30.0, help="seconds a call, reset or step may take")
    parser.add_argument("--dataset_id", help="play its rows, as the train scripts take them")
    parser.add_argument("--policy", choices=["random", "hand", "openai", "server"], default="random")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of --policy openai or server")
    parser.add_argument("--model", default="", help="its name there")
    parser.add_argument("--prompt", default="", help="of the row, for environments that use it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=1)
    parser.add_argument("--max_turns", type=int, default=8)
    parser.add_argument("--allow_uncontained", action="store_true", help="as of the train scripts")
    args = parser.parse_args()
    token = secrets.read("VLLM_SERVER_TOKEN" if args.policy == "server" else "OPENAI_API_KEY")
    policies = {"random": random_policy, "hand": by_hand}
    policy = policies.get(args.policy) or openai_policy(args.url, args.model, token)
    if not (args.env or args.tools or args.mcp_config):
        parser.error("give --env, --tools or --mcp_config")
    try:
        names = ("env", "tools", "mcp_config", "max_turns", "tool_parser", "tool_timeout", "allow_uncontained")
        cfg = TrainConfig(**{name: getattr(args, name) for name in names})
        cfg.reward_funcs = []  # it is played, not trained on: an environment needs no reward
        check_contained([tool.call for tool in named_tools(cfg)], cfg)
        make, rewards = adapters.environment_maker(cfg), []
        rows = load_rows(args.dataset_id, own_prompts=not args.env) if args.dataset_id else [{"prompt": args.prompt}]
        for episode in range(args.episodes):
            CHANCE.seed(f"policy {args.seed + episode}")
            row = {"seed": args.seed + episode} | rows[episode % len(rows)]
            rewards.append(asyncio.run(watch(make(), policy, row, cfg)))
    except ConfigError as error:
        parser.error(str(error))
    given = [reward for reward in rewards if reward is not None]
    mean = f"{statistics.fmean(given):.3f}" if given else "none"
    print(f"mean reward of {len(given) or len(rewards)} trajectories: {mean}")
