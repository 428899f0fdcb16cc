"""Hugging Face `Trainer`: a callback.

>>> trainer = Trainer(model, args, train_dataset=data, callbacks=[PlanCallback(budget_gb=32)])
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from planner.integrations.common import Planning, figures
from planner.plan import Plan

logger = logging.get_logger(__name__)


class PlanCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked here
    """Plans the model of a `Trainer` on the first batch, within a budget.

    The plan is logged when it is made: its table at level INFO, its figures as an entry of
    `trainer.state.log_history`. It is taken away when training ends. A model that has a plan
    already is left as it is.

    Args:
        options: of `planner.plan`: `budget_gb=`, `solver=`, `keep=`, ... The optimizer is the
            trainer's.

    Raises:
        PlannerError: an option makes no sense here. Training raises what planning raises, such as
            `InfeasibleBudget`, at the first batch.
    """

    def __init__(self, **options: Any) -> None:
        self._planning = Planning(options)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        def log(made: Plan) -> None:
            logger.info("%s", made)
            state.log_history.append({**figures(made), "step": state.global_step})

        model.train()
        if self._planning.start(model, optimizer, log) is None:
            logger.warning("the model has a plan already; PlanCallback leaves it as it is")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._planning.stop()
