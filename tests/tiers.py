"""Many of a kind: a few of them by default, all in the tier `all`."""

from collections.abc import Iterable

import pytest


def by_default(first: Iterable, every: Iterable) -> list:
    """Parameters of a test: those of `every` that are not in `first` are marked slow."""
    first = list(first)
    return [one if one in first else pytest.param(one, marks=pytest.mark.slow) for one in every]
