"""The switch JAXKV_LOG: the log messages of jaxkv, pallas_kernels and torch_bridge on stderr."""

import logging

VARIABLE = "JAXKV_LOG"
_LEVELS = ("debug", "info", "warning", "error", "critical")
_PACKAGES = ("jaxkv", "pallas_kernels", "torch_bridge")


def show_messages(level: str) -> None:
    """Prints the packages' messages of a level and above on stderr, instead of handing them to the root logger.

    Args:
        level: a name of `logging`'s levels in any case; "" changes nothing. Any other text is logged as a warning
            and taken as "info".
    """
    if not level:
        return
    known = level.lower() in _LEVELS
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.setLevel(level.upper() if known else logging.INFO)
        logger.addHandler(handler)
        # A handler of the root logger would print each message a second time.
        logger.propagate = False
    if not known:
        logging.getLogger(__name__).warning(
            "%s must be one of %s, got %r; taken as info", VARIABLE, ", ".join(_LEVELS), level
        )
