"""`GrammarPace`: decides whether requests with a grammar take part in every step. Imports no JAX.

A step with such requests is two programs, and the host computes masks between them. Where the host has time while the
device computes, this costs the other requests nothing. Where the device waits for the host, as with a small model, each
step would take longer for all requests. Requests with a grammar then take every second step: their tokens are read by
then, and the steps between are one program.
"""

_SHARE = 1 / 16
"""Weight of the last step in the averages."""

_SCARCE, _AMPLE = 0.1, 0.75
"""Spare time of the host, as a share of what the second program costs it, below which requests with a grammar leave out
steps, and above which they no longer do. A step more of them takes half of that cost from the spare time of a step."""


class GrammarPace:
    """Compares the time that the host waits for the device with the time that second programs cost it.

    Attributes:
        leaves_out: whether requests with a grammar leave out the step after each of theirs, if others can run in it.
    """

    def __init__(self) -> None:
        self.leaves_out = False
        self._spare = self._cost = 0.0
        self._steps = 0

    def note_wait(self, seconds: float) -> None:
        """Records for how long the host has waited until a step was computed; that is its spare time."""
        self._spare += _SHARE * (seconds - self._spare)
        self._steps += 1

    def note_cost(self, seconds: float) -> None:
        """Records the host's time for masks and a second program; decides anew once enough steps were recorded."""
        self._cost += _SHARE * (seconds - self._cost)
        if self._steps * _SHARE < 1:
            return
        has_time = self._spare > (_AMPLE if self.leaves_out else _SCARCE) * self._cost
        if has_time == self.leaves_out:
            self.leaves_out, self._steps = not self.leaves_out, 0
