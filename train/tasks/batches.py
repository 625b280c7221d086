"""Makes batches of examples: shuffled, placed on devices, and the same after a resume.

An example is a dict of NumPy arrays (`tasks/` lists them); a batch is the same dict with a leading
axis. Batch `i` depends only on the seed and `i`, not on the numbers of devices and processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from train import Failure
from train.cli.settings import SettingsError
from train.distributed.sharding import batch_sharding, own_rows

Batch = dict[str, Any]  # NumPy arrays or, on a mesh, arrays over its devices

# 1 for rows of a batch that are examples, 0 for padding rows.
ROWS = "rows"


class DataError(Failure):
    """The data cannot be used."""


class Source(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> dict[str, np.ndarray]: ...


@runtime_checkable
class Padded(Protocol):
    """A source of examples with `lengths` `(n,)` tokens, padded to `longest`."""

    lengths: np.ndarray
    longest: int


class _Shuffled:
    """A source's examples in random order, and batches on their devices."""

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int,
        mesh: Mesh | None = None,
        buckets: int = 1,
    ):
        import grain  # importing takes 0.3 s; only the shuffle is used, which needs no table

        self._source = source
        self._order = grain.MapDataset.range(len(source)).shuffle(seed=seed)
        self._padded = source if isinstance(source, Padded) else None
        self._part = 0 if self._padded is None else math.ceil(self._padded.longest / buckets)
        self._size = batch_size
        self._sharding = mesh and batch_sharding(mesh, batch_size)
        # The rows of a batch in this process.
        rows = np.arange(batch_size) if mesh is None else own_rows(self._sharding, batch_size)
        self._rows: list[int] = rows.tolist()  # grain accepts only Python integers

    def _number(self, place: int) -> int:
        return int(self._order[place])

    def _bucket(self, numbers: list[int]) -> int:
        """Returns the length that a batch of these examples is padded to."""
        longest = int(self._padded.lengths[numbers].max())
        needed = math.ceil(longest / self._part) * self._part
        return min(max(needed, self._part), self._padded.longest)

    def _batch(self, own: list[dict[str, np.ndarray]], numbers: list[int]) -> Batch:
        """Returns the batch with the examples `numbers`; `own` are this process's examples."""
        if self._padded and (behind := self._padded.longest - self._bucket(numbers)):
            own = [{n: x[:-behind] if x.ndim else x for n, x in e.items()} for e in own]
        stacked = {name: np.stack([e[name] for e in own]) for name in own[0]}
        if self._sharding is None:
            return stacked
        place = partial(jax.make_array_from_process_local_data, self._sharding)
        return {name: place(x, (self._size, *x.shape[1:])) for name, x in stacked.items()}


class Batches(_Shuffled):
    """A source's batches for training: an endless series, with a new order for each epoch.

    Batches of a `Padded` source are as long as their longest example, rounded up to one of
    `buckets` lengths. Indexing starts no thread and takes 0.15 ms for a small batch. `per_epoch`
    batches cover every example; the last batch may begin the next epoch.
    """

    def __init__(self, source: Source, **options: Any):
        super().__init__(source, **options)
        if self._size > len(source):
            most = f"at most {len(source)}, the number of training examples"
            raise SettingsError(f"`batch_size`: must be {most}, but is {self._size}.")
        # Finding an example's number takes longer than reading the example.
        self._order = self._order.repeat()
        self._last: tuple[int, list[int]] = (-1, [])
        self.per_epoch = math.ceil(len(source) / self._size)

    def __getitem__(self, i: int) -> Batch:
        if not self._padded:
            first = i * self._size
            return self._batch([self._source[self._number(first + r)] for r in self._rows], [])
        numbers = self._numbers(i)
        return self._batch([self._source[numbers[row]] for row in self._rows], numbers)

    def tokens(self, i: int) -> int | None:
        """Returns the number of tokens in batch `i` on all devices; None if there is no padding."""
        return int(self._padded.lengths[self._numbers(i)].sum()) if self._padded else None

    def length(self, i: int) -> int | None:
        """Returns the length of batch `i`'s examples; None if all batches have the same length."""
        return self._bucket(self._numbers(i)) if self._padded else None

    def _numbers(self, i: int) -> list[int]:
        # Also covers other processes' examples, because all processes must use the same length.
        # Cached, because it is called three times in a row for each batch.
        if self._last[0] != i:
            self._last = i, [self._number(i * self._size + row) for row in range(self._size)]
        return self._last[1]


class Sample(_Shuffled):
    """The same batches in every iteration, with each example once, for validation.

    The last batch is padded with copies of the first example, which have 0 in `ROWS`.
    """

    def __init__(self, source: Source, *, batches: int | None = None, **options: Any):
        super().__init__(source, **options)
        most = len(source) if batches is None else batches * self._size
        self.examples = min(len(source), most)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, self.examples, self._size):
            places = [first + row for row in self._rows]
            rows = [np.asarray(place < self.examples, np.float32) for place in places]
            # Copies of the first example, in this or another process, pad the batch.
            last = min(first + self._size, self.examples)
            numbers = [self._number(n) for n in (0, *range(first, last))] if self._padded else []
            own = [self._source[self._number(n if n < self.examples else 0)] for n in places]
            batch = [{**e, ROWS: row} for e, row in zip(own, rows, strict=True)]
            yield self._batch(batch, numbers)
