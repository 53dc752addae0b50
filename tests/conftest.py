"""Fixtures that several test files share, and the tiers of tests (CONTRIBUTING.md)."""

import multiprocessing.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings
from server_fixture import make_tiny, start_server

from network import secrets

# The same examples each time, and no limit of seconds for one: whether a test passes follows from the code alone.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")

# Files that take longest, first: several run at a time, and the last ones should be short.
LONGEST = ["runs", "server", "limits", "resume", "sandbox", "mcp", "gradient", "vision_server"]

# Use the shared server: run by one process, as starting one takes a core 30 s.
SERVED = ("server", "runs", "async", "agents")
SERVED = [f"test_{name}" for name in SERVED]


@pytest.fixture(autouse=True)
def nothing_outlives_its_test():
    """A secret that was read stays in this process, and the next test, of another file perhaps, must not send it. A run
    that failed is still open, and its folder goes with the test."""
    with mock.patch.dict(secrets._read):
        yield
    if log := sys.modules.get("runlog.log"):
        log.OPEN.clear()


@pytest.fixture(scope="session", autouse=True)
def temporary_files():
    """What processes that tests kill leave in the temporary directory goes with it."""
    multiprocessing.util.get_temp_dir()  # removed after this one, so not in it
    with tempfile.TemporaryDirectory(prefix="tests-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield
        tempfile.tempdir = None


@pytest.fixture(scope="session")
def server():
    """A live server of the tiny random Llama in fp32, window 512, with adapters."""
    live = start_server(make_tiny(), "--dtype", "float32", "--max-model-len", "512", "--enable-lora")
    try:
        yield live.wait()
    finally:
        live.stop()
    assert live.process.returncode == 0, "an orderly end"


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of Chromium. Without it the tests of the page in a browser fail: nothing is skipped in silence."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    if not (found := next(filter(None, map(shutil.which, names)), None)):
        pytest.fail("no Chromium for the tests of the page: install it (Debian: apt install chromium)", pytrace=False)
    return found


def pytest_collection_modifyitems(config, items):
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "served" if Path(file).stem in SERVED else file

    return ByServer(config, log)
