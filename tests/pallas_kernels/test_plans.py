"""Checks and plans of launches take arrays and structs alike, case by case, as they would on an H200.

With beartype installed, as in every development environment, an annotation that is not true fails here.
"""

import ast
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jaxtyping
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import device, tuning
from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.arguments.delta import DeltaSizes
from pallas_kernels.arguments.latent import LatentArrays, LatentOptions, SparseArrays
from pallas_kernels.arguments.ssd import Sizes
from pallas_kernels.causal_conv import mosaic_block as conv_block
from pallas_kernels.causal_conv import mosaic_gpu as conv
from pallas_kernels.delta_scan import mosaic_gpu as delta_scan
from pallas_kernels.delta_update import mosaic_gpu as delta_update
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.filter_bounds import mosaic_gpu as bounds
from pallas_kernels.grouped_matmul import mosaic_gpu as grouped
from pallas_kernels.index_topk import mosaic_gpu as topk
from pallas_kernels.index_topk import mosaic_scores
from pallas_kernels.index_topk.arguments import IndexArrays
from pallas_kernels.latent_attention import mosaic_gpu as latent
from pallas_kernels.packed import tile_attention
from pallas_kernels.page_write import mosaic_gpu as write
from pallas_kernels.paged_attention import cudnn
from pallas_kernels.paged_attention import mosaic_gpu as paged
from pallas_kernels.ragged_attention import mosaic_gpu as ragged
from pallas_kernels.rotary_write import mosaic_gpu as rotary
from pallas_kernels.rotary_write.arguments import RotaryArrays
from pallas_kernels.skinny_matmul import mosaic_gpu as skinny
from pallas_kernels.skinny_matmul.arguments import MatmulArrays, MatmulOptions
from pallas_kernels.sparse_attention import mosaic_gpu as sparse
from pallas_kernels.ssd_scan import mosaic_gpu as scan
from pallas_kernels.ssd_scan import mosaic_schedule as scan_schedule
from pallas_kernels.ssd_update import mosaic_gpu as update
from pallas_kernels.workbench.search_space import TUNED_OPS, find_space
from tests.fast_cases import fast_cases
from tests.pallas_kernels.contract import by_name
from tests.pallas_kernels.structs import MAKERS, cases_of, floats, of_arrays, structs_of

OPS = tuple(MAKERS)
SMALL = [(op, case) for op in OPS for case in cases_of(op) if case.ci]


@pytest.fixture
def h200(monkeypatch):
    """Lets checks and plans find an H200."""
    monkeypatch.setattr(device, "gpu_arch", lambda: device.HOPPER)
    monkeypatch.setattr(cudnn, "gpu_arch", lambda: device.HOPPER)
    card = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(tuning, "get_default_device", lambda: card)


def chosen(given, *names):
    return {name: given[name] for name in names if name in given}


def but(given, *names):
    return {name: value for name, value in given.items() if name not in names}


def plan_decode(given):
    """Plans the launch that `torch_bridge` makes by itself, too."""
    arrays = [given[name] for name in ("q", "k_pages")]
    options = chosen(given, "scale", "window", "soft_cap")
    has_sinks = given.get("sinks") is not None
    paged.direct_launch(*arrays, given["page_table"].shape[1], **options, has_sinks=has_sinks)
    by_name(cudnn.why_not, AttentionArrays, ScoreOptions)(**given)
    return paged.why_not(*arrays), tile_attention.why_not(given["q"])


def plan_prefill(given):
    """Plans the launch that `torch_bridge` makes by itself, too."""
    arrays = [given[name] for name in ("q", "k_pages", "page_table")]
    options = chosen(given, "scale", "window", "soft_cap")
    has_sinks = given.get("sinks") is not None
    ragged.direct_launch(*arrays, **options, has_sinks=has_sinks)
    ragged.why_fall_back(given["k_pages"], given["page_table"])
    return ragged.why_not(*arrays[:2]), tile_attention.why_not(given["q"])


def plan_write(given):
    """Plans the launch that `torch_bridge` makes by itself, too."""
    write.direct_launch(**given)
    return (write.why_not(**given),)


def plan_conv(given):
    arrays, first = (given["weight"], given["x"]), given["first_channel"]
    conv_block.Geometry.of(*arrays, first, True)
    return (conv.why_not(*arrays, first_channel=first),)


def plan_topk(given):
    scores = mosaic_scores.refusal(given["q"], given["index_pages"])
    return by_name(topk.why_not, IndexArrays)(**given), scores


def plan_scan(given):
    arrays = given["states"], given["xbc"]
    geometry = scan_schedule.Geometry.of(*arrays)
    refusal = scan.why_not(*arrays, chunk_size=given["chunk_size"])
    if refusal is None:
        scan_schedule.Schedule.by_rule(geometry, len(given["seq_lens"].shape))
    return (refusal,)


def plan_update(given):
    arrays = given["states"], given["xbc"]
    Sizes.of(*arrays)
    return (update.why_not(*arrays),)


# Calls all that an op asks before it launches, and returns what it was told; a kernel's refusal comes first.
PLANS = {
    "paged_attention": plan_decode,
    "ragged_attention": plan_prefill,
    "latent_attention": lambda given: (
        by_name(latent.why_not, LatentArrays, LatentOptions)(**given),
    ),
    "index_topk": plan_topk,
    "sparse_attention": lambda given: (
        by_name(sparse.why_not, SparseArrays, LatentOptions)(**given),
    ),
    "filter_bounds": lambda given: (bounds.why_not(given["logits"]),),
    "page_write": plan_write,
    "rotary_write": lambda given: (
        by_name(rotary.why_not, RotaryArrays)(**but(given, "value_norm")),
    ),
    "skinny_matmul": lambda given: (by_name(skinny.why_not, MatmulArrays, MatmulOptions)(**given),),
    "grouped_matmul": lambda given: (grouped.why_not(**but(given, "group_sizes")),),
    "causal_conv": plan_conv,
    "ssd_scan": plan_scan,
    "ssd_update": plan_update,
    "delta_scan": lambda given: (
        delta_scan.why_not(given["states"], given["qkv"], chunk_size=given["chunk_size"]),
    ),
    "delta_update": lambda given: (delta_update.why_not(given["states"], given["qkv"]),),
}


@pytest.mark.parametrize(("op", "case"), SMALL, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_structs_are_those_of_the_inputs_and_plans_the_same(op, case, dtype, h200):
    inputs, structs = case.inputs(0, dtype), structs_of(op, case, dtype)
    assert of_arrays(inputs) == structs
    assert PLANS[op](inputs) == PLANS[op](structs)


@pytest.mark.parametrize("op", OPS)
def test_every_case_is_planned_from_structs(op, h200):
    told = [
        PLANS[op](structs_of(op, case, dtype))
        for case in cases_of(op)
        for dtype in ("bfloat16", "float32")
    ]
    assert any(refusal is None for refusal, *_ in told), "no plan was made to its end"


@pytest.mark.parametrize("op", TUNED_OPS)
def test_schedules_to_try_are_found_from_structs(op, h200):
    for case in cases_of(op):
        given = structs_of(op, case)
        if PLANS[op](given)[0] is None:
            assert find_space(op, given).candidates


def test_sizes_of_delta_layers_are_read_from_structs():
    assert DeltaSizes.of(floats(3, 4, 8, 6), floats(19, 56)) == DeltaSizes(2, 4, 8, 6)


# Tests of other kernels lower them, which traces their bodies too.
@pytest.mark.parametrize(
    "op",
    fast_cases(
        OPS, "skinny_matmul", "grouped_matmul", "index_topk", "filter_bounds", "latent_attention"
    ),
)
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_case_is_traced_for_an_h200(op, large, h200):
    """The bodies of kernels are traced, too, so that their annotations are met as on a GPU."""
    if device.why_not_mosaic():
        pytest.skip(device.why_not_mosaic())
    traced = 0
    cases = cases_of(op)
    # Of small ones, which have every option, each second; a kernel may take none of them.
    quick = [*[case for case in cases if case.ci][::2], cases[-1]]
    for case in [case for case in cases if case not in quick] if large else quick:
        given = structs_of(op, case)
        arrays = {name: value for name, value in given.items() if holds_structs(value)}
        options = but(given, *arrays)
        run = partial(getattr(pallas_kernels, op), implementation="mosaic_gpu", **options)
        try:
            jax.jit(run).trace(**arrays)
        except Unsupported:
            continue
        traced += 1
    assert traced, "the kernel takes none of its cases"


def holds_structs(value):
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value))


# Those that are asked with structs, whatever op they belong to.
ASKED = ("of", "why_not", "refusal", "why_fall_back")


def parameters():
    """Returns file, function, parameter and annotation of each function that is asked before a launch."""
    root = Path(pallas_kernels.__file__).parent
    for file in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in ASKED:
                for argument in node.args.args + node.args.kwonlyargs:
                    if argument.annotation is not None:
                        yield file.name, node.name, argument.arg, ast.unparse(argument.annotation)


def test_whatever_is_asked_before_a_launch_is_said_to_take_structs():
    found = list(parameters())
    assert sum("ArrayOrStruct" in annotation for *_, annotation in found) > 50
    assert [parameter for parameter in found if re.search(r"\bArray\b", parameter[-1])] == []


def test_the_checker_is_on_and_would_find_an_annotation_that_lies():
    """Values are never read, so `str` in place of an array could only be found by an annotation."""
    pytest.importorskip("beartype")
    with pytest.raises(jaxtyping.TypeCheckError):
        bounds.why_not("logits")
    assert bounds.why_not(np.zeros((1, 2), np.float32))
