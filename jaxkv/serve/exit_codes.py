"""Exit codes of `jaxkv serve` and of its engine process, for supervisors that restart them."""

OK = 0
"""The server was asked to end and has."""

FAILED = 1
"""The other process ended without a reason, or no other code fits the error."""

REFUSED = 2
"""An option, the model or the machine is unsuitable; a restart would end in the same way."""

OUT_OF_MEMORY = 3
"""The cache was lost too often."""

DEVICE_BROKEN = 4
"""The device does not work any more in this process."""

HUNG = 5
"""A step took longer than it may."""
