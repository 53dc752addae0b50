"""As test_push.py, to a server in bfloat16."""

import pytest
from server_fixture import make_tiny, start_server
from test_push import check, push_all


@pytest.fixture(scope="module")
def bfloat16_server():
    live = start_server(make_tiny(), "--dtype", "bfloat16", "--max-model-len", "512")
    try:
        yield live.wait()
    finally:
        live.stop()


def test_pushed_weights_are_the_trainers_in_bf16(bfloat16_server, tmp_path):
    check(push_all(bfloat16_server, "bfloat16", tmp_path / "out.json"), 0.05)
