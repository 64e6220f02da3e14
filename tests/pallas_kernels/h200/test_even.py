"""The kernels that request registers, where requests are ignored: seen without a GPU, with any JAX (even.py)."""

import pytest

from tests.pallas_kernels.h200.reports import reports_of

# A multiprocessor's 65536 registers for two warpgroups, with the most that a thread can have, and for three.
OF_TWO, OF_THREE = 255, 168


# Where requests are ignored, test_kernels.py compiles these forms too.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reports():
    """Compiles all of them in one process: more than a minute of CPU time."""
    found = reports_of("even.py")
    assert len(found) == 7
    return found


def test_no_register_is_spilled_and_products_overlap(reports):
    for name, report in reports.items():
        assert report["registers"], name
        assert report["spilled"] == 0, name
        assert not report["serialised"], name


def test_consumers_that_fetch_for_themselves_have_more_registers_than_beside_a_producer(reports):
    """Only `grouped_matmul` has three warpgroups here."""
    for name, report in reports.items():
        largest = max(report["registers"])
        if name.startswith("grouped"):
            assert largest <= OF_THREE, name
        else:
            assert OF_THREE < largest <= OF_TWO, name
