"""The most that something was while a benchmark ran, asked again and again on a thread."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Most:
    """The most that `measure` gave while this was open, and what it gave before."""

    def __init__(self, measure: Callable[[], int], every_s: float):
        self._measure, self._every_s = measure, every_s

    def __enter__(self) -> "Most":
        self.before = self.most = self._measure()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def added(self) -> int:
        return self.most - self.before

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.most = max(self.most, self._measure())


def resident() -> int:
    """Bytes of memory that the process has now."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def most_resident() -> Most:
    return Most(resident, every_s=0.01)
