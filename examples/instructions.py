"""Instructions whose obedience can be checked, as IFEval (2311.07911): two a row, by its names and arguments.

    python examples/run.py instructions              # no warm start; two seeds
    ... --dataset_id google/IFEval --dataset_split train --reward_funcs instructions      # its own prompts, on the hub

The reward is the share of a row's instructions that are followed (scoring/instructions.py); each is logged by its name.
Held out it goes from .31 to .575, and rows of which both are followed from .10 to .29 (seed 0).
Topics of the split "test" are never met in training. IFEval has a column `prompt` and the two columns made here; of its
instructions language:response_language is not checked, and rows that ask for nothing else have no reward.
"""

import random

TOPICS = "the sea,a cat,bread,winter,a train,music,a garden,the moon,tea,a bridge,rain,a teacher,horses,paper,a market"
TOPICS += ",the desert,a ship,honey,shoes,a library,the night,a river,salt,a clock,birds,a forest,coffee,an island"
HELD_OUT = 8  # topics
WORDS = ["bright", "slow", "often", "old", "quiet", "small"]

CHECKS = {  # (random.Random) -> (what is asked, arguments of the check)
    "punctuation:no_comma": lambda chance: ("Do not use any commas.", {}),
    "change_case:english_lowercase": lambda chance: ("Write in lower case only.", {}),
    "length_constraints:number_words": lambda chance: (
        f"Use less than {(count := chance.choice([12, 15, 20]))} words.",
        {"num_words": count, "relation": "less than"},
    ),
    "keywords:existence": lambda chance: (f"Use the word {(word := chance.choice(WORDS))}.", {"keywords": [word]}),
    "detectable_format:title": lambda chance: ("Put a title into double angular brackets, as <<title>>.", {}),
    "detectable_format:number_bullet_lists": lambda chance: (
        f"Write {(count := chance.randint(2, 4))} bullet points, each on a line that begins with *.",
        {"num_bullets": count},
    ),
    "startend:quotation": lambda chance: ("Put all of it into double quotation marks.", {}),
    "detectable_content:postscript": lambda chance: ("Add a postscript with P.S.", {"postscript_marker": "P.S."}),
}


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: instructions have 'train' and 'test'.")
    chance, topics = random.Random(f"instructions {split} {seed}"), TOPICS.split(",")
    topics = topics[:HELD_OUT] if split == "test" else topics[HELD_OUT:]
    made = []
    for _ in range(1000 if split == "train" else 60):
        names = chance.sample(list(CHECKS), 2)
        asked, arguments = zip(*(CHECKS[name](chance) for name in names), strict=True)
        text = f"Write a sentence about {chance.choice(topics)}. {' '.join(asked)}"
        columns = {"instruction_id_list": names, "kwargs": list(arguments)}
        made.append({"prompt": [{"role": "user", "content": text}]} | columns)
    return made
