"""Puts a planned call in a module's place, and takes it away again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from runtime.torch_private import (
    backward_hooks,
    install_call,
    installed_call,
    plain_call,
    remove_call,
    set_backward_hooks,
)

__all__ = ["install", "is_installed", "plain_call", "uninstall", "without_backward_hooks"]


def install(module: torch.nn.Module, call: Callable[..., Any], plan: object) -> None:
    """Makes `module(...)` run `call`, and sets `module.plan`."""
    install_call(module, call)
    module.plan = plan  # type: ignore[assignment]


def uninstall(module: torch.nn.Module) -> None:
    """Undoes `install`."""
    remove_call(module)
    if "plan" in module.__dict__:
        del module.plan


def is_installed(module: torch.nn.Module, call: Callable[..., Any]) -> bool:
    """Whether this very call is in place."""
    return installed_call(module) is call


@contextmanager
def without_backward_hooks(module: torch.nn.Module) -> Iterator[list[str]]:
    """Takes the full backward hooks off all submodules for a while; gives the names of those."""
    found = [(n or "model", m, backward_hooks(m)) for n, m in module.named_modules()]
    found = [(n, m, hooks) for n, m, hooks in found if any(hooks)]
    try:
        for _, m, _ in found:
            set_backward_hooks(m, ({}, {}))
        yield [n for n, _, _ in found]
    finally:
        for _, m, hooks in found:
            set_backward_hooks(m, hooks)
