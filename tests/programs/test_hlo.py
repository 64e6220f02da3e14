"""Parsing HLO text: each form of line that XLA writes is one instruction."""

import pytest

from jaxkv.programs.hlo import ArrayType, parse_module

TEXT = """HloModule jit_step, input_output_alias={ {0}: (1, {}, may-alias), {1}: (3, {}, must-alias) }, \
entry_computation_layout={(f32[4]{0}, bf16[8,4]{1,0:T(8,128)(2,1)})->f32[4]{0}}

%region.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %b = f32[] parameter(1)
}

ENTRY %main.5 (weight.1: f32[4], pool.1: bf16[8,4]) -> (bf16[8,4], f32[]) {
  %weight.1 = f32[4]{0} parameter(0), sharding={mesh[], [{}]}, metadata={op_name="params['w (%x)']"}
  %pool.1 = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(1)
  %call.1 = (bf16[8,4]{1,0}, u8[0]{0}, /*index=2*/f32[]) custom-call(%weight.1, %pool.1), \
custom_call_target="mosaic_gpu_v2", output_to_operand_aliasing={{0}: (1, {})}, metadata={op_name="calls=%nothing"}
  %gte.1 = bf16[8,4]{1,0} get-tuple-element(%call.1), index=0
  %slice-start = ((bf16[8,4]{1,0}), bf16[2,4]{1,0}, u32[]) slice-start(%gte.1), slice={[0:2], [0:4]}
  %slice-done = bf16[2,4]{1,0} slice-done(%slice-start)
  %copy-start.2 = (bf16[8,4]{1,0:S(5)}, bf16[8,4]{1,0}, u32[]) copy-start(%gte.1)
  %while.1 = (s32[], bf16[8,4]{1,0}) while(%tuple.0), condition=%cond.1, body=%body.1, \
backend_config={"known_trip_count":{"n":"3"}}
  %pick.1 = f32[] conditional(%p, %a, %b), branch_computations={%first, %second.2}
  %sum.1 = f32[] reduce(%weight.1, %zero), dimensions={0}, to_apply=%region.1
  ROOT %tuple.1 = (bf16[8,4]{1,0}, f32[]) tuple(%gte.1, %sum.1)
}
"""


@pytest.fixture(scope="module")
def module():
    return parse_module(TEXT)


def line(module, name):
    return next(line for line in module.computations[module.entry] if line.name == name)


def test_the_header_names_what_comes_back_in_whose_memory(module):
    assert dict(module.aliases) == {0: 1, 1: 3}
    assert module.entry == "main.5"
    assert module.num_parameters == 2


def test_a_lone_output_is_output_zero():
    lone = parse_module(
        "HloModule a, input_output_alias={ {}: (2, {}, may-alias) }\nENTRY %m () -> f32[] {\n}\n"
    )
    assert dict(lone.aliases) == {0: 2}


def test_types_keep_their_layout(module):
    assert line(module, "pool.1").results == (ArrayType("bf16", (8, 4), "{1,0:T(8,128)(2,1)}"),)
    assert line(module, "pool.1").results[0].elements == 32
    assert line(module, "weight.1").index == 0


def test_a_custom_call_says_which_operand_it_updates(module):
    call = line(module, "call.1")
    assert [result.dtype for result in call.results] == ["bf16", "u8", "f32"]
    assert (call.opcode, call.operands, call.callees) == ("custom-call", ("weight.1", "pool.1"), ())
    assert call.operand_aliases == {0: 1}
    assert call.is_tuple


def test_a_split_operation_counts_as_the_operation(module):
    start = line(module, "slice-start")
    assert (start.opcode, [result.sizes for result in start.results]) == ("slice", [(2, 4)])
    assert not start.is_tuple
    assert line(module, "slice-done").opcode == "async-done"
    copy = line(module, "copy-start.2")
    assert (copy.opcode, copy.results) == ("copy", (ArrayType("bf16", (8, 4), "{1,0:S(5)}"),))


def test_callees_are_named_without_the_loop_condition(module):
    assert line(module, "while.1").callees == ("body.1",)
    assert line(module, "pick.1").callees == ("first", "second.2")
    assert line(module, "sum.1").callees == ("region.1",)
    assert line(module, "gte.1").index == 0
    assert line(module, "tuple.1").is_root


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse_module("module @jit_f {}")
