"""Accelerate: a context manager around the training loop, in the manner of its `LocalSGD`.

>>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
>>> with Planned(accelerator, model, optimizer, budget_gb=32):
...     for batch in loader:
...         ...  # the loop as it was
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from planner.integrations.common import Planning, figures
from planner.plan import Plan

logger = get_logger(__name__)


class Planned:
    """Plans a prepared model on its first batch, within a budget, while the context lasts.

    The plan is logged when it is made: its table at level INFO on the main process, its figures
    through `accelerator.log` if trackers were set up.

    Args:
        accelerator: that prepared the model.
        model: as `accelerator.prepare` returned it.
        optimizer: the same, or the plain one; its state counts towards the peak.
        options: of `planner.plan`: `budget_gb=`, `solver=`, `keep=`, ...
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: Any = None,
        **options: Any,
    ) -> None:
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._planning = Planning(options)

    def __enter__(self) -> torch.nn.Module:
        if self._planning.start(self._model, self._optimizer, self._log) is None:
            logger.warning("the model has a plan already, which stays as it is")
        return self._model

    def __exit__(self, *_: object) -> None:
        self._planning.stop()

    def _log(self, made: Plan) -> None:
        logger.info("%s", made)
        if self._accelerator.trackers:
            self._accelerator.log(figures(made), step=self._accelerator.step)
