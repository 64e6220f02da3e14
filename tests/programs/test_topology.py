"""Descriptions of a machine's devices have equal digests however their maps are ordered, and others otherwise."""

import jax
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkv.programs.topology import in_one_order, topology_digest
from tests.example_counts import examples


def varint(number):
    head = []
    while number > 127:
        head.append(number & 127 | 128)
        number >>= 7
    return bytes([*head, number])


def serialised(message, order=lambda fields: fields):
    """Returns a message, a list of (number of a field, value), in the wire format; `order` orders its fields."""
    found = []
    for number, value in order(message):
        if isinstance(value, int):
            found.append(varint(number << 3) + varint(value))
        elif isinstance(value, float):
            found.append(varint(number << 3 | 5) + bytes([int(value), 0, 128, 63]))
        else:
            nested = value.encode() if isinstance(value, str) else serialised(value, order)
            found.append(varint(number << 3 | 2) + varint(len(nested)) + nested)
    return b"".join(found)


VALUES = st.recursive(
    st.integers(0, 2**63) | st.sampled_from([1.0, 2.0]) | st.sampled_from(["NVIDIA H200", "cuda"]),
    lambda values: st.lists(st.tuples(st.integers(1, 40), values), max_size=5),
)
MESSAGES = st.lists(st.tuples(st.integers(1, 40), VALUES), min_size=1, max_size=6)


@given(MESSAGES, st.randoms())
@settings(max_examples=examples(100))
def test_the_order_of_fields_does_not_matter_at_any_depth(message, draw):
    mixed = serialised(message, lambda fields: draw.sample(fields, len(fields)))
    assert in_one_order(mixed) == in_one_order(serialised(message))


@given(MESSAGES, st.integers(0, 2**40))
@settings(max_examples=examples(100))
def test_one_number_more_or_other_does_matter(message, number):
    def found(message):
        return in_one_order(serialised(message))

    assert (
        len({found(message), found([*message, (41, number)]), found([*message, (41, number + 1)])})
        == 3
    )


def test_links_of_other_bandwidth_are_another_topology():
    def machine(*units):
        links = [(8, [(20, [(1, [(1, unit), (2, [(2, speed)])])]) for unit, speed in units])]
        return in_one_order(
            serialised([(2, "cuda"), (9, [(1, "xla.GpuTopologyProto"), (2, links)])])
        )

    assert machine((12, 64), (4, 128)) == machine((4, 128), (12, 64))
    assert machine((12, 64), (4, 128)) != machine((12, 128), (4, 64))


def test_devices_have_one_digest_however_often_they_are_described():
    assert len({topology_digest(jax.devices()) for _ in range(3)}) == 1
