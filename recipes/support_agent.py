"""A support desk as examples/user.py has it - tools, a database, rules - whose customer is played by another model.

    --env 'recipes/support_agent.py:Desk?url=http://127.0.0.1:9000/v1&model=Qwen/Qwen2.5-7B-Instruct'

The customer's model is told the facts of the row, one after the other as in the example, and how to say them. The
reward is the database's state at the end, which no talk can change. Its server's token: USER_TOKEN. Is a model good
enough as customer? A clerk who keeps the rules tells: PYTHONPATH=. python recipes/support_agent.py URL MODEL
Where no large one is at hand, recipes/support_customer.py teaches a small one.
"""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

from published import example

from envs.tools import chat

Scripted, rows, next_turn = (example(f"user.py:{name}") for name in ("Desk", "rows", "next_turn"))
TOLD = "You are a customer at a shop's support desk. You want this: {} You do not know the shop's rules. Speak as a "
TOLD += "customer does, in one or two sentences; give the order's number when asked for it; never speak for the desk."


class Desk(Scripted):
    def __init__(self, url: str, model: str, max_tokens: int = 100):
        self._server = dict(url=url, model=model, token=os.environ.get("USER_TOKEN"), max_tokens=max_tokens)

    def reset(self, **row):
        super().reset(**row)
        self._talk = [{"role": "system", "content": TOLD.format(" ".join(self._facts))}]
        self._awaited = row["wish"]["order"], row["wish"]["color"] or "cancel|n[o']t want"

    def _customer(self, text: str) -> str:
        self._talk.append({"role": "user", "content": text})
        said = chat(messages=self._talk, temperature=0.7, **self._server)
        self._talk.append({"role": "assistant", "content": said})
        if all(re.search(words, " ".join([*self._told, said]).lower()) for words in self._awaited):
            self._facts = []
        return said


def served(desk: Desk, row: dict) -> tuple[bool, bool]:
    """Whether the customer named the order, and whether it was settled, after at most ten turns."""
    desk.reset(**row)
    for _ in range(10):
        if not (call := re.match(r"<(\w+)>(.*)</", next_turn(row, desk))):
            break
        getattr(desk, call[1])(*filter(None, [call[2]]))
    return row["wish"]["order"] in " ".join(desk._told), desk.get_reward() == 1


if __name__ == "__main__":
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda row: served(Desk(*sys.argv[1:3]), row), rows("test", held_out=24)))
    named, settled = (sum(each) for each in zip(*found, strict=True))
    print(f"of {len(found)} customers {named} named their order, and {settled} orders were settled")
