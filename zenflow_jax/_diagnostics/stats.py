"""An engine's statistics, and warnings about consecutive skipped steps."""

import dataclasses
import logging

_logger = logging.getLogger("zenflow_jax")
# Number of consecutive skipped steps that causes a warning.
_MANY = 3
_REMEDY = (
    "Look for NaN or infinity in the weights, the batches and the loss; "
    '`jax.config.update("jax_debug_nans", True)` stops at the first NaN.'
)


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counts, seconds and bytes since an engine was created, in this process.

    Attributes:
        steps: Number of exchanges.
        window_lengths: Number of windows by length in steps, including skipped steps. If leaves
            take turns, each group has separate windows.
        reselections: Number of channel selections in all groups, including the first.
        kept_share: The ratio of the selected channels' total score to that of the best k channels,
            averaged over the groups' second-to-last boundaries. None before the first ratio is
            read, or if `select_interval` is not an `AutoSelect`.
        skipped_steps: Number of steps with a non-finite gradient, among the steps whose mail has
            been read.
        skipped_in_a_row: Number of steps skipped since the last step that counted.
        seconds: Seconds by kind of activity (docs/timeline.md).
        bytes_to_host: Bytes of mail read, and of channels handed over.
        bytes_to_device: Bytes of updates, and of channels handed over, once for each receiving
            device.
        host_bytes: Bytes of the deferred half's NumPy arrays, which are not pinned.
        pinned_bytes: Bytes of pinned mail that the worker keeps for its windows' updates, excluding
            unread and placeholder mail.

    Examples:
        >>> import jax, jax.numpy as jnp, zenflow_jax
        >>> params = jax.device_put({"w": jnp.ones((8, 4))}, jax.devices()[0])
        >>> opt_state = zenflow_jax.zenflow(1e-2).init(params)
        >>> with zenflow_jax.HostEngine(params, opt_state) as engine:
        ...     params, opt_state = engine.flush(params, opt_state)
        >>> engine.stats.steps, engine.stats.windows
        (0, 0)
    """

    steps: int = 0
    window_lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    reselections: int = 0
    kept_share: float | None = None
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0

    @property
    def windows(self) -> int:
        """Returns the number of closed windows."""
        return sum(self.window_lengths.values())

    @property
    def wait_s(self) -> float:
        """Returns the seconds that the caller waited for the host while the device was idle."""
        return self.seconds.get("wait for host", 0.0)

    @property
    def work_s(self) -> float:
        """Returns the seconds that the worker worked, or waited for uploads."""
        kinds = "take in", "hand over", "update", "wait for uploads"
        return sum(self.seconds.get(kind, 0.0) for kind in kinds)


def warn_of_skipped_steps(in_a_row: int, step: int) -> None:
    """Warns of 3, 30, 300 and more consecutive skipped steps, up to `step`."""
    if in_a_row in (_MANY * 10**power for power in range(9)):
        _logger.warning(
            f"zenflow skipped the last {in_a_row} steps, up to step {step}, because their "
            f"gradients were not finite. {_REMEDY}"
        )
