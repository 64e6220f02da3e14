"""The budget divides memory exactly, to the byte, and explains the division."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.cache.budget import bytes_per_sequence, bytes_per_token, plan_budget
from jaxkv.cache.spec import group_layers
from jaxkv.cache.variants import gqa, mla, place, sampling
from tests.cache.layouts import MAMBA2, hybrid

# A token in hybrid()'s "gqa" is 2 layers x (key + value) x 1 head x 2 components x 2 bytes = 16 bytes, 4 to a page.
# A page of "odd" holds 2 tokens of 3 bytes. Four tokens in both cost 4 * 16 + 4 * 3 bytes.
BUNDLE = 4 * 16 + 4 * 3
MAMBA2_STATE = 3 * (2 * 4 + 2 * 8) * 2 + 2 * 4 * 8 * 4
SAMPLING_STATE = 4


def states_of(max_sequences):
    return (max_sequences + 1) * (MAMBA2_STATE + SAMPLING_STATE)


def plan(budget_bytes, layout=None, max_sequences=3):
    return plan_budget(layout or hybrid(), budget_bytes, max_sequences=max_sequences, max_tokens=10)


@pytest.mark.parametrize("bundles", [1, 2, 17])
def test_pages_are_exact_at_the_boundary_of_a_byte(bundles):
    boundary = states_of(3) + bundles * BUNDLE
    exact, more = plan(boundary), plan(boundary + 1)
    assert exact.counts == {"gqa": bundles, "odd": 2 * bundles, "mamba2": 4, "sampling": 4}
    assert (exact.bytes, exact.left_over) == (boundary, 0)
    assert (more.counts, more.left_over) == (exact.counts, 1)
    if bundles > 1:
        less = plan(boundary - 1)
        assert less.counts["gqa"] == bundles - 1
        assert less.left_over == BUNDLE - 1


def test_a_budget_short_of_one_page_is_refused_with_the_numbers():
    """The budget is one byte short of the least."""
    least = states_of(3) + BUNDLE
    message = f"at least {least:,} bytes .* but the budget is {least - 1:,}"
    with pytest.raises(ValueError, match=message):
        plan(least - 1)


@given(
    budget=st.integers(1, 10**7),
    max_sequences=st.integers(1, 9),
    page_sizes=st.lists(st.sampled_from([1, 2, 3, 8, 16]), min_size=1, max_size=3),
)
def test_the_arrays_take_the_bytes_that_the_budget_says(budget, max_sequences, page_sizes):
    """The bytes of the specs are those of the arrays, and one more bundle would not fit."""
    specs = [
        gqa(heads + 1, 2, dtype="bfloat16", page_size=size) for heads, size in enumerate(page_sizes)
    ]
    layout = group_layers(place([*specs, MAMBA2, sampling(7)]))
    least = plan_budget(layout, None, max_sequences=max_sequences, max_tokens=1).bytes
    budget += least
    divided = plan_budget(layout, budget, max_sequences=max_sequences, max_tokens=99)
    assert sum(array.nbytes for array in layout.arrays(divided.counts)) == divided.bytes
    assert divided.bytes + divided.left_over == budget
    tokens = {group.page_size * divided.counts[group.name] for group in layout.paged_groups}
    assert tokens == {divided.num_tokens}
    smallest = least - sum(
        group.bytes_per_unit * divided.counts[group.name]
        for group in layout.groups
        if group.unit == "state"
    )
    assert 0 <= divided.left_over < smallest


def test_without_a_budget_the_cache_is_as_large_as_the_sequences_need():
    divided = plan(None)
    assert divided.counts == {"gqa": 3 * 3, "odd": 2 * 9, "mamba2": 4, "sampling": 4}
    assert divided.left_over == 0
    assert divided.num_sequences == 3


def test_a_cache_of_states_alone_has_no_pages():
    divided = plan(10_000, group_layers(place([MAMBA2, sampling(7)])))
    assert divided.counts == {"mamba2": 4, "sampling": 4}
    assert divided.num_tokens is None
    assert divided.num_sequences == 3
    assert divided.left_over == 10_000 - states_of(3)


def test_bytes_per_token_and_per_sequence():
    groups = {group.name: group for group in hybrid().groups}
    assert {name: bytes_per_token(group) for name, group in groups.items()} == {
        "gqa": 16,
        "odd": 3,
        "mamba2": 0,
        "sampling": 0,
    }
    assert bytes_per_sequence(groups["gqa"], 5) == 2 * 4 * 16
    assert bytes_per_sequence(groups["mamba2"], 5) == MAMBA2_STATE


def test_sequences_that_fit_follow_from_the_scarcest_group():
    assert plan(states_of(3) + 3 * BUNDLE).num_sequences == 1
    assert plan(states_of(3) + 2 * BUNDLE).num_sequences == 0


def test_the_explanation_names_each_group_its_bytes_and_what_is_left():
    text = plan(states_of(3) + 5 * BUNDLE + 7).explain()
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["group", "layers", "count", "bytes/token", "bytes/sequence", "bytes"]
    assert lines[1] == ["gqa", "2", "5", "pages", "16", "192", "320"]
    assert lines[2] == ["odd", "1", "10", "pages", "3", "30", "60"]
    assert lines[3] == ["mamba2", "1", "4", "states", "0", "400", "1,600"]
    assert "1,996 of 2,003 bytes used, 7 left over; 20 tokens fit" in text
    assert "1 of 3 sequences fit at 10 tokens each" in text


def test_the_explanation_ends_with_the_notes_of_the_specs():
    noted = mla(4, 2, dtype="bfloat16", page_size=2, quantised="fp8")
    text = plan(None, group_layers(place([noted, sampling(7)]))).explain()
    assert text.splitlines()[-1] == "mla: quantised='fp8' was ignored: kept as bfloat16"


@pytest.mark.parametrize("limits", [(0, 1), (1, 0)])
def test_limits_are_at_least_one(limits):
    with pytest.raises(ValueError, match="must be at least 1"):
        plan_budget(hybrid(), None, max_sequences=limits[0], max_tokens=limits[1])


def test_half_precision_layout_of_a_known_model():
    """Llama-3.1-8B: 32 layers x 2 x 8 heads x 128 x 2 bytes = 128 KiB per token."""
    layout = group_layers(place([gqa(8, 128, dtype="bfloat16", page_size=64)] * 32))
    assert bytes_per_token(layout.groups[0]) == 128 * 1024
