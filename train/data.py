"""Batches of examples: shuffled, on the devices that they belong to, and the same after a resume.

An example is a dict of NumPy arrays, each of the same shape and dtype in all examples of a source
(`tasks/` lists them); a batch is the same dict with a leading axis. Batch `i` depends on the seed
and `i` alone, on any number of devices and processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from train.settings import SettingsError
from train.sharding import batch_sharding, own_rows

Batch = dict[str, Any]  # of NumPy arrays, or on a mesh of arrays over its devices

# 1 for the rows of a batch that are examples, 0 for those that fill it up.
ROWS = "rows"


class DataError(ValueError):
    """The data cannot be used; the message is shown as it is."""


def check_batch(batch_size: int, examples: int) -> None:
    """Refuses a batch that is larger than the training data."""
    if batch_size > examples:
        raise SettingsError(
            f"`batch_size`: expected at most {examples}, all the training data, got {batch_size}."
        )


class Source(Protocol):
    """Examples to index at random."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict[str, np.ndarray]: ...


@runtime_checkable
class Padded(Protocol):
    """A source whose examples have different lengths, and are padded to the same one.

    `lengths` `(n,)` counts the tokens of each, and `longest` is their length with padding. A batch
    need not have more positions than its longest example has tokens.
    """

    lengths: np.ndarray
    longest: int


class _Shuffled:
    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int,
        mesh: Mesh | None = None,
        buckets: int = 1,
    ):
        self._source = source
        self._order = grain.MapDataset.range(len(source)).shuffle(seed=seed)
        self._padding = _Padding(source, buckets) if isinstance(source, Padded) else None
        self._size = batch_size
        self._place = _Place(batch_size, mesh)


class Batches(_Shuffled):
    """Batches of a source for training: without end, every epoch in an order of its own.

    Those of a `Padded` source have as many positions as their longest example needs, rounded up to
    one of a few lengths, each of which is compiled by itself. Indexing starts no thread and no
    process, and takes 0.15 ms for a small batch. Every process reads the rows that lie on its own
    devices.

    Args:
        source: The same in every process.
        batch_size: Examples in a batch, all devices together; must divide by the mesh.
        seed: Fixes the orders.
        mesh: The devices; None for batches of NumPy arrays.
        buckets: How many lengths a batch may have: 1 to `buckets` parts of `longest`.

    Attributes:
        per_epoch: Batches until every example was in one; the last may begin the next epoch.
    """

    def __init__(self, source: Source, **options: Any):
        super().__init__(source, **options)
        # To find the number of an example takes longer than to read it.
        self._order = self._order.repeat()
        self._last: tuple[int, list[int]] = (-1, [])
        self.per_epoch = math.ceil(len(source) / self._size)

    def __getitem__(self, i: int) -> Batch:
        rows = self._place.rows
        if not self._padding:
            return self._place.batch([self._source[self._number(i, row)] for row in rows])
        numbers = self._numbers(i)
        batch = [self._source[numbers[row]] for row in rows]
        return self._place.batch(self._padding.cut(batch, numbers))

    def tokens(self, i: int) -> int | None:
        """The tokens of batch `i`, all devices together; None if none of it is padding."""
        return self._padding.tokens(self._numbers(i)) if self._padding else None

    def length(self, i: int) -> int | None:
        """The positions of its examples; None if all batches have the same."""
        return self._padding.bucket(self._numbers(i)) if self._padding else None

    def _numbers(self, i: int) -> list[int]:
        # Of all its examples, also of those on other processes: all must come to the same length.
        # Asked three times in a row for a batch.
        if self._last[0] != i:
            self._last = i, [self._number(i, row) for row in range(self._size)]
        return self._last[1]

    def _number(self, i: int, row: int) -> int:
        return int(self._order[i * self._size + row])


class Sample(_Shuffled):
    """The same batches in every iteration, each example once: for validation.

    The last batch is filled up with copies of the first example. In `ROWS` a batch has 1 for
    examples and 0 for such copies. There are at most `batches`, drawn with the seed; the other
    arguments are those of `Batches`.
    """

    def __init__(self, source: Source, *, batches: int | None = None, **options: Any):
        super().__init__(source, **options)
        self.examples = len(source)
        if batches is not None:
            self.examples = min(self.examples, batches * self._size)
        self._numbers = np.full(self.examples, -1)  # the first of the order, as far as known

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, self.examples, self._size):
            numbers = [first + row for row in self._place.rows]
            real = [number < self.examples for number in numbers]
            wanted = [n if r else 0 for n, r in zip(numbers, real, strict=True)]
            own = [self._source[self._number(n)] for n in wanted]
            if self._padding:
                # The first example fills up, on this or another process.
                last = min(first + self._size, self.examples)
                own = self._padding.cut(own, [self._number(n) for n in (0, *range(first, last))])
            rows = [{ROWS: np.asarray(r, np.float32)} for r in real]
            yield self._place.batch([e | r for e, r in zip(own, rows, strict=True)])

    def _number(self, n: int) -> int:
        """The number of the example at place `n`."""
        if self._numbers[n] < 0:
            self._numbers[n] = self._order[n]
        return int(self._numbers[n])


class _Padding:
    """The lengths of the batches of a padded source; `numbers` are those of a batch's examples."""

    def __init__(self, source: Padded, buckets: int):
        self._lengths, self._longest = source.lengths, source.longest
        self._part = math.ceil(source.longest / buckets)

    def tokens(self, numbers: list[int]) -> int:
        return int(self._lengths[numbers].sum())

    def bucket(self, numbers: list[int]) -> int:
        """The positions of a batch of these examples."""
        needed = math.ceil(int(self._lengths[numbers].max()) / self._part) * self._part
        return min(max(needed, self._part), self._longest)

    def cut(
        self, examples: list[dict[str, np.ndarray]], numbers: list[int]
    ) -> list[dict[str, np.ndarray]]:
        """Some examples of a batch without needless padding."""
        if not (behind := self._longest - self.bucket(numbers)):
            return examples
        return [{n: x[:-behind] if x.ndim else x for n, x in e.items()} for e in examples]


class _Place:
    """Puts batches on the devices, and knows which of their rows lie on this process."""

    def __init__(self, batch_size: int, mesh: Mesh | None):
        self._size = batch_size
        self._sharding = mesh and batch_sharding(mesh, batch_size)
        rows = np.arange(batch_size) if mesh is None else own_rows(self._sharding, batch_size)
        self.rows: list[int] = rows.tolist()  # grain takes Python's integers only

    def batch(self, own: list[dict[str, np.ndarray]]) -> Batch:
        stacked = {name: np.stack([e[name] for e in own]) for name in own[0]}
        if self._sharding is None:
            return stacked
        return {
            name: jax.make_array_from_process_local_data(
                self._sharding, x, (self._size, *x.shape[1:])
            )
            for name, x in stacked.items()
        }
