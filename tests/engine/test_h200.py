"""The engine's programs compiled for an H200 without a GPU: launches, copies, donation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.engine.h200 import DEEP, STORED
from tests.engine.h200_host import LAYERS

CHOOSING, MANY_ROWS = ("decode_drawn", "decode_weighed", "decode_processed"), "decode_64_rows"
PROCESSED = ("decode_processed", "multi_step_processed", "readmit_processed")
IN_TWO = ("forward", "sample")
SHARING = ("decode_sharing", "multi_step_sharing")
ADAPTED = "decode_adapted"
INVARIANT = "prefill_invariant"
VERIFY = ("verify", "verify_followed", "verify_weighed")
DRAFTS = ("draft", "draft_head", "catch_up_head", "put_drafts")
# Of a model that keeps hidden states for a head.
KEEPING = ("decode_keeping", "verify_keeping")
STEPS = (
    *("decode", "decode_best", MANY_ROWS, SHARING[0], *CHOOSING, *IN_TWO, ADAPTED),
    *("prefill", INVARIANT, *VERIFY, *KEEPING),
)
GENERATES = ("generate_short", "generate")
GOOD = (*STEPS, "multi_step", "multi_step_processed", SHARING[1], *GENERATES)
BESIDE = ("copy", "readmit", "readmit_processed")
ODD, LATE, SWAPPED = "one_page", "read_late", "swapped"
BAD = (SWAPPED, LATE, "scanned")
HOST = ("host_swap_out", "host_swap_in", "host_states_out", "host_states_in")
HYBRID = ("hybrid_experts_decode_mosaic_gpu",)
# Steps that show of a model or of an option what one of the others shows too.
MORE_HYBRID = (
    "hybrid_delta_decode_mosaic_gpu",
    "hybrid_delta_prefill_mosaic_gpu",
    "hybrid_decode_mosaic_gpu",
    "hybrid_keeping_decode_mosaic_gpu",
    "hybrid_keeping_prefill_mosaic_gpu",
    "hybrid_keeping_verify_mosaic_gpu",
    "hybrid_prefill_mosaic_gpu",
    "hybrid_experts_prefill_mosaic_gpu",
    "hybrid_delta_verify_one_mosaic_gpu",
    "hybrid_kimi_decode_mosaic_gpu",
)
# XLA writes the state of one row in another way than those of several. Its scans are loops outside of the graph.
HYBRID_OF_XLA = (
    "hybrid_verify_one_xla",
    "hybrid_kimi_prefill_mosaic_gpu",
    "hybrid_kimi_verify_one_mosaic_gpu",
)
LATENT = (
    "latent_decode_mosaic_gpu",
    "latent_expanded_mosaic_gpu",
    "latent_absorbed_mosaic_gpu",
    "latent_sparse_decode_records_mosaic_gpu",
    "latent_decode_one_mosaic_gpu",
    "latent_sparse_decode_plain_mosaic_gpu",
    "latent_sparse_prefill_records_mosaic_gpu",
    "latent_sparse_expanded_records_mosaic_gpu",
)
WINDOWS = (
    *("windows_gemma_decode", "windows_gemma4_decode", "windows_gpt_oss_decode"),
    *("windows_gemma_prefill", "windows_gpt_oss_prefill"),
)
# XLA attends to prompts in loops, which are outside of command buffers.
LOOPED = "windows_gemma4_prefill"
DIVIDED = "devices_decode_2"
MORE_DIVIDED = (
    "devices_decode_8",
    *("devices_decode_drawn_2", "devices_decode_filtered_2", "devices_decode_searched_2"),
    "devices_decode_sharing_2",
    "devices_prefill_2",
    "devices_multi_step_2",
    "devices_experts_decode_2",
)
PEERS = (
    *("devices_decode_peers_2", "devices_decode_peers_8", "devices_prefill_peers_2"),
    *("devices_multi_step_peers_2", "devices_experts_decode_peers_2"),
)
"""Programs whose sums go by way of mailboxes."""
SAMPLES = "devices_sample_2"
# Exchanges of the sampler. A greedy one needs the largest logit and its id; a draw another maximum; log-probabilities
# the chosen logit, the largest ones and their ids, and two for the sum of exponentials. Filters of few rows need all
# logits; of more, eight for each of their two searches, and one for the sum of what top-k leaves.
SAMPLED_BY = {
    "devices_decode_drawn_2": 2 + 1 + 1 + 2 + 2,
    SAMPLES: 2 + 1 + 1 + 2 + 2,
    "devices_decode_filtered_2": 1,
    "devices_decode_searched_2": 2 + 1 + 1 + 2 + 2 + 8 + 1 + 8,
}
OTHERS = (*HYBRID, *MORE_HYBRID, *LATENT, *WINDOWS)
SLOW_BATCHES = (
    # A loop of steps is one of the fast programs too: `multi_step`, whose steps are those of `decode`.
    # The kernel that attends to prompts is compiled by tests/pallas_kernels/h200/test_kernels.py.
    ("decode", "prefill", MANY_ROWS, *SHARING, *CHOOSING, *IN_TWO, *PROCESSED, ADAPTED, *GENERATES),
    # What is refused here is refused by tests/programs/test_audit.py too; a scan stays fast.
    (ODD, LATE, SWAPPED, INVARIANT, *VERIFY, *WINDOWS, LOOPED),
    (*DRAFTS, *KEEPING),
    (*MORE_HYBRID, *HYBRID_OF_XLA),
    LATENT,
    (DIVIDED, *MORE_DIVIDED, SAMPLES),
    PEERS,
)
"""Slow programs that one process compiles."""

SLOW = tuple(name for batch in SLOW_BATCHES for name in batch)
FAST = [
    *(name for name in (*GOOD, *BESIDE, ODD, *BAD, *HOST) if name not in SLOW),
    *HYBRID,
]
# Our kernels in a program. Per layer of a Llama one that writes, one that attends, and of few rows one for each of
# four products; of more than 64 tokens no product is a kernel. Products of experts are two, however many tokens. With
# adapters, gate and up are multiplied twice: with the activation in the kernel, and without it.
KERNELS = {
    "decode": 0,
    "decode_best": 6 * DEEP + 1,
    MANY_ROWS: 6 * 2 + 1,
    # One more per layer for the keys that rows share.
    **dict.fromkeys(SHARING, 7 * 2 + 1),
    ADAPTED: 7 + 1,
    # The logits are in the second program.
    IN_TWO[0]: 6,
    "prefill": 2 * 2 + 1,
    # With a fixed order of sums, prompts have the kernels of decode steps, and one for the factors of a row in the norm
    # before gate and up.
    INVARIANT: 6 + 1 + 1,
    # So have the few tokens of steps that verify drafts.
    VERIFY[0]: 6 + 1,
    VERIFY[1]: 6 + 1,
    # Hidden states are written to their pages by a fusion of XLA's.
    **dict.fromkeys(KEEPING, 6 + 1),
    "windows_gemma_decode": 13,
    # In each of two layers four dense products, and of the experts those two with what they need. In one a write and
    # attention, which in the other are XLA's.
    "windows_gemma4_decode": 2 * (4 + 2 + 3) + 2 + 1,
    # The experts of each of two layers: the choice, the rows, the visits.
    "windows_gpt_oss_decode": 13 + 2 * 3,
    "windows_gemma_prefill": 5,
    "windows_gpt_oss_prefill": 9 + 2 * 3,
}
UNIT = LAYERS * 2 * 64 * 4 * 128 * 2
"""Bytes of one page over all layers."""


def compiled(names):
    """Compiles programs in a process of their own and returns the facts about each."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(Path(__file__).with_name("h200_programs.py")), *names]
    # Compiled as users compile, which the other tests are not.
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in found:
        pytest.skip(found["skipped"])
    return found


@pytest.fixture(scope="module")
def found():
    """Facts by the names of programs that were compiled."""
    return {}


@pytest.fixture
def report(found, request):
    """Returns the facts about a program by its name.

    All fast ones are compiled together, and the slow ones in batches, each in a minute or less if nothing runs beside.
    """

    def of(name):
        if name not in found:
            slow = next((batch for batch in SLOW_BATCHES if name in batch), None)
            assert not slow or request.node.get_closest_marker("slow"), "mark this test as slow"
            found.update(compiled(slow or FAST))
        return found[name]

    return of


def each(*names):
    """Parametrises a test over programs."""
    marked = [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in names]
    return pytest.mark.parametrize("name", marked)


@each(
    *(*GOOD, *BESIDE, *HOST, *DRAFTS, *OTHERS, *HYBRID_OF_XLA),
    *(DIVIDED, *MORE_DIVIDED, *PEERS, SAMPLES, LOOPED),
)
def test_a_program_updates_its_cache_in_place_on_an_h200(report, name):
    # Every leaf of the cache is its own output, and no pool is copied: pages, states, latents, records and index keys.
    found = report(name)
    assert found["backend"] == "gpu"
    assert found["problems"] == []
    assert found["copies"] == []
    assert found["alias_bytes"] == found["cache_bytes"]
    # What takes pages or states out of the cache returns none.
    assert (found["cache_bytes"] > 0) == (not name.endswith("_out"))


def test_programs_of_our_kernels_have_names_on_disk(report):
    """A trace holds variables of the code around the kernel. They have no value, and no part in the name."""
    names = {report(name)["stored_as"] for name in STORED}
    assert len(names) == len(STORED)
    assert all(len(name.rpartition("-")[2]) == 64 for name in names)


@each(ODD)
def test_a_cache_of_one_page_may_be_swept_by_whoever_reads_it(report, name):
    # Reading its only page is reading the pool, which attention without a kernel does in several passes.
    assert report(name)["problems"] == []
    assert report(name)["alias_bytes"] == report(name)["cache_bytes"]


@each(*STEPS, *OTHERS)
def test_a_step_is_one_command_buffer(report, name):
    """Nothing is left outside the graph, so the host does not translate slots between layers."""
    found = report(name)
    assert found["command_buffers"] == 1
    assert found["outside"] == []
    assert found["captured"] > 10


@each(*KERNELS)
def test_the_best_step_writes_attends_and_multiplies_in_kernels_of_ours(report, name):
    """Beside those of the layers stand the logits."""
    assert report(name)["custom_calls"].count("mosaic_gpu_v2") == KERNELS[name]


@each(*GOOD, *DRAFTS, *OTHERS, DIVIDED, *MORE_DIVIDED, *PEERS)
def test_weights_that_are_copied_early_are_made_by_no_kernel(report, name):
    """The previous kernel could still write what it makes."""
    assert set(report(name)["early_weights"]) <= {"argument", "argument of a loop"}


@each("decode_best", "multi_step_processed")
def test_kernels_of_a_step_copy_weights_early(report, name):
    several = name.startswith("multi_step")
    assert report(name)["early_weights"] == ["argument of a loop" if several else "argument"]


@each(*(name for name in STEPS if name in KERNELS))
def test_a_step_of_a_llama_calls_a_library_for_products_of_many_tokens_alone(report, name):
    """All steps but that one have as few as our kernels multiply, or one kernel for the products of all steps."""
    libraries = {"__cublas$lt$matmul"} if name == "prefill" else set()
    assert set(report(name)["custom_calls"]) - {"mosaic_gpu_v2"} == libraries


@each(DIVIDED, *MORE_DIVIDED, SAMPLES)
def test_several_devices_exchange_one_sum_per_block_by_a_kernel_over_peer_memory(report, name):
    """One for the embeddings and two for each of two layers, then those of the sampler; none is left to NCCL."""
    found = report(name)
    exchanged = SAMPLED_BY.get(name, 2) + (0 if name == SAMPLES else 1 + 2 * 2)
    assert found["collectives"] == ["all-reduce"] * exchanged
    # Each sum of few bytes has two pieces of 2 MiB, which peers can read.
    assert found["sum_bytes"] == exchanged * 2 * 2 * 2**20
    assert found["sums_inside"] + found["outside"].count("kCollectiveKernel") == exchanged
    assert not [kind for kind in found["outside"] if "All" in kind or "Nccl" in kind]
    assert "mosaic_gpu_v2" in found["custom_calls"]


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="JAX 0.11 puts sums between command buffers"
)
@each(DIVIDED, *MORE_DIVIDED, *PEERS, SAMPLES)
def test_several_devices_run_a_step_as_one_command_buffer_with_its_sums(report, name):
    found = report(name)
    assert "kCollectiveKernel" not in found["outside"]
    if name.startswith("devices_multi_step"):
        assert (found["command_buffers"], found["outside"].count("kWhile")) == (2, 1)
    else:
        assert (found["command_buffers"], found["outside"]) == (1, [])


@each(*PEERS)
def test_sums_of_blocks_go_by_way_of_mailboxes_one_after_the_other(report, name):
    """Each needs all before it, since a mailbox holds one sum. XLA exchanges the largest logits and their ids."""
    found = report(name)
    assert found["peer_sums"] == list(range(1 + 2 * 2))
    assert found["collectives"] == ["all-reduce"] * 2
    assert found["sum_bytes"] == 2 * 2 * 2 * 2**20


def test_no_matrix_of_an_expert_is_copied(report):
    # Each of the two is more than this.
    assert report("hybrid_experts_decode_mosaic_gpu")["temp_bytes"] < 8 * 2**20


def test_a_layer_takes_few_nodes_of_the_graph(report):
    """Its six kernels and nothing else: norms, activation and residual stream are parts of the products."""
    step = report("decode_best")
    # Of so many layers that one node more in each would pass this bound.
    assert step["captured"] - 6 * DEEP <= 13


@each("multi_step", "multi_step_processed")
def test_several_steps_are_one_graph_that_is_launched_so_often_without_the_host(report, name):
    # One graph prepares, one is a step. The number of turns is known to the host, so it is not read from the device.
    several = report(name)
    assert several["command_buffers"] == 2
    assert several["outside"].count("kWhile") == 1
    assert len(several["outside"]) <= 3, several["outside"]
    assert several["turns"] == ["4"]


@each(*DRAFTS[:2])
def test_a_chain_of_drafts_is_one_graph_before_a_loop_without_the_host(report, name):
    chain = report(name)
    assert chain["command_buffers"] == 2
    assert chain["outside"].count("kWhile") == 1
    assert len(chain["outside"]) <= 3, chain["outside"]
    # The first of four drafts is that of the pass over the end of the text.
    assert chain["turns"] == ["3"]


@each(*GENERATES)
def test_an_iteration_of_generate_is_one_command_buffer(report, name):
    # One for the prompt and one for each iteration; what decides about the next iteration runs on its own.
    generate = report(name)
    assert generate["command_buffers"] == 2
    assert generate["outside"].count("kWhile") == 1
    assert len(generate["outside"]) <= 4, generate["outside"]


def test_what_moves_pages_takes_no_more_memory_than_they_and_one_launch(report):
    """A few ids beside them. A part for each layer of each page took 40 s to compile."""
    out, back = report("host_swap_out"), report("host_swap_in")
    assert out["temp_bytes"] <= 16 * UNIT + 4096
    assert back["temp_bytes"] <= 16 * UNIT
    assert out["command_buffers"] == back["command_buffers"] == 1
    # Of keys and values: reads of each, and one array per page.
    assert out["captured"] <= 16 + 2


@each(SWAPPED)
def test_swapped_pools_are_refused_on_an_h200(report, name):
    swapped = report(name)
    assert swapped["alias_bytes"] == swapped["cache_bytes"]
    assert any("comes back in the place of" in problem for problem in swapped["problems"])
    assert swapped["copies"]


@each(LATE)
def test_a_read_that_outlives_the_write_is_refused_on_an_h200(report, name):
    assert any("is copied by" in problem for problem in report(name)["problems"])


def test_layers_in_a_scan_are_refused_and_leave_no_command_buffer(report):
    scanned = report("scanned")
    assert any("comes back as a new array" in problem for problem in scanned["problems"])
    assert scanned["command_buffers"] == 0
    assert "kWhile" in scanned["outside"]
