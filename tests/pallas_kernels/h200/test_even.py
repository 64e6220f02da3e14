"""The kernels that request registers, where requests are ignored: seen without a GPU, with any JAX (even.py)."""

import pytest

from tests.pallas_kernels.h200.reports import reports_of

# A multiprocessor's 65536 registers for two warpgroups, with the most that a thread can have, and for three.
OF_TWO, OF_THREE = 255, 168


@pytest.fixture(scope="module", params=["few", pytest.param("rest", marks=pytest.mark.slow)])
def reports(request):
    """Compiles all of them in one process: about 15 seconds of CPU time for the few, four times that for the rest."""
    found = reports_of("even.py", request.param)
    assert len(found) == {"few": 2, "rest": 6}[request.param]
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
