"""Ranks that wait for another: all groups have --dist_timeout, and who is waited for is named before torch gives up."""

import time

import pytest
from live import running, trainer

SECONDS = 3.0


@pytest.mark.parametrize("how", [[], ["stop"]])
def test_the_rank_that_is_waited_for_is_named(how, tmp_path):
    """Rank 1 waits in a group with rank 3; rank 0 in one with rank 1, and names rank 3 all the same."""
    with running(trainer(tmp_path / "log", str(SECONDS), *how, ranks=4, script="tests/waiting_worker.py")) as ranks:
        ranks.until(lambda: ranks.text.count("limits of") == 4)
        start = time.monotonic()
        ranks.until(lambda: any(member.poll() is not None for member in ranks.members[:3]) or None)
        waited = time.monotonic() - start
        assert all(member.wait(10) for member in ranks.members[:3]), ranks.text
    assert ranks.text.count(f"limits of 3 groups: [{1.5 * SECONDS}]") == 4, ranks.text
    assert 3 * SECONDS <= waited < 4.4 * SECONDS, ranks.text  # torch would have taken half as long again: 4.5
    said = [line for line in ranks.text.splitlines() if "] waited" in line]
    assert said and "Traceback" not in ranks.text[: ranks.text.index(said[0])]  # gloo's own comes after, if at all
    for line in said:
        assert "waited 3 s (--dist_timeout) in main, waiting_worker.py:" in line and "for rank 3 on " in line, line
        assert ("when it was last heard of" if how else "in stall, waiting_worker.py:") in line, line
