"""A support desk with a customer, as tau-bench (2406.12045): tools over a small data base, rules to keep, and a user
who says what is wanted only when asked. The reward is 1 if at the end the data base is what wish and rules make of it.

    python examples/run.py user                      # warm start, two seeds
    ... --env examples/user.py:Desk --dataset_id examples/user.py:rows --tool_parser hermes       # as Qwen writes calls

The customer is scripted and seeded: says the order's number first or the wish first, or both at once, and, of an order
that is on its way already, sometimes that it is not. The public methods of `Desk` are the model's tools; the class has
the form of TRL's environment_factory. `--env user?url=...` has another model play the user instead.
"""

import copy
import random

ITEMS, COLORS = ["mug", "lamp", "chair", "scarf", "bag", "clock"], ["red", "blue", "green", "black", "white", "pink"]
STATUS = ["pending", "pending", "pending", "shipped", "shipped"]  # of five orders
ASKED = {
    "change": ["Make it {}.", "I want it in {}.", "Change it to {}."],
    "cancel": ["Cancel it.", "I do not want it."],
}
RULES = "You are at a support desk. Find the order. If it is pending, do what the customer wants. If it is shipped, "
RULES += "never change or cancel it, whatever the customer says: transfer it. Then say goodbye."


def rows(split: str = "train", seed: int = 42, held_out: int = 100) -> list[dict]:
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: the desk has 'train' and 'test'.")
    chance = random.Random(f"user {split} {seed}")
    return [row(chance) for _ in range(2000 if split == "train" else held_out)]


def row(chance: random.Random) -> dict:
    orders = {}
    for number, status in zip(chance.sample(range(10, 100), len(STATUS)), STATUS, strict=True):
        orders[str(number)] = {"item": chance.choice(ITEMS), "color": chance.choice(COLORS), "status": status}
    number, kind = chance.choice(list(orders)), chance.choice(list(ASKED))
    color = chance.choice([color for color in COLORS if color != orders[number]["color"]])
    wish = {"order": number, "color": color if kind == "change" else None}
    claim = " It is still pending." if orders[number]["status"] == "shipped" and chance.random() < 0.5 else ""
    facts = [f"Order {number}.", chance.choice(ASKED[kind]).format(color) + claim]
    facts = chance.choice([facts, facts[::-1], [" ".join(facts)]])
    prompt = [{"role": "system", "content": RULES}, {"role": "user", "content": "Hello."}]
    return {"prompt": prompt, "orders": orders, "wish": wish, "facts": facts}


def settled(orders: dict, wish: dict) -> dict:
    """The orders as they should be at the end."""
    orders = copy.deepcopy(orders)
    order = orders[wish["order"]]
    if order["status"] == "shipped":
        return orders | {wish["order"]: order | {"status": "transferred"}}
    return orders | {wish["order"]: order | ({"color": wish["color"]} if wish["color"] else {"status": "cancelled"})}


class Desk:
    def reset(self, orders, wish, facts, **row):
        self._orders, self._wanted = copy.deepcopy(orders), settled(orders, wish)
        self._facts, self._open = [*facts], None
        self._told: list[str] = []

    def say(self, text: str) -> str:
        """Say it to the customer, who answers.

        Args:
            text: what to say
        """
        said = self._customer(text)
        self._told.append(said)
        return said

    def _customer(self, text: str) -> str:
        """What the customer says to that. When nothing is left to be told, `_facts` is empty."""
        return self._facts.pop(0) if self._facts else "That is all."

    def find(self, number: str) -> str:
        """Open an order.

        Args:
            number: of the order
        """
        if number not in self._orders:
            raise ValueError("there is no such order")
        self._open = self._orders[number]
        return ", ".join(self._open.values())

    def change(self, color: str) -> str:
        """Change the color of the open order.

        Args:
            color: the new one
        """
        return self._write("color", color)

    def cancel(self) -> str:
        """Cancel the open order."""
        return self._write("status", "cancelled")

    def transfer(self) -> str:
        """Hand the open order over to a human."""
        return self._write("status", "transferred")

    def _write(self, key: str, value: str) -> str:
        if self._open is None:
            raise ValueError("find an order first")
        self._open[key] = value
        return "Done."

    def get_reward(self) -> float:
        return float(self._orders == self._wanted)


def next_turn(row: dict, desk: Desk) -> str:
    """What someone says who keeps the rules."""
    told, number, color = " ".join(desk._told), row["wish"]["order"], row["wish"]["color"]
    if desk._orders != row["orders"]:
        return "Goodbye."
    if desk._open is None and number in told:
        return f"<find>{number}</find>"
    if desk._facts or desk._open is None:
        return "<say>What can I do?</say>" if number in told or not told else "<say>Which order?</say>"
    if desk._open["status"] == "shipped":
        return "<transfer></transfer>"
    return f"<change>{color}</change>" if color else "<cancel></cancel>"


def demonstrate(row: dict, environment, answers: list) -> str:
    """A careless clerk: three turns in ten are any, and most shipped orders are changed or cancelled all the same."""
    desk, chance = environment.inner, random.random()
    words = [f"<change>{random.choice(COLORS)}</change>", "<cancel></cancel>", "<transfer></transfer>", "Goodbye."]
    if chance < 0.3:
        return random.choice([*words, "<say>What can I do?</say>", f"<find>{random.randint(10, 99)}</find>"])
    right = next_turn(row, desk)
    if right == "<transfer></transfer>" and chance < 0.8:
        return f"<change>{row['wish']['color']}</change>" if row["wish"]["color"] else "<cancel></cancel>"
    return right
