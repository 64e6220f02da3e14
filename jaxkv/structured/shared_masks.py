"""`SharedMasks`: equal masks of several requests as one array, which a step sends once."""

from weakref import WeakValueDictionary

import numpy as np

_STRIDE = 61
"""Every so many words of a mask are its key. Masks with equal keys are compared as a whole."""


class SharedMasks:
    """The masks that requests hold now. Requests inside a string of JSON, for example, mostly have the same one.

    Only the thread of the engine may use it.
    """

    def __init__(self) -> None:
        self._known: WeakValueDictionary[bytes, np.ndarray] = WeakValueDictionary()

    def share(self, mask: np.ndarray) -> np.ndarray:
        """Returns the array of another request with these bits, or else `mask`, which becomes read-only.

        Args:
            mask: uint32 [words].
        """
        key = mask[::_STRIDE].tobytes()
        known = self._known.get(key)
        if known is not None and (known == mask).all():
            return known
        mask.flags.writeable = False
        self._known[key] = mask
        return mask
