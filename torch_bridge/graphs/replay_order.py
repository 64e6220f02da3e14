"""`ReplayOrder`: orders replays that use the same memory, on whichever of torch's streams each is queued."""

import torch


class ReplayOrder:
    """The order of one recorder's replays.

    Args:
        device: the device of the replays.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._latest: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Orders torch's current stream after the previous replay; call it before each replay."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if self._latest is not None and stream != self._latest:
            stream.wait_stream(self._latest)
        self._latest = stream

    def wait(self) -> None:
        """Waits for the replays, which are ordered before the latest; a device-wide wait breaks others' captures."""
        if self._latest is not None:
            self._latest.synchronize()
