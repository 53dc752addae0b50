"""One environment, without model, server or torch: python scripts/play.py --env NAME --policy random"""

import asyncio
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from config import ConfigError, TrainConfig, parse_args  # noqa: E402
from data import load_rows  # noqa: E402
from envs import adapters  # noqa: E402
from envs.base import call_environment, checked_step, reset  # noqa: E402
from envs.turns import add_score  # noqa: E402
from inputs.parts import text_of_parts  # noqa: E402

CHANCE = random.Random()  # the random policy's own: an environment may draw from the same seed


def random_policy(environment) -> str:
    actions = environment.actions()
    return CHANCE.choice(actions) if actions else "".join(CHANCE.choices("abc <>/", k=20))


def by_hand(environment) -> str:
    try:
        return input("\nyou: ")
    except EOFError:
        raise SystemExit("\nplay.py: the input has ended, the game has not") from None


def show(messages: list[dict]) -> None:
    for message in messages:
        print(f"[{message['role']}] {text_of_parts(message['content'])}")


async def watch(environment, policy: Callable, row: dict, cfg: TrainConfig) -> float | None:
    """Play one trajectory with text alone, printing every turn; returns its reward, None where it gives none."""
    messages, turns = await reset(environment, row, cfg), []
    told = [{"role": "system", "content": environment.instructions}] if environment.instructions else []
    show([*told, *messages])
    for number in range(1, cfg.max_turns + 1):
        text = policy(environment)
        print(f"\n--- turn {number} ---\n[assistant] {text}")
        outcome = await call_environment(environment, "step", row, cfg, text=text)
        answers, reward, done, info = checked_step(outcome, environment)
        show(answers)
        print(f"reward {reward:g}{', done' if done else ''}  {info or ''}")
        turns.append({"reward": reward})
        if done:
            break
    found = await add_score(environment, turns, row, cfg)
    await adapters.put_away(environment, False, cfg)
    total = None if found["unscored"] else sum(turn["reward"] for turn in turns)
    print(f"\nreward of the trajectory {'none' if total is None else f'{total:g}'}  {found['metrics'] or ''}")
    return total


class Play(TrainConfig):
    first_flags = "env tools mcp_config tool_parser tool_timeout dataset_id max_turns seed allow_uncontained"
    generator: Literal["vllm", "hf"] = "hf"  # none is asked

    policy: Literal["random", "hand"] = "random"  # who plays
    prompt: str = ""  # of the row, for environments that use it, where there is no --dataset_id
    episodes: int = 1  # games; the next one's seed is one more

    def __post_init__(self):
        self.own_rows = self.dataset_id  # before the train scripts' default takes its place
        super().__post_init__()


def main() -> None:
    cfg = parse_args(Play, description="Play an environment by hand or at random.")
    cfg.reward_funcs = []  # it is played, not trained on: an environment needs no reward
    policy = random_policy if cfg.policy == "random" else by_hand
    try:
        if not (cfg.env or cfg.tools or cfg.mcp_config):
            raise ConfigError("give --env, --tools or --mcp_config")
        make, rewards = adapters.environment_maker(cfg), []
        rows = load_rows(cfg.own_rows, own_prompts=not cfg.env) if cfg.own_rows else [{"prompt": cfg.prompt}]
        for episode in range(cfg.episodes):
            CHANCE.seed(f"policy {cfg.seed + episode}")
            row = {"seed": cfg.seed + episode} | rows[episode % len(rows)]
            rewards.append(asyncio.run(watch(make(), policy, row, cfg)))
    except ConfigError as error:
        raise SystemExit(f"play.py: error: {error}") from None
    given = [reward for reward in rewards if reward is not None]
    mean = f"{statistics.fmean(given):.3f}" if given else "none"
    print(f"mean reward of {len(given) or len(rewards)} trajectories: {mean}")


if __name__ == "__main__":
    main()
