"""Fixtures that several test files share."""

from server_fixture import server  # noqa: F401

# Files that take longest, first: two at a time, the last ones should be short.
LONGEST = [
    "failures",
    "resume",
    "push",
    "server",
    "gradient",
    "vision",
    "train",
    "ppo",
    "vision_server",
    "reward_model",
]


def pytest_collection_modifyitems(items):
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))
