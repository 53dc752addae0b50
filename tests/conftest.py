"""Fixtures that several test files share."""

from pathlib import Path
from unittest import mock

import pytest
from server_fixture import server  # noqa: F401
from turns import turn

from safety import credentials

# Files that take longest, first: several run at a time, and the last ones should be short.
LONGEST = ["push", "limits", "resume", "sandbox", "failures", "mcp", "server_processes", "gradient", "vision_server"]
LONGEST += ["train", "foreign", "reward_model", "nodes", "experts", "plan", "sharding", "examples", "ideas", "readme"]
LONGEST += ["hostile_completions", "loading", "told_experts"]


# Use the shared server: run by one process, as starting one takes a core 30 s.
SERVED = ("push", "push_changes", "server", "serving", "async", "freshness", "colocate")
SERVED = [f"test_{name}" for name in SERVED]


@pytest.fixture(autouse=True)
def secrets_end_with_their_test():
    """A secret that was read stays in this process; the next test, of another file perhaps, must not send it."""
    with mock.patch.dict(credentials._read):
        yield


def pytest_addoption(parser):
    parser.addoption(
        "--turn", metavar="K/N", help="of tests marked in_turn every N-th, from the K-th on; /N: the commit says which"
    )


def pytest_collection_modifyitems(config, items):
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))
    if config.getoption("turn") and not config.getoption("lf"):  # what failed is tried again in any case
        items[:], rest = by_turn(items, config.getoption("turn"))
        config.hook.pytest_deselected(items=rest)


def by_turn(items: list, text: str) -> tuple[list, list]:
    """(tests that run, those that do not): of those marked in_turn only a turn runs. Both keep their order."""
    marked = [item for item in items if item.get_closest_marker("in_turn")]
    try:
        rest = {id(item) for item in marked} - {id(item) for item in marked[turn(text)]}
    except ValueError as error:
        raise pytest.UsageError(error) from None
    return [item for item in items if id(item) not in rest], [item for item in items if id(item) in rest]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "served" if Path(file).stem in SERVED else file

    return ByServer(config, log)
