"""A digest of JAX's description of a machine's devices, for programs over several of them.

The description is a protocol buffer, whose maps are serialised in another order each time. JAX has no readable form of
it, so the wire format is read here, without knowledge of the message: https://protobuf.dev/programming-guides/encoding.
"""

import hashlib
from collections.abc import Iterator, Sequence

from jax.experimental.topologies import TopologyDescription
from jaxlib._jax import Device

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5


def topology_digest(devices: Sequence[Device]) -> str:
    """Returns a digest of the kinds, limits and links of all devices of the machine, equal in every process."""
    described = TopologyDescription(list(devices)).serialize()
    return hashlib.sha256(in_one_order(described)).hexdigest()[:16]


def in_one_order(message: bytes) -> bytes:
    """Returns a serialised message with the fields of each message in it sorted, those of nested ones first.

    Bytes that cannot be a message are left as they are. Text that could be one is sorted too. Messages that differ in
    the order of a repeated field alone become equal.
    """
    try:
        fields = list(_fields(message))
    except (IndexError, ValueError):
        return message
    return b"".join(sorted(head + in_one_order(nested) for head, nested in fields))


def _fields(message: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the fields of a message: what precedes a field's nested bytes, and these, empty for a number.

    Raises:
        ValueError: these bytes are no message.
        IndexError: they end within a number.
    """
    at = 0
    while at < len(message):
        start = at
        key, at = _varint(message, at)
        size = 0
        if key & 7 == _VARINT:
            _, at = _varint(message, at)
        elif key & 7 == _LENGTH:
            size, at = _varint(message, at)
        elif key & 7 in (_EIGHT_BYTES, _FOUR_BYTES):
            at += 8 if key & 7 == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"{key & 7} is no type of a field")
        if key >> 3 == 0 or at + size > len(message):
            raise ValueError("no field has the number 0, and none ends behind its message")
        yield message[start:at], message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns a number of seven bits per byte, the lowest first, and the place behind it."""
    number = shift = 0
    while True:
        number |= (message[at] & 127) << shift
        if message[at] < 128:
            return number, at + 1
        at, shift = at + 1, shift + 7
