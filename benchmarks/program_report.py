"""Memory and copies of a compiled program, by what XLA says of it, as a row of a table."""

import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.collectives import Collective, array_bytes, collectives
from zenflow_jax import planning

COLUMNS = f"{'step':36} {'temp':>5} {'peak':>5} {'+':>5} {'all':>5} {'mail':>6} {'hidden':>8}"


class Report(NamedTuple):
    parameters: int
    peak_bytes: int
    temporary_bytes: int
    copies: list[tuple[int, int]]  # to the host, in order: (bytes, matmuls still to come)
    matmuls: int
    collectives: list[Collective]
    engine_bytes: int = 0  # what an engine may have there while the step runs

    def row(self, sent: str = "") -> str:
        """A line of the table; `sent` is a column that only several devices have."""
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
    """Copies to host memory in execution order: (bytes, matmuls still to come), and all matmuls.

    The module is scheduled, so the order of the entry computation's lines is that of execution. A
    loop counts as one matmul: nothing that starts after it can be hidden by what is inside.
    """
    computations = _computations(text)
    heavy: set[str] = set()

    def is_heavy(line: str) -> bool:
        return _is_matmul(line) or any(called in heavy for called in _CALLS.findall(line))

    # Until all are known that contain a matmul, or call what contains one.
    while more := {name for name, x in computations.items() if any(map(is_heavy, x))} - heavy:
        heavy |= more
    entry = computations["ENTRY"]
    matmul = [is_heavy(line) for line in entry]
    left = np.cumsum(matmul[::-1])[::-1]
    copies = []
    for i, line in enumerate(entry):
        started = _COPY.search(line)
        if started:
            copies.append((sum(array_bytes(started["array"])), int(left[i])))
    return copies, sum(matmul)


# Memory space 5 is the host's.
_COPY = re.compile(r"= \((?P<array>\w+\[[\d,]*\])\{[^}]*S\(5\)\}.* copy-start\(")
_CALLS = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")


def _is_matmul(line: str) -> bool:
    return bool(re.search(r" dot\(|__cublas|__cudnn", line))


def _computations(text: str) -> dict[str, list[str]]:
    lines_of: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if line and not line.startswith(" ") and line.rstrip().endswith("{"):
            name = "ENTRY" if line.startswith("ENTRY") else line.split()[0].lstrip("%")
            lines_of[name] = []
        elif line.startswith("}"):
            name = None
        elif name is not None:
            lines_of[name].append(line)
    return lines_of
