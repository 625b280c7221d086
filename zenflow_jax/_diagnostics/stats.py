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


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """What an engine has done since it was made: this process's, where there are several.

    Attributes:
        steps: Exchanges.
        windows: Windows closed, by `flush` too.
        window_lengths: How many of them had so many steps, skipped ones included.
        reselections: Times that channels were selected anew, the first time included.
        kept_share: Share of the score of the best k channels that the selected ones held, one
            boundary ago. None before the first was read, and unless `select_interval` is an
            `AutoSelect`.
        skipped_steps: Steps whose gradient was not finite, as far as their mail has been read.
        skipped_in_a_row: How many of them were the last steps, without one that counted.
        exchange_s: Seconds that the caller was in `exchange` and `flush`, its waits included.
        wait_s: Seconds that the caller waited for the host after the device was done.
        work_s: Seconds that the worker worked: those of the next three, and what it waited for
            uploads.
        sum_s: Seconds that the worker took in mail, and added it up where it was too much to keep.
        hand_over_s: Seconds of its part in handing channels over.
        update_s: Seconds that it made updates and began their uploads.
        upload_s: Seconds from each update's first upload until all of it was on the devices, most
            of them beside `update_s`.
        mail_s: Seconds from the end of each step until all of its mail had come, and from that of
            each window's last step until its sums had, where the device adds up.
        bytes_to_host: Bytes of mail read, and of channels handed over.
        bytes_to_device: Bytes of updates, and of channels handed over; to each device that gets
            them.
        host_bytes: Bytes of the NumPy arrays that are kept for the deferred half.
    """

    steps: int = 0
    windows: int = 0
    window_lengths: dict[int, int] = dataclasses.field(default_factory=dict)
    reselections: int = 0
    kept_share: float | None = None
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    exchange_s: float = 0.0
    wait_s: float = 0.0
    work_s: float = 0.0
    sum_s: float = 0.0
    hand_over_s: float = 0.0
    update_s: float = 0.0
    upload_s: float = 0.0
    mail_s: float = 0.0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    host_bytes: int = 0
