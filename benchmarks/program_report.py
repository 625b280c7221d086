"""Reads a compiled program's memory and copies from XLA's text, and prints them as a table row."""

import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.collectives import Collective, collectives
from benchmarks.program_text import HOST, Instruction, elements, nbytes, parse
from zenflow_jax import planning

COLUMNS = f"{'step':36} {'temp':>5} {'peak':>5} {'+':>5} {'all':>5} {'mail':>6} {'hidden':>8}"


class Report(NamedTuple):
    parameters: int
    peak_bytes: int
    temporary_bytes: int
    copies: list[tuple[int, int]]  # to the host, in order: (bytes, remaining matmuls)
    matmuls: int
    collectives: list[Collective]
    engine_bytes: int = 0  # the engine's arrays on the device while the step runs

    def row(self, sent: str = "") -> str:
        """Returns a line of the table; `sent` is a column for several devices."""
        mail = sum(size for size, _ in self.copies)
        hidden = sum(size for size, left in self.copies if left > 0)
        n = self.parameters
        together = self.peak_bytes + self.engine_bytes
        sizes = self.temporary_bytes, self.peak_bytes, self.engine_bytes, together
        memory = " ".join(f"{x / n:5.2f}" for x in sizes)
        if not mail:
            return f"{memory}      -        -{sent}   -"
        first = max(left for _, left in self.copies)
        return f"{memory} {mail / n:6.2f} {hidden / mail:8.1%}{sent}   {first} of {self.matmuls}"


def report(compiled: Any, params: Any) -> Report:
    text = compiled.as_text()
    copies, matmuls = _copies(text)
    return Report(
        parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
        peak_bytes=planning.peak_bytes(compiled),
        temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
        copies=copies,
        matmuls=matmuls,
        collectives=collectives(text),
    )


def _copies(text: str) -> tuple[list[tuple[int, int]], int]:
    """Returns the copies to host memory, as (bytes, remaining matmuls), and the matmuls' number.

    A loop counts as one matmul, because it cannot hide a copy that starts after it.
    """
    program = parse(text)
    heavy: set[str] = set()

    def is_heavy(x: Instruction) -> bool:
        library = x.opcode == "custom-call" and bool(_LIBRARY.search(x.attributes))
        return x.opcode == "dot" or library or not heavy.isdisjoint(x.called)

    # A computation is heavy if it contains a matmul, or calls a heavy computation.
    while (
        more := {name for name, x in program.computations.items() if any(map(is_heavy, x.values()))}
        - heavy
    ):
        heavy |= more
    entry = [*program.computations[program.entry].values()]
    matmul = [is_heavy(x) for x in entry]
    left = np.cumsum(matmul[::-1])[::-1]
    copies = []
    for x, to_come in zip(entry, left, strict=True):
        if x.opcode == "copy-start" and HOST in (target := elements(x.shape)[0]):
            copies.append((nbytes(target), int(to_come)))
    return copies, sum(matmul)


_LIBRARY = re.compile("__cublas|__cudnn")
