"""One step at many sizes: few traces, and graphs of the sizes between them.

The batch, the sequence length or the number of layers is the *size*. Where two traces have the same
operations, everything about a size between or near them (bytes, workspace, time) is taken from the
polynomial through the nearest two or three traced sizes. Bytes are sums of products of dimensions,
linear in the batch and at most quadratic in the sequence, so that this is exact up to the
allocator's rounding and the padding inside kernels' workspace; times follow the cost model only
about. A size far from the traced ones, or of another structure (more layers), is traced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracer.graph import ComputationGraph, Kind

_NEAR = 1.25  # up to this factor beyond the traced sizes a graph is derived and not traced
_MOST = 3  # traced sizes that a polynomial goes through


@dataclass(frozen=True, eq=False)
class Sized:
    """The step at one size; `traced` says whether it was traced or derived."""

    graph: ComputationGraph
    traced: bool


class Family:
    """Graphs by size.

    Args:
        trace: traces the step at a size.
    """

    def __init__(self, trace: Callable[[int], ComputationGraph]) -> None:
        self._trace = trace
        self.traced: dict[int, ComputationGraph] = {}
        self._derived: dict[int, tuple[tuple[int, ...], Sized]] = {}

    def at(self, size: int) -> Sized:
        """The step at a size, derived where that is safe."""
        if size in self.traced:
            return Sized(self.traced[size], True)
        near = self._support(size)
        if near is None:
            return Sized(self.exactly(size), True)
        if size not in self._derived or self._derived[size][0] != near:
            self._derived[size] = near, Sized(self._between(near, size), False)
        return self._derived[size][1]

    def exactly(self, size: int) -> ComputationGraph:
        """The step at a size, traced."""
        if size not in self.traced:
            self.traced[size] = canonical(self._trace(size))
        return self.traced[size]

    def _support(self, size: int) -> tuple[int, ...] | None:
        """Traced sizes to derive a graph from; None if it should be traced."""
        known = sorted(self.traced, key=lambda n: (abs(n - size), n))
        if len(known) < 2 or not min(known) / _NEAR <= size <= max(known) * _NEAR:
            return None
        shape = structure(self.traced[known[0]])
        alike = [n for n in known if structure(self.traced[n]) == shape]
        inside = min(alike) / _NEAR <= size <= max(alike) * _NEAR
        return tuple(alike[:_MOST]) if len(alike) > 1 and inside else None

    def _between(self, near: tuple[int, ...], size: int) -> ComputationGraph:
        weights = _lagrange(near, size)
        graphs = [self.traced[n] for n in near]

        def blend(rows: list[list[int]]) -> list[int]:
            table: NDArray[np.float64] = np.array(rows, dtype=np.float64)
            return [max(0, math.ceil(x - 1e-6)) for x in np.tensordot(weights, table, 1)]

        times = blend([[op.time_ns for op in g.operations] for g in graphs])
        spaces = blend([[op.workspace for op in g.operations] for g in graphs])
        sizes = blend([[v.nbytes for v in g.values] for g in graphs])
        fixed = blend([[n for _, n in g.fixed_bytes] for g in graphs])
        first = graphs[0]
        return ComputationGraph(
            tuple(
                dataclasses.replace(op, time_ns=t, workspace=w)
                for op, t, w in zip(first.operations, times, spaces, strict=True)
            ),
            tuple(
                dataclasses.replace(v, nbytes=n) for v, n in zip(first.values, sizes, strict=True)
            ),
            tuple((who, n) for (who, _), n in zip(first.fixed_bytes, fixed, strict=True)),
            first.accumulate,
        )


def canonical(graph: ComputationGraph) -> ComputationGraph:
    """The same step without values that nobody reads, makes or holds.

    A capture whose sizes may vary has its sizes among its inputs, another one has not.
    """
    used = {v for op in graph.operations for v in (*op.inputs, *op.outputs, op.state)}
    kept = [v for v in graph.values if v.index in used or v.nbytes or v.kind is not Kind.RESIDENT]
    number = {v.index: i for i, v in enumerate(kept)}
    return ComputationGraph(
        tuple(
            dataclasses.replace(
                op,
                inputs=tuple(number[v] for v in op.inputs),
                outputs=tuple(number[v] for v in op.outputs),
                state=None if op.state is None else number[op.state],
            )
            for op in graph.operations
        ),
        tuple(dataclasses.replace(v, index=number[v.index]) for v in kept),
        graph.fixed_bytes,
        graph.accumulate,
    )


def _lagrange(at: tuple[int, ...], x: int) -> NDArray[np.float64]:
    """Weights with which values at `at` give that of the polynomial through them at `x`."""
    return np.array(
        [math.prod((x - b) / (a - b) for b in at if b != a) for a in at], dtype=np.float64
    )


def structure(graph: ComputationGraph) -> tuple[object, ...]:
    """What two graphs must share so that one can stand for the other at another size."""
    operations = tuple(
        (op.target, op.phase, op.inputs, op.outputs, op.recomputable, op.state)
        for op in graph.operations
    )
    values = tuple((v.kind, v.producer, v.dtype) for v in graph.values)
    return operations, values, tuple(who for who, _ in graph.fixed_bytes), graph.accumulate
