"""How much memory of the device an engine has in use beside the step: for plans and benchmarks."""

import dataclasses
import math

from zenflow_jax._device.state import ZenFlowState


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device that an engine may have in use while a step runs, by what they are for.

    The step's own program has its arguments, results and temporaries besides, gradients included.
    A merge runs between two steps: it takes the memory of its uploads, and for a leaf that is cut
    into ranges a new one for the whole leaf.
    """

    uploads: int  # updates that wait to be merged; `prefetch_bytes` bounds them
    mail: int  # gradients of the step before, or a group's sums, until they are in host memory

    @property
    def total(self) -> int:
        return self.uploads + self.mail


def device_memory(state: ZenFlowState) -> DeviceMemory:
    """What the engine of this state may have there; the state may be one of shapes alone.

    On a mesh a device has its parts of this.

    Args:
        state: As `zenflow(...).init` returns it.
    """
    schedule = state.schedule
    updates, mails = [0] * schedule.groups, [0] * schedule.groups
    for leaf in state.leaves:
        for spec in leaf.spec.ranges if leaf.offloaded else ():
            size = math.prod(spec.shape)
            updates[spec.group] += size * spec.dtype.itemsize
            mails[spec.group] += size * spec.mail_dtype.itemsize
    # In turn, the updates of so many groups wait at once; together, one of all.
    waiting = min(schedule.staleness or 1, schedule.groups)
    neighbours = [*updates, *updates]
    under_way = 0
    if not state.send_gradients.in_step:
        under_way = max(mails) if state.send_gradients.sums_on_device else sum(mails)
    return DeviceMemory(
        uploads=max(sum(neighbours[j : j + waiting]) for j in range(schedule.groups)),
        mail=under_way,
    )
