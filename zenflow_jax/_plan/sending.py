"""When the gradients of offloaded leaves leave the device."""

import enum


class SendGradients(enum.StrEnum):
    """The argument `send_gradients` of `zenflow`."""

    #: The step copies each to host memory, as soon as the backward pass has made it.
    DURING_STEP = "during_step"
    #: The step leaves them on the device; they are copied while the next one runs.
    AFTER_STEP = "after_step"
    #: The step adds them up on the device; the sum is copied while the next window runs.
    PER_WINDOW = "per_window"

    @property
    def in_step(self) -> bool:
        """Whether the step itself copies to host memory."""
        return self is SendGradients.DURING_STEP

    @property
    def sums_on_device(self) -> bool:
        """Whether the device adds up a window's gradients."""
        return self is SendGradients.PER_WINDOW
