"""Lightning: a callback.

>>> trainer = Trainer(callbacks=[PlanCallback(budget_gb=32)])
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from planner.integrations.common import Planning, figures
from planner.plan import Plan
from tracer.errors import PlannerError


class PlanCallback(Callback):
    """Plans a module on the first batch of `trainer.fit`, within a budget.

    What is planned is the module that `training_step` calls: the `LightningModule` itself if it
    has a forward of its own, else its only submodule with parameters. The plan is logged when it
    is made: its table through `rank_zero_info`, its figures with the trainer's logger. It is taken
    away when training ends.

    Args:
        module: name of the submodule to plan, such as "model", if it is not found as above.
        options: of `planner.plan`: `budget_gb=`, `solver=`, `keep=`, ... The optimizer is the
            trainer's, if there is one only.

    Raises:
        PlannerError: an option makes no sense here, or it is not clear what to plan.
    """

    def __init__(self, module: str | None = None, **options: Any) -> None:
        self._module = module
        self._planning = Planning(options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def log(made: Plan) -> None:
            rank_zero_info(str(made))
            for each in trainer.loggers:
                each.log_metrics(figures(made), step=trainer.global_step)

        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        if self._planning.start(self._planned(pl_module), optimizer, log) is None:
            rank_zero_warn("the module has a plan already; PlanCallback leaves it as it is")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._planning.stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._planning.stop()

    def _planned(self, pl_module: LightningModule) -> torch.nn.Module:
        """The module whose call is planned."""
        if self._module is not None:
            try:
                return pl_module.get_submodule(self._module)
            except AttributeError as error:
                raise PlannerError(f"module={self._module!r}: {error}") from error
        if type(pl_module).forward is not LightningModule.forward:
            return pl_module
        children = [n for n, m in pl_module.named_children() if any(True for _ in m.parameters())]
        if len(children) == 1:
            return pl_module.get_submodule(children[0])
        raise PlannerError(
            f"{type(pl_module).__name__} has no forward, and its submodules with parameters are "
            f"{', '.join(children) or 'none'}: say which one training_step calls, with "
            'PlanCallback(module="...")'
        )
