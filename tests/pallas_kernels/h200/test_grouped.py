"""What becomes of `grouped_matmul` on an H200, seen without a GPU: its registers, and that no weight is copied."""

import jax
import pytest

from pallas_kernels.device import NEWEST_JAX
from tests.pallas_kernels.h200.reports import reports_of

pytestmark = pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX, reason="this JAX takes minutes; why_not says so"
)


@pytest.fixture(scope="module")
def reports():
    """Compiles all of them in one process: some seconds on two idle cores."""
    found = reports_of("grouped.py")
    assert len(found) == 3
    return found


def test_it_spills_no_register_and_narrow_blocks_share_a_multiprocessor(reports):
    for name, report in reports.items():
        assert report["registers"], name
        assert report["spilled"] == 0, name
    # Two blocks of two consumers and a producer.
    for name in ("qwen3-next-up-t8", "gpt-oss-up-t8"):
        assert max(reports[name]["registers"]) <= 65536 // (2 * 384), name


def test_no_weight_is_copied_and_all_is_one_graph(reports):
    """The least weight has 530 MB; the result may take x's place, which was donated."""
    for name, report in reports.items():
        assert report["temp_bytes"] <= report["pool_bytes"] + 2**20, name
        assert report["command_buffers"] == 1, name
        assert not report["outside"], name
