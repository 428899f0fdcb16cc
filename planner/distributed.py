"""One plan for all ranks of a distributed job.

A plan is made once, by the first rank that needs it (rank 0 has a head start), and published in
the job's key-value store under a key that says what it is for: the fingerprint of the graph, the
budget, the solver. Every other rank that comes to the same key takes the published plan, and checks
it against its own graph: fingerprint, validity of the schedule, peak within the budget.

There is no collective in this. A rank may need a plan that no other rank needs (a shape that only
its shard of the data has), at any time, and a collective would then wait for ranks that never come.
A rank whose maker falls silent makes the plan itself: it never waits on the dead.

Ranks may even run different plans: collectives inside a graph are never recomputed, and first runs
keep the order of the captured graph, so every rank calls them in the same sequence.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from planner import plan_file
from planner.parts import parts
from planner.plan import Plan
from planner.problem import Problem
from planner.request import Request
from runtime.schedule import ScheduleError
from runtime.torch_private import job_store
from tracer.capture import JointGraph
from tracer.costs import storage_bytes
from tracer.errors import InfeasibleBudget
from tracer.operators import is_collective, tensors_of

log = logging.getLogger("planner")

HEAD_START = 2.0  # seconds that other ranks leave rank 0 to begin
SILENCE = 20.0  # seconds without a sign of life after which a maker is given up
_BEAT = 1.0
_POLL = 0.02
_HELD = 3  # collectives whose tensors a backend may still hold


def world_size() -> int:
    """Ranks in the job; 1 outside of a distributed job."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def in_flight_bytes(joint: JointGraph) -> int:
    """Room for collectives that the backend holds a little longer than the graph does.

    A thread of gloo lets go of its tensors some time after the waiting rank goes on, and there are
    two; a third stands for one that NCCL's watchdog has not seen to be done.
    """
    calls = [n for n in joint.module.graph.nodes if n.op == "call_function" and is_collective(n)]
    return _HELD * max((sum(map(storage_bytes, tensors_of(n))) for n in calls), default=0)


def shared_plan(
    problems: Sequence[Problem],
    request: Request,
    make: Callable[[], Plan],
    peak_of: Callable[[Sequence[Sequence[int]]], int],
) -> Plan:
    """The plan of the job for a step: made here, or taken from the rank that made it.

    Args:
        problems: of the step's captured graphs, one for each piece.
        request: what the person asked for.
        make: makes the plan on this rank.
        peak_of: this rank's peak under given orders of the pieces.

    Raises:
        InfeasibleBudget: the maker found that the budget cannot be kept; so every rank raises.
    """
    store = job_store() if world_size() > 1 else None
    if store is None:
        return make()
    board = _Board(store, _key(problems, request), dist.get_rank())
    if board.claim():
        return board.publish(make)
    published = board.wait()
    if published is not None and _fits(published, problems, peak_of):
        log.info("plan %s taken from rank %d", published.fingerprint, board.maker)
        return published
    return make()


def _key(problems: Sequence[Problem], request: Request) -> str:
    """What must be equal for a plan to be shared: graph, what is held besides it, and request."""
    said: list[Any] = [
        problems[0].budget_bytes if request.budget_bytes is not None else "auto",
        request.solver,
        request.hardware,
        request.in_flight,
        torch.__version__,
    ]
    for problem in problems:
        graph = problem.graph
        said += [graph.fingerprint(costs=False), graph.accumulate, graph.fixed_bytes]
        said += [sorted(problem.keep), sorted(problem.recompute)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def _fits(
    plan: Plan, problems: Sequence[Problem], peak_of: Callable[[Sequence[Sequence[int]]], int]
) -> bool:
    """Whether a plan from another rank runs this rank's graphs, within this rank's budget."""
    own = parts(plan)
    if [p.fingerprint for p in own] != [p.graph.fingerprint(costs=False) for p in problems]:
        log.warning("a plan from another rank is for another graph; this rank plans by itself")
        return False
    try:
        peak = peak_of([p.order for p in own])
    except (ScheduleError, IndexError):
        log.warning("a plan from another rank does not run here; this rank plans by itself")
        return False
    if peak > problems[0].budget_bytes:
        log.warning("a plan from another rank is over this rank's budget: it plans by itself")
        return False
    return True


@dataclass
class _Board:
    """One key of the store: who makes the plan, whether it lives, and the plan."""

    store: Any  # a torch.distributed.Store
    key: str
    rank: int
    maker: int = -1

    def claim(self) -> bool:
        """Whether this rank is the one to make the plan."""
        if self.rank:
            self._wait_for("maker", HEAD_START)
        won = self.store.compare_set(self._name("maker"), "", str(self.rank))
        self.maker = int(won)
        return self.maker == self.rank and not self.store.check([self._name("plan")])

    def publish(self, make: Callable[[], Plan]) -> Plan:
        """Makes the plan and publishes it, or the reason why there is none."""
        with self._beating():
            try:
                plan = make()
            except InfeasibleBudget as error:
                self._set("plan", {"infeasible": error.__reduce__()[1]})
                raise
            except BaseException as error:  # the others find their own reason
                self._set("plan", {"failed": repr(error)})
                raise
            self._set("plan", {"plan": plan_file.to_text(plan.to_dict())})
        return plan

    def wait(self) -> Plan | None:
        """The published plan; None if its maker failed or fell silent."""
        seen, since = -1, time.monotonic()
        while not self.store.check([self._name("plan")]):
            beats = self.store.add(self._name("beats"), 0)
            if beats != seen:
                seen, since = beats, time.monotonic()
            if time.monotonic() - since > SILENCE:
                log.warning("rank %d, which makes the plan, is silent", self.maker)
                return None
            time.sleep(_POLL)
        said = json.loads(self.store.get(self._name("plan")))
        if "infeasible" in said:
            budget, minimum, limiting = said["infeasible"]
            raise InfeasibleBudget(budget, minimum, tuple((str(w), int(n)) for w, n in limiting))
        if "plan" not in said:
            return None
        return plan_file.from_text(said["plan"], f"the plan of rank {self.maker}", Plan)

    def _wait_for(self, name: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.store.check([self._name(name)]):
            time.sleep(_POLL)

    def _set(self, name: str, value: object) -> None:
        self.store.set(self._name(name), json.dumps(value))

    def _name(self, name: str) -> str:
        return f"checkpoint_planner/{self.key}/{name}"

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Shows that this rank is alive while it works."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_BEAT):
                try:
                    self.store.add(self._name("beats"), 1)
                except Exception:  # the store is gone, and with it whoever would look
                    return

        thread = threading.Thread(target=beat, daemon=True, name="planner-beat")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
