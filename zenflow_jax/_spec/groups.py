"""Divides the offloaded leaves into groups that take turns closing their windows.

The rule uses only shapes, dtypes and order, so a run's groups do not depend on its devices, with
one exception: if a mesh divides the layers of a stack, the stack stays in one piece.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from zenflow_jax._spec.leaf import LeafSpec
from zenflow_jax._spec.schedule import Schedule

#: The largest ratio of group sizes for which stacked leaves are not cut.
UNEVEN = 1.5
#: Limits on the size of a stacked leaf's ranges, as multiples of the mean group size, in the order
#: in which they are tried. At each range's boundary, the device copies the whole leaf, so large
#: ranges come first.
_RANGE_LIMITS = (math.inf, 1.0, 0.5, 0.25)


def assign_groups(
    specs: Sequence[LeafSpec], schedule: Schedule
) -> tuple[tuple[LeafSpec, ...], Schedule]:
    """Returns the specs with their groups, and the schedule without empty groups.

    The largest leaf comes first; each leaf goes into the group with the fewest bytes. If the groups
    are still uneven, stacked leaves are cut into ranges of layers in different groups.
    """
    offloaded = {i: spec for i, spec in enumerate(specs) if not spec.resident}
    if not offloaded:
        return tuple(specs), dataclasses.replace(schedule, groups=1)
    mean = sum(map(_nbytes, offloaded.values())) / schedule.groups
    tried = []
    for limit in _RANGE_LIMITS:
        cut = {i: _cut(spec, limit * mean, schedule.groups) for i, spec in offloaded.items()}
        filled, assigned = _assign(cut, schedule.groups)
        tried.append((max(filled), len(filled), assigned))
        if len(filled) == schedule.groups and max(filled) <= UNEVEN * min(filled):
            break
    _, groups, assigned = min(tried, key=lambda attempt: attempt[0])
    grouped = (
        dataclasses.replace(spec, groups=assigned[i]) if i in assigned else spec
        for i, spec in enumerate(specs)
    )
    return tuple(grouped), dataclasses.replace(schedule, groups=groups)


def group_specs(specs: Sequence[LeafSpec], group: int) -> dict[int, LeafSpec]:
    """Returns a group's leaves, or ranges of leaves, by leaf number."""
    return {
        i: spec.ranges[spec.groups.index(group)]
        for i, spec in enumerate(specs)
        if not spec.resident and group in spec.groups
    }


def _nbytes(spec: LeafSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _cut(spec: LeafSpec, limit: float, groups: int) -> LeafSpec:
    """Cuts the leaf into the fewest ranges with at most `limit` bytes each."""
    place = spec.placement
    if not spec.stack or (place is not None and place.part[0]):
        return spec
    count = min(math.ceil(_nbytes(spec) / limit), spec.shape[0], groups)
    return dataclasses.replace(spec, groups=(0,) * max(count, 1))


def _assign(
    specs: Mapping[int, LeafSpec], groups: int
) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    sizes = {
        (i, j): _nbytes(part) for i, spec in specs.items() for j, part in enumerate(spec.ranges)
    }
    filled = [0] * min(groups, len(sizes))
    assigned = {i: [-1] * len(spec.groups) for i, spec in specs.items()}
    for i, j in sorted(sizes, key=lambda part: (-sizes[part], part)):
        free = [group for group in range(len(filled)) if group not in assigned[i]]
        group = min(free, key=lambda group: filled[group])
        filled[group] += sizes[i, j]
        assigned[i][j] = group
    return filled, {i: tuple(leaf_groups) for i, leaf_groups in assigned.items()}
