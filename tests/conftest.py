"""What holds for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.long import LONG
from tracer.measured import MeasuredCosts

# Tests are not timed: an example takes long where the machine is busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(LONG):
            item.add_marker("long")


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> None:
    """Spares the garbage collector what imports and earlier tests keep alive: millions of objects.

    Each full collection, and each measurement makes one, would go through all of them; a fifth of
    the tests' time went there.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _quick_costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Operations are timed for a moment, into a cache that is gone afterwards.

    What a plan does must be right whatever things cost, and two tests at a time disturb each
    other's clock anyway; tests of the costs themselves say how long they want to measure.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    defaults = MeasuredCosts.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "seconds", 0.02)
        patch.setenv("CHECKPOINT_PLANNER_CACHE", str(shared / "costs"))
        yield
