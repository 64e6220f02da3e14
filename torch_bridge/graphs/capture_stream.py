"""`CaptureStream`: a CUDA stream on which one recorder's graphs are captured, and on which nothing else runs.

Torch keeps one cuBLAS workspace per cuBLAS handle and stream, and a graph uses that of its capture's stream at each
replay. Torch's own streams come from a pool of 32 and so are shared: two graphs that are replayed at once, or a graph
and other work, would then write their partial sums to one workspace.
"""

import ctypes
import weakref

import torch

_NON_BLOCKING = 1
_FREE: dict[int, list[int]] = {}
"""Streams by device that no recorder uses. They are never destroyed, as torch keeps their workspaces."""


class CaptureStream:
    """A stream of its own; it is free for others once the last reference to this object is gone.

    Args:
        device: the GPU, which must be torch's current device.

    Attributes:
        stream: the stream.
    """

    def __init__(self, device: torch.device) -> None:
        free = _FREE.setdefault(device.index, [])
        try:
            pointer = free.pop()
        except IndexError:
            pointer = _new_stream()
        self.stream = torch.cuda.ExternalStream(pointer, device=device)
        weakref.finalize(self, free.append, pointer).atexit = False


def _new_stream() -> int:
    """Creates a stream in the current context by CUDA's driver, since torch offers pooled ones alone."""
    made = ctypes.c_void_p()
    error = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(made), _NON_BLOCKING)
    if error or made.value is None:
        raise RuntimeError(f"CUDA could not create a stream: error {error} of cuStreamCreate")
    return made.value
