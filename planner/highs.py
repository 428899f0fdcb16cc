"""HiGHS in a process of its own, which ends itself if a program takes too long.

HiGHS looks at no clock in parts of its presolve, and on some programs of HiGHS 1.16 these never
end (strengthening of rows, parallel rows and columns). Nothing in the same process can stop it
then, so a child solves, one program after the other, and dies `GRACE` seconds after its limit at
the latest. The file runs by itself there: of its own imports only numpy and highspy are loaded.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np

GRACE = 5.0  # seconds after the time limit; large programs pass it a little in good faith
NO_LIMIT = 0.0


class Child:
    """The process that solves. Starts at the first program, and anew after one that was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._alone = not sys.executable or getattr(sys, "frozen", False)

    def ask(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer of `solved`, or None if the child was ended before it had one."""
        with self._lock:
            process = self._started()
            if process is None:
                _greeted()
                return solved(request)
            assert process.stdin is not None and process.stdout is not None
            try:
                pickle.dump(request, process.stdin)
                process.stdin.flush()
                answer: dict[str, Any] = pickle.load(process.stdout)
            except (EOFError, OSError, pickle.UnpicklingError):
                self._end()
                return None
            except BaseException:  # an interrupt: what the child says next answers nobody
                self._end()
                raise
        return answer

    def _started(self) -> subprocess.Popen[bytes] | None:
        """The child; None where none can be had, as in a program that has Python built in."""
        if self._owner != os.getpid():  # a forked process must not share its parent's pipes
            self._process = None
        if self._process is None and not self._alone:
            self._owner = os.getpid()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                assert self._process.stdout is not None
                pickle.load(self._process.stdout)  # it has found its libraries
            except (EOFError, OSError, pickle.UnpicklingError):
                self._end()
                self._alone = True
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            process.wait()


CHILD = Child()


def solved(request: dict[str, Any]) -> dict[str, Any]:
    """Solves one program.

    `request` has the arrays of `HighsLp` (rows of the matrix in `starts`, `indices` and
    `coefficients`), `integer` (None for a linear program), `options` and `start`, which maps
    columns to values to begin with. The answer has `infeasible`, `found`, `optimal`, `bound`,
    `values`, `duals` and, in words, `status`.
    """
    import highspy

    mixed = request["integer"] is not None
    highs = highspy.Highs()
    for key, option in request["options"].items():
        highs.setOptionValue(key, option)
    highs.passModel(_model(highspy, request))
    if request["start"]:
        columns = np.array(list(request["start"]), dtype=np.int32)
        highs.setSolution(len(columns), columns, np.array(list(request["start"].values())))
    highs.run()
    status, info, kinds = highs.getModelStatus(), highs.getInfo(), highspy.HighsModelStatus
    solution = highs.getSolution()
    found = info.primal_solution_status == 2  # kSolutionStatusFeasible
    return {
        "status": str(status),
        "infeasible": status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible),
        "found": found,
        "optimal": status == kinds.kOptimal,
        "bound": float(info.mip_dual_bound if mixed else info.objective_function_value),
        "values": tuple(solution.col_value) if found else (),
        "duals": () if mixed else tuple(solution.row_dual),
    }


@functools.cache
def _greeted() -> None:
    """Makes the first solver of the process, which prints a banner on its standard output.

    No option stops that, and our standard output may be JSON that somebody reads.
    """
    import highspy

    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        highspy.Highs()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _model(highspy: Any, request: dict[str, Any]) -> Any:
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(request["cost"]), len(request["row_lower"])
    lp.col_cost_ = request["cost"]
    lp.col_lower_, lp.col_upper_ = request["lower"], request["upper"]
    lp.row_lower_, lp.row_upper_ = request["row_lower"], request["row_upper"]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = request["starts"]
    lp.a_matrix_.index_ = request["indices"]
    lp.a_matrix_.value_ = request["coefficients"]
    if request["integer"] is not None:
        kinds = highspy.HighsVarType
        lp.integrality_ = [kinds.kInteger if i else kinds.kContinuous for i in request["integer"]]
    return lp


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    import highspy  # noqa: F401

    pickle.dump("ready", answers)
    answers.flush()
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            request = pickle.load(requests)
            seconds = request["options"].get("time_limit", NO_LIMIT)
            if "time_limit" in request["options"]:
                faulthandler.dump_traceback_later(seconds + GRACE, exit=True)
            answer = solved(request)
            faulthandler.cancel_dump_traceback_later()
            pickle.dump(answer, answers)
            answers.flush()


if __name__ == "__main__":
    # The banner must not get between the answers.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    _serve(sys.stdin.buffer, pipe)
