"""The checks of annotations that tests add to our packages: those of local functions, which are written once."""

import gc
import weakref

import pytest

from tests import shape_checks

beartype = pytest.importorskip("beartype").beartype


class Held:
    """Something that a local function holds."""

    value = 3


def local(held):
    def added(number: int) -> int:
        return number + held.value

    return added


def test_each_local_function_is_checked_and_sees_what_it_holds():
    before = len(shape_checks._WRITTEN)
    one, other = Held(), Held()
    other.value = 10
    checked = [shape_checks._without_sizes(local(held), beartype) for held in (one, other)]
    assert len(shape_checks._WRITTEN) == before + 1
    assert [function(4) for function in checked] == [7, 14]
    for function in checked:
        with pytest.raises(TypeError, match="number='4'"):
            function("4")
    other.value = "x"
    with pytest.raises(TypeError):
        checked[1](4)


def test_checks_hold_nothing_of_the_function_that_they_were_written_for():
    held = Held()
    reference = weakref.ref(held)
    checked = shape_checks._without_sizes(local(held), beartype)
    assert checked(1) == 4
    del checked, held
    gc.collect()
    assert reference() is None
