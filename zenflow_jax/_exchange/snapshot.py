"""The host's leaves as of one moment, for a saver that reads them while the run goes on.

A leaf that is written before it is saved is copied, if there is room for copies; else its writer
waits for the saver, which takes that leaf next.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from zenflow_jax._host.leaf import HostLeaf

# How often somebody who waits looks whether it should end.
_LOOK_S = 0.1


class Snapshot:
    """Leaves as of one moment, in the order in which they will be written."""

    def __init__(self, leaves: Mapping[int, HostLeaf], copy_bytes: int):
        self._condition = threading.Condition()
        self._unsaved = {i: leaf.alias() for i, leaf in leaves.items()}
        self._copied: set[int] = set()
        self._room = copy_bytes
        self._in_use: int | None = None  # the leaf whose memory the saver reads
        self._wanted: int | None = None

    @property
    def done(self) -> bool:
        """Whether nobody need ever wait for the saver again."""
        with self._condition:
            return self._in_use is None and self._unsaved.keys() <= self._copied

    def before_write(self, i: int, ended: Callable[[], bool]) -> bool:
        """Returns when leaf `i`, if it is in here, may be written; False where `ended` says so."""
        with self._condition:
            leaf = self._unsaved.get(i)
            if leaf is not None and i not in self._copied and leaf.nbytes <= self._room:
                # Where there is less memory than the user thought, who would write waits.
                with contextlib.suppress(MemoryError):
                    self._unsaved[i] = leaf.copy()
                    self._copied.add(i)
                    self._room -= leaf.nbytes
            self._wanted = i
            while self._reads(i):
                if ended():
                    return False
                self._condition.wait(_LOOK_S)
            self._wanted = None
            return True

    def leaves(self) -> Iterator[tuple[int, HostLeaf]]:
        """Each leaf as it was; the saver is done with one when it asks for the next."""
        while True:
            with self._condition:
                if not self._unsaved:
                    return
                i = self._wanted
                if i is None or not self._reads(i):
                    i = next(iter(self._unsaved))
                leaf = self._unsaved.pop(i)
                self._in_use = None if i in self._copied else i
            yield i, leaf
            with self._condition:
                self._in_use = None
                if i in self._copied:
                    self._copied.remove(i)
                    self._room += leaf.nbytes
                self._condition.notify_all()
            del leaf

    def close(self) -> None:
        """Lets go of all leaves: what is not saved now never will be. Safe twice."""
        with self._condition:
            self._unsaved.clear()
            self._in_use = None
            self._condition.notify_all()

    def _reads(self, i: int) -> bool:
        """Whether the saver reads memory of leaf `i`, or will."""
        return self._in_use == i or (i in self._unsaved and i not in self._copied)
