"""Fixtures that several test files share."""

from server_fixture import server  # noqa: F401
