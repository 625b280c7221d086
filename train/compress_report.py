"""What became of each tensor: as a table, and as a picture of the ratios by tensor and codec."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from train.elves.folders import Result
from train.elves.header import DUPLICATE, Tensor

# Rows of single tensors, the largest; the others are in the rows of their codecs.
_ROWS = 20
_COLORS = {
    "stored": "0.6",
    "constant": "tab:cyan",
    "planes": "tab:blue",
    "delta": "tab:green",
    "elf": "tab:orange",
    "elf24": "tab:red",
    "distance": "tab:purple",
    "zstd": "tab:brown",
    DUPLICATE: "tab:olive",
}


def table(results: Sequence[Result]) -> str:
    """The largest tensors, then all of each codec, then the whole."""
    rows = Table("tensor", "dtype", "codec", "MB", "ratio", "largest error", box=None)
    for column in rows.columns[3:]:
        column.justify = "right"
    tensors = _tensors(results)
    for t in sorted(tensors, key=lambda t: -t.bytes)[:_ROWS]:
        rows.add_row(t.name, t.dtype, t.codec, _mb(t.bytes), _ratio([t]), _error([t]))
    if len(tensors) > _ROWS:
        rows.add_row(f"and {len(tensors) - _ROWS} smaller ones")
    rows.add_section()
    by_codec: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for t in tensors:
        by_codec[t.codec, t.dtype].append(t)
    for (codec, dtype), some in sorted(by_codec.items()):
        mb = _mb(sum(t.bytes for t in some))
        rows.add_row(f"{len(some)} tensors", dtype, codec, mb, _ratio(some), _error(some))
    before, after = sum(r.before for r in results), sum(r.after for r in results)
    whole = f"{len(results)} files, headers and all"
    rows.add_row(whole, "", "", _mb(before), f"{before / after:.3f}", "")
    console = Console(width=120)
    with console.capture() as text:
        console.print(rows, highlight=False)
    return "\n".join(line.rstrip() for line in text.get().splitlines())


def write_picture(results: Sequence[Result], path: Path, title: str) -> None:
    """A bar for each tensor, as wide as the tensor is large, as high as its ratio.

    Raises:
        OSError: If it cannot be written.
    """
    # Its import takes a second, which the other commands need not wait for.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    tensors = [t for t in _tensors(results) if t.bytes]
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    # What takes no room at all would need a bar without an end.
    ratios = [t.bytes / max(t.packed_bytes, 1) for t in tensors]
    highest = max((r for r in ratios if r < 20), default=2) * 1.15
    left = 0.0
    for t, ratio in zip(tensors, ratios, strict=True):
        width = t.bytes / 1e6
        axes.bar(left, min(ratio, highest), width, align="edge", color=_COLORS[t.codec], lw=0)
        left += width
    axes.axhline(1, color="black", lw=0.8)
    before, after = sum(r.before for r in results), sum(r.after for r in results)
    axes.axhline(before / after, color="black", lw=0.8, ls="--")
    axes.text(left, before / after, f" {before / after:.3f}", va="center")
    axes.set(xlim=(0, left), ylim=(0, highest), xlabel="tensors in the order of the files, MB")
    axes.set(ylabel="ratio", title=title)
    used = [codec for codec in _COLORS if any(t.codec == codec for t in tensors)]
    axes.legend(handles=[Patch(color=_COLORS[codec], label=codec) for codec in used], loc="best")
    figure.savefig(path)


def _tensors(results: Sequence[Result]) -> list[Tensor]:
    return [t for r in results if r.header for t in r.header.tensors.values()]


def _mb(count: int) -> str:
    return f"{count / 1e6:,.2f}"


def _ratio(tensors: Sequence[Tensor]) -> str:
    before, after = sum(t.bytes for t in tensors), sum(t.packed_bytes for t in tensors)
    return f"{before / after:.3f}" if after else "-"


def _error(tensors: Sequence[Tensor]) -> str:
    error = max((t.error for t in tensors), default=0.0)
    return f"2^{math.log2(error):.2f}" if error else "0"
