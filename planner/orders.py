"""From decisions to an order of operations.

Every order in which first runs keep their places and operations are inserted again after their
first run is a valid program: `Schedule.from_order` holds each value until its last read before it
is made again. So a builder cannot fail; it can only cost too much memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from planner.instance import Instance


def lazy_order(instance: Instance, saved: Collection[int]) -> list[int]:
    """Keeps `saved` (and what cannot be made again) over the boundary, makes the rest again.

    Each operation runs again right before the first backward operation that needs it, once; its
    outputs are then held until their last use.
    """
    order = list(range(instance.boundary))
    there = held_at_boundary(instance, saved)
    for o in range(instance.boundary, instance.count):
        make_available(instance, instance.reads[o], there, order)
        order.append(o)
        there.update(instance.makes[o])
    return order


def held_at_boundary(instance: Instance, saved: Collection[int]) -> set[int]:
    """What is there after the boundary if `saved` is: also what cannot be made again."""
    there = set(saved)
    for v, o in enumerate(instance.producer):
        if o < 0 or not instance.again[o] or instance.held[v]:
            there.add(v)
    return there


def make_available(
    instance: Instance, wanted: Collection[int], there: set[int], order: list[int]
) -> None:
    """Appends to `order` the operations that make the missing ones of `wanted`, inputs first."""
    stack = [v for v in reversed(list(wanted)) if v not in there]
    while stack:
        v = stack[-1]
        if v in there:
            stack.pop()
            continue
        o = instance.producer[v]
        missing = [u for u in instance.reads[o] if u not in there]
        if missing:
            stack.extend(reversed(missing))
            continue
        order.append(o)
        there.update(instance.makes[o])
        stack.pop()


def staged_order(
    instance: Instance, moments: Sequence[tuple[int, int]], held: Sequence[Collection[int]]
) -> list[int]:
    """An order that holds, of what was made before, the given values at each moment.

    Between moments operations run again as late as they can. Moments are those of
    `planner.staged_program`, sorted; `held` has one set for each.
    """
    order: list[int] = []
    there: set[int] = set()
    number = 0
    for t in range(instance.count):
        while number < len(moments) and moments[number] < (t, t):
            there = _only(instance, held[number], there, t, order)
            number += 1
        make_available(instance, instance.reads[t], there, order)
        if number < len(moments) and moments[number] == (t, t):
            there = _only(instance, held[number], there, t, order)
            number += 1
        order.append(t)
        there.update(instance.makes[t])
    return order


def _only(
    instance: Instance, wanted: Collection[int], there: set[int], t: int, order: list[int]
) -> set[int]:
    """Makes the wanted values, as far as they were made before `t`, and drops all others."""
    made = sorted(
        v for v in wanted if instance.producer[v] < t and v != instance.state[instance.producer[v]]
    )
    make_available(instance, made, there, order)
    return held_at_boundary(instance, made)
