"""Ends all processes of a run when one of them is killed or fails.

The library's own monitor propagates an engine's failures through jax's service, which detects a
killed process only at its timeout, and never in adamw runs. Only the operating system notices at
once: it closes the connection that each process keeps to process 0. Missing connections are
reported.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable
from typing import NoReturn

import jax

from train.distributed import processes
from train.distributed.stopping import Stopped

# How long process 0 waits for connections, and each other process for its own.
MEET_S = 10.0
# How long a process may take to exit on its own after another has failed, to show its own error.
GRACE_S = 5.0

BYE, FAILED = b".", b"!"


class Peers:
    """Ends this process when another process of the run is gone. Use it in a `with` block in all.

    `host` is the address of process 0; `restart` tells the user how to restart, and may be changed.
    """

    def __init__(self, host: str | None, *, restart: str, say: Callable[[str], None]):
        self._host = host
        self.restart = restart
        self._say = say
        self._connections: dict[socket.socket, int] = {}  # with their process numbers
        self._has_failed = False  # whether this process failed; it shows its error and ends

    def __enter__(self) -> Peers:
        if jax.process_count() > 1:
            # Read now, because later this process may have shut jax down.
            self._is_first = processes.is_first()
            self._meet()
            threading.Thread(target=self._watch, name="peers", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        self._has_failed = not (kind is None or issubclass(kind, Stopped))
        self._send(FAILED if self._has_failed else BYE)

    def _meet(self) -> None:
        if processes.is_first():
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as listener:
                token = secrets.token_hex(8)
                host = self._host or socket.gethostname()
                processes.from_first(f"{host} {listener.getsockname()[1]} {token}")
                self._accept(listener, token)
            missing = set(range(1, jax.process_count())) - set(self._connections.values())
            if missing:
                listed = ", ".join(map(str, sorted(missing)))
                self._say(f"no connection to process {listed}: its death will be detected late")
            return
        host, port, token = processes.from_first("").split()
        try:
            connection = socket.create_connection((host, int(port)), timeout=MEET_S)
        except OSError:
            return  # process 0 reports it
        connection.sendall(f"{token} {jax.process_index()}\n".encode())
        self._connections[_keep_alive(connection)] = 0

    def _accept(self, listener: socket.socket, token: str) -> None:
        listener.settimeout(MEET_S)
        while len(self._connections) < jax.process_count() - 1:
            try:
                connection, _ = listener.accept()
                connection.settimeout(MEET_S)
                received, index = connection.makefile("r").readline().split()
            except (OSError, ValueError):
                return
            if received == token:
                self._connections[_keep_alive(connection)] = int(index)

    def _watch(self) -> None:
        selector = selectors.DefaultSelector()
        for connection in self._connections:
            selector.register(connection, selectors.EVENT_READ, connection)
        while selector.get_map():
            for key, _ in selector.select():
                connection = key.data
                try:
                    # Two messages may arrive at once; only the first counts.
                    news = connection.recv(64).partition(b"\n")[0]
                except OSError:
                    news = b""
                index = self._connections[connection]
                if news.startswith((BYE, FAILED)):
                    selector.unregister(connection)
                if news.startswith(FAILED):
                    index = int(news[1:] or index)
                    self._forward(FAILED + str(index).encode())
                    why = f"process {index} has failed; its own output contains the error"
                    timer = threading.Timer(GRACE_S, self._exit, [why])
                    timer.daemon = True
                    timer.start()
                elif not news.startswith(BYE):
                    # Process 0 learns this from its system, and sends the number to the others.
                    index = int(news) if news.isdigit() else index
                    self._forward(str(index).encode())
                    self._exit(f"process {index} is gone: it was killed, or its machine failed")

    def _forward(self, message: bytes) -> None:
        if self._is_first:
            self._send(message)

    def _send(self, message: bytes) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the process is gone, as the thread will detect
                connection.sendall(message + b"\n")

    def _exit(self, why: str) -> NoReturn:
        if self._has_failed:
            os._exit(2)  # it has shown its own error, and waits for the others to shut jax down
        # Bypasses `sys.stderr`, whose lock the main thread may hold. Silences jax and gloo.
        os.write(2, f"error: {why}. This process ends as well. {self.restart}\n".encode())
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os._exit(1)


def _keep_alive(connection: socket.socket) -> socket.socket:
    """Returns the connection, which now breaks within 10 s if the other machine dies."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection
