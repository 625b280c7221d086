"""Divides the offloaded leaves into groups that take turns to close their windows.

The rule knows shapes, dtypes and order alone, so that a run has the same groups on any devices.
"""

import dataclasses
import math
from collections.abc import Sequence

from zenflow_jax._plan.leaf import LeafSpec
from zenflow_jax._plan.schedule import Schedule


def in_groups(
    specs: Sequence[LeafSpec], schedule: Schedule
) -> tuple[tuple[LeafSpec, ...], Schedule]:
    """The specs with their groups, and the schedule without groups that would have no leaf.

    Groups have nearly equal bytes: the largest leaf comes first, into the group with the least. Of
    leaves that are as large, and of groups that have as much, the first comes first.
    """
    sizes = {
        i: math.prod(spec.shape) * spec.dtype.itemsize
        for i, spec in enumerate(specs)
        if not spec.resident
    }
    filled = [0] * min(schedule.groups, max(len(sizes), 1))
    grouped = list(specs)
    for i in sorted(sizes, key=lambda i: (-sizes[i], i)):
        group = filled.index(min(filled))
        filled[group] += sizes[i]
        grouped[i] = dataclasses.replace(specs[i], group=group)
    return tuple(grouped), dataclasses.replace(schedule, groups=len(filled))
