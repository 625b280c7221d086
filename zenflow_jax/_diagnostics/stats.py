"""What an engine and its worker have done, as records that never change."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class WorkerStats:
    """The part of `EngineStats` that the worker counts."""

    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """What an engine has done since it was made; with several processes, in this one.

    Attributes:
        steps: Exchanges.
        windows: Windows closed, by `flush` too; of each group of leaves, where they take turns.
        window_lengths: Number of windows of each length in steps, skipped ones included.
        reselections: Selections of channels, the first ones included; of each group's.
        kept_share: The selected channels' share of the best k channels' score, at the last boundary
            but one of each group; their mean. None before the first one is read, and unless
            `select_interval` is an `AutoSelect`.
        put_back: Arrays of the state that something else, such as a trainer, had placed anew, and
            that the engine put back: those that it was made with, and once those after a step. The
            next time it refuses.
        skipped_steps: Steps whose gradient was not finite, among those whose mail has been read.
        skipped_in_a_row: Steps skipped since the last one that counted.
        exchange_s: Seconds that the caller spent in `exchange` and `flush`, its waits included.
        wait_s: Seconds that the caller waited for the host after the device was done.
        work_s: Seconds that the worker worked: the next three, and its waits for uploads.
        sum_s: Seconds that the worker took in mail, and added it up where there was too much to
            keep.
        hand_over_s: Seconds that it worked on hand-overs.
        update_s: Seconds that it made updates and began their uploads.
        save_wait_s: Seconds that it waited for a checkpoint to have arrays that it was to write, or
            copied them for it. They are no part of `work_s`.
        upload_s: Seconds from each update's first upload until all of it was on the devices; most
            of them overlap `update_s`.
        mail_s: Seconds from the end of each step until all of its mail arrived. Where the device
            adds up, also from the end of each window's last step until its sums arrived.
        bytes_to_host: Bytes of mail read, and of channels handed over.
        bytes_to_device: Bytes of updates, and of channels handed over, counted for each device that
            gets them.
        host_bytes: Bytes of the NumPy arrays of the deferred half: masters, which have in them what
            is uploaded, moments, counts, and sums. None of it is pinned.
        pinned_bytes: Bytes of mail, all of it pinned, that the worker has read and keeps for its
            windows' updates. Beside it there are mail that is unread or being written, and blank
            mail in the state.

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
    windows: int = 0
    window_lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    reselections: int = 0
    kept_share: float | None = None
    put_back: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    exchange_s: float = 0.0
    wait_s: float = 0.0
    work_s: float = 0.0
    sum_s: float = 0.0
    hand_over_s: float = 0.0
    update_s: float = 0.0
    save_wait_s: float = 0.0
    upload_s: float = 0.0
    mail_s: float = 0.0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    host_bytes: int = 0
    pinned_bytes: int = 0
