"""One start of a run at a time: a lock on its folder, which the kernel takes back from the dead."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from train import processes
from train.settings import SettingsError

# In the run's folder; says who has the lock. It stays when the run ends, and means nothing then.
LOCK = "lock"

# Of file systems that know no locks.
UNKNOWN = {errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}


@contextlib.contextmanager
def run_lock(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Keeps a second start of the same run away from its folder.

    Process 0 locks a file in there for as long as the `with` block lasts. The lock ends with the
    process, however that ends.

    Args:
        folder: Of the run; it must exist.
        say: Shows a line to the user.

    Raises:
        SettingsError: In process 0, if another start of the run is under way.
    """
    if not processes.is_first():
        yield
        return
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise SettingsError(
                f"`run`: expected {folder} to be used by one process, got another that trains in "
                f"it: {file.read().strip() or 'unknown'}. Wait until it has ended, stop it (on "
                "SIGTERM it saves), or name another --run."
            ) from None
        except OSError as error:
            if error.errno not in UNKNOWN:
                raise
            say(f"the file system of {folder} has no locks: start no second process with this run")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
