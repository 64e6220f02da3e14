"""Following a pool through hand-written programs: instructions that pass it on, read it or copy it."""

import pytest

from jaxkv.programs.alias_flow import follow_pools
from jaxkv.programs.hlo import parse_module

POOL = "f32[8,4]{1,0}"


def follow(body, computations="", root="%x", outputs=POOL):
    text = f"""HloModule m
{computations}
ENTRY %main (pool: f32[8,4], other: f32[8,4], slots: s32[2]) -> {outputs} {{
  %pool = {POOL} parameter(0)
  %other = {POOL} parameter(1)
  %slots = s32[2]{{0}} parameter(2)
{body}
  ROOT %root = {outputs} bitcast({root})
}}
"""
    return follow_pools(parse_module(text), {0: 0, 1: 1})


def fused(result, *lines):
    body = "\n".join(f"  {line}" for line in lines)
    return f"""
%fused (p: f32[8,4], i: s32[2]) -> {result} {{
  %p = {POOL} parameter(0)
  %i = s32[2]{{0}} parameter(1)
{body}
}}
"""


@pytest.mark.parametrize(
    "line",
    [
        "f32[8,4]{1,0} scatter(%pool, %slots, %u), to_apply=%add",
        "f32[8,4]{1,0} dynamic-update-slice(%pool, %u, %slots)",
        "f32[8,4]{1,0} optimization-barrier(%pool)",
        'f32[8,4]{1,0} custom-call(%slots, %pool), custom_call_target="k", output_to_operand_aliasing={{}: (1, {})}',
    ],
)
def test_updates_in_place_hand_the_pool_on(line):
    flow = follow(f"  %u = f32[2,4]{{1,0}} constant({{...}})\n  %x = {line}")
    assert (dict(flow.outputs), flow.copies) == ({0: 0}, ())


@pytest.mark.parametrize(
    ("line", "exact"),
    [
        ("f32[8,4]{1,0} copy(%pool)", True),
        ("(f32[8,4]{1,0}, f32[8,4]{1,0}, u32[]) copy-start(%pool)", True),
        ("f32[8,4]{0,1} copy(%pool)", False),
        ("f32[4,8]{1,0} transpose(%pool), dimensions={1,0}", False),
        ("bf16[8,4]{1,0} convert(%pool)", False),
        ("f32[8,4]{1,0} multiply(%slots, %pool)", False),
        ("f32[16,4]{1,0} concatenate(%pool, %other), dimensions={0}", False),
    ],
)
def test_an_array_of_the_pools_size_made_from_it_is_a_copy(line, exact):
    (copy,) = follow(f"  %x = {line}").copies
    assert (copy.pool, copy.exact) == (0, exact)
    assert copy.line.startswith("%x = ")


@pytest.mark.parametrize(
    "line",
    [
        "f32[2,4]{1,0} gather(%pool, %slots), slice_sizes={1,4}",
        "f32[8,4]{1,0} gather(%pool, %slots), slice_sizes={1,4}",
        "f32[8,8]{1,0} dot(%pool, %other)",
        "f32[2,4]{1,0} slice(%pool), slice={[0:2], [0:4]}",
        'f32[8,4]{1,0} custom-call(%pool), custom_call_target="attention"',
    ],
)
def test_reading_a_pool_is_no_copy(line):
    flow = follow(f"  %x = {line}")
    assert (dict(flow.outputs), flow.copies) == ({}, ())


def test_a_fusion_that_scatters_is_in_place():
    inside = fused(
        POOL,
        "%flat = f32[8,4]{1,0} reshape(%p)",
        "ROOT %s = f32[8,4]{1,0} scatter(%flat, %i, %i), to_apply=%add",
    )
    flow = follow("  %x = f32[8,4]{1,0} fusion(%other, %slots), kind=kInput, calls=%fused", inside)
    assert (dict(flow.outputs), flow.copies) == ({0: 1}, ())


def test_a_fusion_copies_if_its_result_is_the_whole_pool():
    inside = fused(
        "bf16[8,4]",
        "%c = bf16[8,4]{1,0} convert(%p)",
        "ROOT %s = bf16[8,4]{1,0} scatter(%c, %i, %i), to_apply=%add",
    )
    flow = follow("  %x = bf16[8,4]{1,0} fusion(%pool, %slots), kind=kLoop, calls=%fused", inside)
    assert [copy.line[:2] for copy in flow.copies] == ["%x"]


def test_a_fusion_may_compute_the_whole_pool_if_only_a_part_is_kept():
    inside = fused(
        "bf16[8,4]",
        "%c = bf16[8,4]{1,0} convert(%p)",
        "ROOT %g = bf16[8,4]{1,0} gather(%c, %i), slice_sizes={1,4}",
    )
    flow = follow("  %x = bf16[8,4]{1,0} fusion(%pool, %slots), kind=kLoop, calls=%fused", inside)
    assert flow.copies == ()


def test_what_is_called_without_a_pool_is_not_even_parsed():
    """In a large program that is nearly all."""
    flow = follow(
        f"  %y = s32[2]{{0}} fusion(%slots), calls=%nowhere\n  %x = {POOL} bitcast(%pool)"
    )
    assert (dict(flow.outputs), flow.copies) == ({0: 0}, ())


LOOP = f"""
%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {{
  %state = (s32[], {POOL}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %p = {POOL} get-tuple-element(%state), index=1
  %q = {POOL} LINE
  ROOT %next = (s32[], {POOL}) tuple(%i, %q)
}}
"""


def looped(line):
    body = f"""  %zero = s32[] constant(0)
  %start = (s32[], {POOL}) tuple(%zero, %pool)
  %while = (s32[], {POOL}) while(%start), condition=%cond, body=%body
  %x = {POOL} get-tuple-element(%while), index=1"""
    return follow(body, LOOP.replace("LINE", line))


def test_a_loop_hands_its_pools_on():
    flow = looped("dynamic-update-slice(%p, %i, %i)")
    assert (dict(flow.outputs), flow.copies) == ({0: 0}, ())


def test_a_copy_inside_a_loop_is_found():
    flow = looped("copy(%p)")
    assert [copy.line.split(" ")[0] for copy in flow.copies] == ["%q"]


def test_branches_that_agree_hand_the_pool_on():
    branches = "\n".join(
        f"%{name} (p: f32[8,4]) -> f32[8,4] {{\n  %p = {POOL} parameter(0)\n  ROOT %r = {POOL} {line}\n}}"
        for name, line in (("yes", "dynamic-update-slice(%p, %p, %p)"), ("no", "bitcast(%p)"))
    )
    call = f"  %x = {POOL} conditional(%slots, %pool, NEXT), branch_computations={{%yes, %no}}"
    assert dict(follow(call.replace("NEXT", "%pool"), branches).outputs) == {0: 0}
    assert dict(follow(call.replace("NEXT", "%other"), branches).outputs) == {}


def test_two_pools_that_change_places_are_told_apart():
    swapped = f"  %x = ({POOL}, {POOL}) tuple(%other, %pool)"
    flow = follow(swapped, outputs=f"({POOL}, {POOL})")
    assert dict(flow.outputs) == {0: 1, 1: 0}
