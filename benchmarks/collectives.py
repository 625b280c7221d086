"""Reads the transfers between devices from a compiled program's text."""

import math
import re
from typing import NamedTuple

from benchmarks.program_text import elements, nbytes, parse

_KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_PARTITIONS = re.compile(r"num_partitions=(\d+)")


class Collective(NamedTuple):
    """One operation in a program."""

    kind: str
    nbytes: int  # of its result on one device
    group: int  # number of participating devices

    @property
    def sent(self) -> int:
        """Returns the bytes that each device sends, if a group's devices form a ring."""
        peers = self.group - 1
        shares = {
            "all-reduce": 2 * peers / self.group,  # a reduce-scatter, then an all-gather
            "reduce-scatter": peers,  # each result is one part in `group`
            "collective-permute": 1,
            "collective-broadcast": 1,
        }
        return round(self.nbytes * shares.get(self.kind, peers / self.group))


def collectives(program: str) -> list[Collective]:
    """Returns the operations between devices in a compiled program's text.

    An operation inside a loop is counted once.
    """
    partitions = _PARTITIONS.search(program)
    devices = int(partitions[1]) if partitions else 1
    operations = []
    for x in (x for each in parse(program).computations.values() for x in each.values()):
        kind = x.opcode.removesuffix("-start")
        if kind not in _KINDS:
            continue
        arrays = _arrays(x.shape)
        # A start also returns its arguments, before the results, except for an all-reduce, whose
        # results look the same.
        if x.opcode != kind != "all-reduce":
            if kind == "collective-permute":
                arrays = arrays[:2]  # drops two counters at the end
            arrays = arrays[len(arrays) // 2 :]
        operations.append(Collective(kind, sum(map(nbytes, arrays)), _group(x.attributes, devices)))
    return operations


def _arrays(shape: str) -> list[str]:
    """Returns the shapes of all arrays in a shape, whose tuples may be nested."""
    if not shape.startswith("("):
        return [shape]
    return [array for element in elements(shape) for array in _arrays(element)]


def _group(attributes: str, devices: int) -> int:
    """Returns the number of devices in an operation's groups, in any of XLA's notations."""
    if match := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):  # {{0,1},{2,3}}
        return len(match[1].split(","))
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):  # [groups,size]<=[devices]
        return int(match[1])
    ids = r"(?:, device_ids=\([^{]*\))?"
    if match := re.search(rf"replica_groups=mesh\[(.*?)\]{ids} ?\{{(.*?)\}}", attributes):
        # mesh['axis_0'=4,'axis_1'=2] {'axis_0'}; part of an axis is 'axis_1':(1)2; a different
        # device order is inserted as device_ids=([4,2]T(1,0)).
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        named = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", match[2])
        return math.prod(int(part or sizes[name]) for name, part in named)
    if re.search(r"replica_groups=(?!\{\})", attributes):
        raise ValueError(f"The device groups cannot be read in {attributes[:300]}")
    return devices
