"""Splits a step into a chain of blocks: forward pieces between single crossing values.

A block ends where one forward value alone crosses to what comes later. Values that cross many such
places (an attention mask, the encoder's output, a U-Net's long skips) are set aside first: they are
*persistent*, held from their making to the end, and counted once. The backward operations are split
at the same places: each stretch belongs to the earliest block that it has read from so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planner.instance import Instance

# A value read later than this share of the forward operations after its making is persistent.
_LONG = 0.12


@dataclass(frozen=True)
class Block:
    """One block.

    Attributes:
        forward, backward: its operations, in order.
        source: value that it starts from (-1: only from outside); target: value it hands on (-1).
        kind: number shared by blocks that are equal up to renumbering.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    source: int
    target: int
    kind: int = -1


@dataclass(frozen=True)
class Chain:
    """The blocks of a step, and the values held beside them."""

    blocks: tuple[Block, ...]
    persistent: frozenset[int] = field(default_factory=frozenset)


def split(instance: Instance, shortest: int) -> Chain:
    """The chain of a step, with blocks of at least `shortest` forward operations.

    It is one block if no single value ever crosses alone.
    """
    b = instance.boundary
    last = [max((c for c in readers if c < b), default=-1) for readers in instance.consumers]
    persistent = {
        v
        for v, o in enumerate(instance.producer)
        if 0 <= o < b and last[v] - o > max(24, _LONG * b) and v not in instance.dropped
    }
    cuts = _cuts(instance, last, persistent, shortest)
    starts = [0, *(position + 1 for position, _ in cuts)]
    ends = [*starts[1:], b]
    joints = [-1, *(v for _, v in cuts), -1]
    backward = _backward(instance, starts, persistent, joints)
    blocks = [
        Block(tuple(range(starts[i], ends[i])), tuple(backward[i]), joints[i], joints[i + 1])
        for i in range(len(starts))
    ]
    return Chain(_with_kinds(instance, blocks), frozenset(persistent))


def _cuts(
    instance: Instance, last: Sequence[int], persistent: set[int], shortest: int
) -> list[tuple[int, int]]:
    """(position, value): after this operation the value alone crosses."""
    crossing: set[int] = set()
    ending: dict[int, list[int]] = {}
    cuts: list[tuple[int, int]] = []
    previous = -1
    for o in range(instance.boundary):
        crossing.difference_update(ending.pop(o, ()))
        for v in instance.makes[o]:
            if last[v] > o and v not in persistent and instance.size[v]:
                crossing.add(v)
                ending.setdefault(last[v], []).append(v)
        if len(crossing) == 1 and o - previous >= shortest:
            (v,) = crossing
            if v not in instance.dropped:
                cuts.append((o, v))
                previous = o
    return cuts


def _backward(
    instance: Instance, starts: Sequence[int], persistent: set[int], joints: Sequence[int]
) -> list[list[int]]:
    """Backward operations by block: contiguous stretches, the last block's first."""
    block_of = [0] * instance.boundary
    for i, start in enumerate(starts):
        for o in range(start, starts[i + 1] if i + 1 < len(starts) else instance.boundary):
            block_of[o] = i
    reader = {v: i for i, v in enumerate(joints) if v >= 0}  # a joint counts for its reader
    result: list[list[int]] = [[] for _ in starts]
    current = len(starts) - 1
    for t in range(instance.boundary, instance.count):
        for v in instance.reads[t]:
            o = instance.producer[v]
            if 0 <= o < instance.boundary and v not in persistent:
                current = min(current, reader.get(v, block_of[o]))
        result[current].append(t)
    return result


def _with_kinds(instance: Instance, blocks: Sequence[Block]) -> tuple[Block, ...]:
    seen: dict[tuple[object, ...], int] = {}
    return tuple(
        Block(x.forward, x.backward, x.source, x.target, seen.setdefault(_key(instance, x), i))
        for i, x in enumerate(blocks)
    )


def _key(instance: Instance, block: Block) -> tuple[object, ...]:
    """Equal for blocks that differ only in the numbers of operations and values."""
    names: dict[int, int] = {}
    rows: list[object] = []
    inside = {*block.forward, *block.backward}
    for o in (*block.forward, *block.backward):
        touched = (*instance.reads[o], *instance.makes[o])
        named = tuple(names.setdefault(v, len(names)) for v in touched)
        rows.append((len(instance.reads[o]), named, instance.time[o], instance.workspace[o]))
        rows.append((instance.again[o], instance.state[o] >= 0))
    leaves = tuple(any(c not in inside for c in instance.consumers[v]) for v in names)
    held = tuple(instance.held[v] for v in names)
    sizes = tuple(instance.size[v] for v in names)
    joints = (names.get(block.source, -1), names.get(block.target, -1))
    return (*rows, leaves, held, sizes, joints)
