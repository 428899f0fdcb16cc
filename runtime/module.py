"""Puts a planned call in a module's place, and takes it away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runtime.torch_private import install_call, installed_call, plain_call, remove_call

__all__ = ["install", "is_installed", "plain_call", "uninstall"]


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
