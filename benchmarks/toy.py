"""A task for a random model, seconds a training: tokens whose number ends in 0 earn reward, by chance one in ten.

One kind of prompt earns .1 for nothing. Advantages within a group do not see it; a critic can learn to.
"""

KINDS = (("Say something about", 0.0), ("Name a colour that goes with", 0.1))


def rows(split: str, seed: int) -> list[dict]:
    start, count = (0, 96) if split == "train" else (100, 16)
    return [{"prompt": f"{KINDS[n % 2][0]} {n}.", "bonus": KINDS[n % 2][1]} for n in range(start, start + count)]


def tens(completion_ids, bonus, **_) -> list[float]:
    shares = [sum(token % 10 == 0 for token in ids) / len(ids) for ids in completion_ids]
    return [0.9 * share + extra for share, extra in zip(shares, bonus, strict=True)]
