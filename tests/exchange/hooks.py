"""Lets tests observe an engine's worker thread."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zenflow_jax._exchange import worker
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.state import HostState


@dataclass
class Hooks:
    """Functions that the worker calls before storing a mail, and before updating a leaf."""

    mail: Callable[[], Any] = lambda: None
    update: Callable[[], Any] = lambda: None


def hooked(monkeypatch: Any) -> Hooks:
    """Returns the hooks of all engines that are created from now on."""
    hooks = Hooks()

    class State(HostState):
        def add(self, *args):
            hooks.mail()
            super().add(*args)

    class Adam(HostAdam):
        def adamw(self, *args):
            hooks.update()
            yield from super().adamw(*args)

    monkeypatch.setattr(worker, "HostState", State)
    monkeypatch.setattr(worker, "HostAdam", Adam)
    return hooks
