"""Calls into a test from the thread of an engine's worker."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zenflow_jax import _engine
from zenflow_jax._exchange import host_half
from zenflow_jax._host.adam import HostAdam
from zenflow_jax._host.state import HostState


@dataclass
class Hooks:
    """What the worker calls before it keeps a mail, and before it updates channels of a leaf."""

    mail: Callable[[], Any] = lambda: None
    update: Callable[[], Any] = lambda: None


def hooked(monkeypatch: Any) -> Hooks:
    """The hooks of all engines that are made from now on."""
    hooks = Hooks()

    class State(HostState):
        def add(self, *args):
            hooks.mail()
            super().add(*args)

    class Adam(HostAdam):
        def adamw(self, *args):
            hooks.update()
            yield from super().adamw(*args)

    monkeypatch.setattr(host_half, "HostState", State)
    monkeypatch.setattr(_engine, "HostAdam", Adam)
    return hooks
