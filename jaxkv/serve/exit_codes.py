"""Exit codes of `jaxkv serve` and of its engine process, for what restarts them."""

OK = 0
"""The server was asked to end and has."""

FAILED = 1
"""The other process ended without a word, or an error had no better code."""

REFUSED = 2
"""An option, the model or the machine is not fit; a restart ends the same way."""

OUT_OF_MEMORY = 3
"""The cache was lost too often."""

DEVICE_BROKEN = 4
"""The device does not work any more in this process."""

HUNG = 5
"""A step took longer than it may."""
