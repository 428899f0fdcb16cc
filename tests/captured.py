"""What torch captures while a test runs."""

from __future__ import annotations

from typing import Any

import pytest

from planner.engine import Engine


def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every joint graph captured from now on."""
    found: list[Any] = []
    original = Engine._executor

    def counting(self: Engine, joint: Any) -> Any:
        found.append(joint)
        return original(self, joint)

    monkeypatch.setattr(Engine, "_executor", counting)
    return found
