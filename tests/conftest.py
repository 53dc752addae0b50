"""Fixtures that several test files share."""

import pytest
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


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in its own
def pytest_collection_modifyitems(items):
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))
    # A file is run by one process, and those that use the shared server by the same: starting one takes a core 30 s.
    served = {item.path.stem for item in items if "server" in getattr(item, "fixturenames", ())}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("served" if item.path.stem in served else item.path.stem))
