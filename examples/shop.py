"""A shop, as WebShop (2207.01206): search[words] and click[button], page by page, until something is bought.

    python examples/run.py shop                      # warm start, two seeds
    python scripts/try.py --config examples/shop.yaml --hand       # be the customer

The reward is WebShop's: 0 for another kind of thing than was asked for, else the share of the other wishes that the
thing bought fulfils: material, color, size, price. `--preset gigpo` compares turns that began on the same page. What
was learned of it stands in docs/results.md.
"""

import random
import re

from envs import Environment

KINDS = ["chair", "lamp", "bag", "shirt", "clock", "bowl", "belt", "box"]
MATERIALS, SIZES = ["oak", "steel", "wool", "glass"], ["small", "medium", "large"]
COLORS = ["red", "blue", "green", "black", "white", "pink"]
PAGE, HELD_OUT = 3, 60  # results a page; wishes never met in training


def products() -> list[dict]:
    """Six of each kind."""
    chance = random.Random("shop")
    made = []
    for number, kind in enumerate(6 * KINDS):
        product = {"id": f"b{number}", "kind": kind, "material": chance.choice(MATERIALS)}
        made.append(product | {"price": chance.randint(5, 60), "colors": chance.sample(COLORS, 3)})
    return made


CATALOGUE = {product["id"]: product for product in products()}


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: the shop has 'train' and 'test'.")
    wishes = [(id, color, size) for id, p in CATALOGUE.items() for color in p["colors"] for size in SIZES]
    random.Random("held out").shuffle(wishes)  # by no seed: a warm start with another one must not meet these, either
    wishes = wishes[:HELD_OUT] if split == "test" else wishes[HELD_OUT:]
    random.Random(seed).shuffle(wishes)
    made = []
    for id, color, size in wishes:
        p = CATALOGUE[id]
        limit = p["price"] // 10 * 10 + 10
        text = f"Buy a {p['material']} {p['kind']}, {color}, {size}, for at most {limit} dollars."
        made.append({"prompt": text, "target": id, "color": color, "size": size, "limit": limit})
    return made


class Shop(Environment):
    """An action that the page does not offer changes nothing and costs .1."""

    def reset(self, row, seed):
        self.wish, self.target = row, CATALOGUE[row["target"]]
        self.hits, self.page, self.item, self.chosen, self.points = [], 0, None, {}, 0.0
        rules = "Write search[words] or click[button]. Choose color and size, then buy."
        return [{"role": "user", "content": f"{row['prompt']} {rules}\n{self.view()}"}]

    def shown(self) -> list[dict]:
        return self.hits[self.page * PAGE :][:PAGE]

    def buttons(self) -> list[str]:
        if self.item:
            return [*self.item["colors"], *SIZES, "back", "buy"]
        turn = ["next"] * ((self.page + 1) * PAGE < len(self.hits)) + ["prev"] * (self.page > 0)
        return [str(n + 1) for n in range(len(self.shown()))] + turn

    def view(self) -> str:
        about = [f"{n + 1}: {p['material']} {p['kind']}, {p['price']} dollars" for n, p in enumerate(self.shown())]
        if self.item:
            chosen = ", ".join(self.chosen.values()) or "nothing"
            about = [f"{self.item['material']} {self.item['kind']}, {self.item['price']} dollars", f"chosen: {chosen}"]
        return "\n".join([*about, f"Buttons: {', '.join(self.buttons()) or 'none'}"])

    async def step(self, text):
        found = re.findall(r"(search|click)\[([^\[\]\n]{1,80})\]", text.lower())
        verb, word = found[-1] if found else ("", "")
        if verb == "search":
            words = set(word.split())
            fits = {id: len(words & {p["material"], p["kind"]}) for id, p in CATALOGUE.items()}
            self.hits = [CATALOGUE[id] for id in sorted(fits, key=fits.get, reverse=True) if fits[id]]
            self.page, self.item, self.chosen = 0, None, {}
        elif verb != "click" or word not in self.buttons():
            message = f"That is no action here.\n{self.view()}"
            return [{"role": "user", "content": message}], -0.1, False, {"valid": 0.0}
        elif word == "buy":
            self.points = self.worth()
            return [], self.points, True, {"valid": 1.0}
        elif word.isdecimal():
            self.item = self.shown()[int(word) - 1]
        elif word == "back":
            self.item, self.chosen = None, {}
        elif word in ("next", "prev"):
            self.page += 1 if word == "next" else -1
        else:
            self.chosen["size" if word in SIZES else "color"] = word
        return [{"role": "user", "content": self.view()}], 0.0, False, {"valid": 1.0}

    def worth(self) -> float:
        if self.item["kind"] != self.target["kind"]:
            return 0.0
        options = [self.chosen.get(name) == self.wish[name] for name in ("color", "size")]
        fits = [self.item["material"] == self.target["material"], self.item["price"] <= self.wish["limit"], *options]
        return sum(fits) / len(fits)

    def state(self):
        return tuple(p["id"] for p in self.shown()), self.item and self.item["id"], tuple(sorted(self.chosen.items()))

    def metrics(self):
        return {"points": self.points, "success": float(self.points == 1)}

    def actions(self):
        searches = [f"search[{material} {kind}]" for material in MATERIALS for kind in KINDS] if not self.hits else []
        return searches or [f"click[{button}]" for button in self.buttons()]


def next_action(shop: Shop) -> str:
    """What someone does who knows what is wanted."""
    if not shop.hits:
        return f"search[{shop.target['material']} {shop.target['kind']}]"
    if shop.item is None:
        return f"click[{shop.shown().index(shop.target) + 1 if shop.target in shop.shown() else 'next'}]"
    if shop.item is not shop.target:
        return "click[back]"
    missing = [shop.wish[name] for name in ("color", "size") if shop.chosen.get(name) != shop.wish[name]]
    return f"click[{missing[0] if missing else 'buy'}]"


def demonstrate(row: dict, shop: Shop, answers: list) -> str:
    """A careless customer: two actions in five are any that the page offers."""
    return next_action(shop) if random.random() < 0.6 else random.choice(shop.actions())
