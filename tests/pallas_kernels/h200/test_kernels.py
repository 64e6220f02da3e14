"""What becomes of kernels on an H200, seen without a GPU: registers, copies, donation, one graph."""

import jax
import pytest

from pallas_kernels.device import NEWEST_JAX
from pallas_kernels.mosaic.jax_versions import honours_register_requests
from tests.pallas_kernels.h200.reports import reports_of

pytestmark = pytest.mark.skipif(
    jax.__version_info__[:2] > NEWEST_JAX, reason="the kernels refuse this JAX; why_not says so"
)
PROGRAMS = {
    "few": {
        **{"choices": 2, "decode": 1, "grouped": 3, "ragged": 1},
        **{"skinny": 5, "states": 5, "sums": 2, "writes": 6},
    },
    "rest": {
        **{"choices": 4, "decode": 9, "grouped": 19, "ragged": 3},
        **{"skinny": 23, "states": 6, "sums": 5, "writes": 3},
    },
}


@pytest.fixture(scope="module", params=["few", pytest.param("rest", marks=pytest.mark.slow)])
def kernels(request):
    """Compiles all of them in one process: about 40 seconds of processor time."""
    found = reports_of("kernels.py", request.param)
    assert {name: len(reports) for name, reports in found.items()} == PROGRAMS[request.param]
    return found


@pytest.fixture
def choices(kernels):
    return kernels["choices"]


def test_the_choosing_kernels_spill_no_register_and_fit_their_blocks(choices):
    """A multiprocessor's registers are 128 for each thread of four warpgroups, and 168 of three: packed scores.

    The kernels that route have one, which may take what a thread can have.
    """
    most = {"index_topk packed": 168, "row_topk and group_rows, most": 255}
    for name, report in choices.items():
        assert report["spilled"] == 0, name
        largest, *others = sorted(report["registers"], reverse=True)
        assert 0 < largest <= most.get(name, 128), name
        assert all(0 < registers <= 128 for registers in others), name


def test_the_pool_of_keys_is_read_where_it_lies(choices):
    """Two views of it, by numbers and by bytes, cost nothing."""
    for name, report in choices.items():
        assert report["copies"] == [], name
        if name.startswith("index_topk"):
            assert report["temp_bytes"] < report["pool_bytes"], name


def test_the_choosing_kernels_join_one_command_buffer(choices):
    for name, report in choices.items():
        assert report["command_buffers"] == 1, name
        assert report["outside"] == [], name


@pytest.fixture
def decode(kernels):
    return kernels["decode"]


def test_the_decode_kernel_spills_no_register(decode):
    for name, report in decode.items():
        assert report["registers"], name
        assert report["spilled"] == 0, name


def test_keys_of_8_bits_leave_room_for_four_blocks_on_a_multiprocessor(decode):
    """Which is what the rules of mosaic_schedule.py count on."""
    for name in decode.keys() & {"fp8", "int8", "fp8 head_dim 64"}:
        assert max(decode[name]["registers"]) <= 128, name


def test_the_decode_kernel_copies_no_pool(decode):
    for name in decode.keys() & {"batch 64", "fp8", "int8"}:
        assert decode[name]["temp_bytes"] < 2**20, name


@pytest.fixture
def grouped(kernels):
    return kernels["grouped"]


def test_grouped_matmul_spills_no_register_and_narrow_blocks_share_a_multiprocessor(grouped):
    for name, report in grouped.items():
        assert report["registers"], name
        assert report["spilled"] == 0, name
    # Two blocks of two consumers and a producer.
    for name in grouped.keys() & {"qwen3-next-up-t8", "gpt-oss-up-t8"}:
        assert max(grouped[name]["registers"]) <= 65536 // (2 * 384), name


def test_grouped_matmul_copies_no_weight_and_is_one_graph(grouped):
    """The least weight has 530 MB; the result may take x's place, which was donated."""
    for name, report in grouped.items():
        assert report["temp_bytes"] <= report["pool_bytes"] + 2**20, name
        assert report["command_buffers"] == 1, name
        assert not report["outside"], name


@pytest.fixture
def ragged(kernels):
    if not kernels["ragged"]:
        pytest.skip("all of them are among the few")
    return kernels["ragged"]


def test_the_prefill_kernel_spills_no_register_and_its_products_overlap(ragged):
    """168 registers are all that three warpgroups can start with; consumers then take more from the producer.

    Where such requests are ignored there are two warpgroups (test_even.py).
    """
    for name, report in ragged.items():
        assert report["spilled"] == 0, name
        if honours_register_requests():
            assert report["registers"] == [168], name
        assert not report["serialised"], name


def test_the_prefill_kernel_joins_one_command_buffer_and_copies_only_pages_of_8_bits(ragged):
    for name, report in ragged.items():
        assert report["command_buffers"] == 1, name
        assert report["outside"] == [], name
        # Pages of 8 bits are unpacked, all that the page table names.
        assert report["temp_bytes"] < (2**29 if name == "fp8" else 2**23), name


def test_layers_of_prefill_share_what_depends_on_lengths_alone(ragged):
    """Cutting queries into tiles takes eight small kernels once, not per layer."""
    for name in ragged.keys() & {"llama"}:
        assert ragged[name]["captured"] <= 2 + 8


@pytest.fixture
def skinny(kernels):
    return kernels["skinny"]


def test_skinny_matmul_spills_no_register_and_its_products_overlap(skinny):
    """Also those whose left operand is widened in registers."""
    for name, report in skinny.items():
        assert report["registers"], name
        assert report["spilled"] == 0, name
        assert not report["serialised"], name


def test_skinny_matmul_copies_no_weight(skinny):
    """The least of them has 6 MiB; what splits found is smaller. Many rows are padded to 32: 10 beside 32 MiB.

    Rows that are rounded to 8 bits have 8 beside 112 MiB.
    """
    for name, report in skinny.items():
        limit = 16 if "in a fixed order" in name else 9 if "rows too" in name else 5
        assert report["temp_bytes"] < limit * 2**20, name


@pytest.fixture
def states(kernels):
    return kernels["states"]


def test_the_kernels_of_states_spill_no_register_to_speak_of(states):
    for name, report in states.items():
        assert report["registers"], name
        assert report["spilled"] <= (16 if name == "ssd_scan float16" else 0), name
    for name in states.keys() & {"causal_conv", "ssd_update"}:
        assert max(states[name]["registers"]) <= 160, name


def test_five_blocks_of_the_delta_update_are_resident(states):
    """A multiprocessor's 65536 registers among five blocks of 128 threads, in units of 8 per thread."""
    for name in states.keys() & {"delta_update", "delta_update bfloat16"}:
        assert max(states[name]["registers"]) <= 96, name


def test_the_scans_fit_their_warpgroups_and_no_products_are_serialised(states):
    """Three warpgroups have up to 168 registers a thread, two up to 255."""
    limits = {"ssd_scan": 168, "ssd_scan float16": 168, "ssd_scan 256": 255, "delta_scan": 255}
    for name in states.keys() & limits:
        assert max(states[name]["registers"]) <= limits[name], name
        assert not states[name]["serialised"], name


def test_donated_pools_of_states_are_neither_copied_nor_returned_elsewhere(states):
    """The pools have up to 51 billion elements. `delta_scan` keeps the inverses and weights of all pieces, 19 MB."""
    for name, report in states.items():
        assert report["alias_bytes"] == report["pool_bytes"], name
        assert report["copies"] == [], name
        assert report["temp_bytes"] < (22_000_000 if name == "delta_scan" else 1_000_000), name


def test_the_kernels_of_states_join_one_command_buffer(states):
    for name, report in states.items():
        assert report["command_buffers"] == 1, name
        assert report["outside"] == [], name
    # Six layers of two kernels; the tables of packed rows are made once for all of them.
    for name in states.keys() & {"ssd_scan", "ssd_scan float16", "ssd_scan 256", "delta_scan"}:
        assert 12 <= states[name]["captured"] < 2 * 12, name


@pytest.fixture
def writes(kernels):
    return kernels["writes"]


def test_the_writing_kernels_spill_no_register_and_leave_room_for_several_blocks(writes):
    for name, report in writes.items():
        assert report["spilled"] == 0, name
        assert report["registers"], name
        assert max(report["registers"]) <= 170, name
    for name in writes.keys() & {"rotary_write many", "page_write many"}:
        assert max(writes[name]["registers"]) <= 80, name


def test_donated_pools_are_neither_copied_nor_returned_elsewhere(writes):
    """The pools have 4.3 billion elements."""
    for name, report in writes.items():
        assert report["alias_bytes"] == report["pool_bytes"], name
        assert report["copies"] == [], name
        assert report["temp_bytes"] < 10_000, name


def test_the_writing_kernels_join_one_command_buffer(writes):
    """The launches of six layers are nodes of one graph."""
    for name, report in writes.items():
        assert (report["command_buffers"], report["captured"]) == (1, 6), name
        assert report["outside"] == [], name


@pytest.fixture
def sums(kernels):
    return kernels["sums"]


def test_sums_over_devices_spill_no_register_and_let_all_blocks_run_at_once(sums):
    """There are at most as many blocks of four warps as multiprocessors."""
    for name, report in sums.items():
        assert report["spilled"] == 0, name
        assert 0 < max(report["registers"]) <= 128, name


def test_sums_over_devices_join_one_command_buffer(sums):
    for name, report in sums.items():
        assert (report["command_buffers"], report["captured"]) == (1, 6), name
        assert report["outside"] == [], name
