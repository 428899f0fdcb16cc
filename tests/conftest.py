"""What holds for every test."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> None:
    """Spares the garbage collector what imports and earlier tests keep alive: millions of objects.

    Each full collection, and each measurement makes one, would go through all of them; a fifth of
    the tests' time went there.
    """
    gc.collect()
    gc.freeze()
