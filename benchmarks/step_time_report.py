"""Stores the results of `step_time.py`, and writes the table."""

import dataclasses
import statistics
from typing import Any

import numpy as np

#: The peer with the fastest possible steps.
LIMIT = "adamw"


@dataclasses.dataclass
class Result:
    """One peer's measurements; bytes and seconds are per step."""

    peer: str
    fits: bool = True  # on the device
    left_out: bool = False  # for lack of time
    device_peak_bytes: int | None = None  # None if the backend does not report it
    device_peak_is_bound: bool = False  # another peer used as much before
    host_bytes: int = 0  # the engine's or parked arrays, at their maximum
    step_s: list[float] = dataclasses.field(default_factory=list)  # a sample for each turn
    wait_s: list[float] = dataclasses.field(default_factory=list)
    work_s: list[float] = dataclasses.field(default_factory=list)
    bytes_to_host: list[float] = dataclasses.field(default_factory=list)
    bytes_to_device: list[float] = dataclasses.field(default_factory=list)
    selections: int = 0  # within all timed steps


@dataclasses.dataclass
class Comparison:
    """All peers at one batch size."""

    parameters: int
    batch: int
    length: int
    results: list[Result]

    @property
    def tokens(self) -> int:
        """Returns the tokens in a step."""
        return self.batch * self.length


def figures(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Returns each measured peer's medians, and numbers derived from them.

    Times are in ms, bytes per parameter; None if unknown. `idle` is the share of a step beyond the
    time of the peer `adamw`.
    """
    measured = [r for r in comparison.results if r.step_s]
    medians = {r.peer: statistics.median(r.step_s) for r in measured}
    limit = medians.get(LIMIT)
    n = comparison.parameters
    of_peers = {}
    for r in measured:
        median = medians[r.peer]
        low, high = np.quantile(r.step_s, [0.25, 0.75]).tolist()
        of_peers[r.peer] = {
            "step_ms": 1e3 * median,
            "low_ms": 1e3 * low,
            "high_ms": 1e3 * high,
            "tokens_per_s": comparison.tokens / median,
            "idle": None if limit is None else 1 - limit / median,
            "device_peak": r.device_peak_bytes and r.device_peak_bytes / n,
            "to_host": statistics.median(r.bytes_to_host) / n,
            "to_device": statistics.median(r.bytes_to_device) / n,
            "host_ms": 1e3 * statistics.median(r.work_s),
            "wait_ms": 1e3 * statistics.median(r.wait_s),
            "host_memory": r.host_bytes / n,
        }
    return of_peers


def table(comparison: Comparison) -> str:
    """Returns the results as a Markdown table."""
    rows = [
        "| peer | step, ms (quartiles) | tokens/s | idle | device peak, GB "
        "| the same per parameter | to host | to device | host works, ms | loop waits, ms "
        "| host arrays | selections |",
        "|" + "---|" * 12,
    ]
    of_peers = figures(comparison)
    for r in comparison.results:
        if not r.fits:
            rows.append(f"| {r.peer} | does not fit |" + " - |" * 10)
        if r.left_out:
            rows.append(f"| {r.peer} | skipped for lack of time |" + " - |" * 10)
        if r.peer not in of_peers:
            continue
        f = of_peers[r.peer]
        bound = "<= " if r.device_peak_is_bound else ""
        peak = r.device_peak_bytes
        cells = [
            r.peer,
            f"{f['step_ms']:.2f} ({f['low_ms']:.2f}-{f['high_ms']:.2f})",
            f"{f['tokens_per_s']:,.0f}",
            "-" if f["idle"] is None or r.peer == LIMIT else f"{f['idle']:.1%}",
            "-" if peak is None else f"{bound}{peak / 1e9:.2f}",
            "-" if peak is None else f"{bound}{f['device_peak']:.2f}",
            f"{f['to_host']:.3f}",
            f"{f['to_device']:.3f}",
            f"{f['host_ms']:.2f}",
            f"{f['wait_ms']:.2f}",
            f"{f['host_memory']:.2f}",
            str(r.selections),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
