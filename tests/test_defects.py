"""A seeded defect counts as found only by the error that it states."""

import pytest

from tests.defects import Defects


class WrongAnswer(AssertionError):
    """What a check raises."""


def nothing(patch):
    """A defect that changes nothing."""


def raiser(error):
    def run():
        raise error

    return run


def found(defect, programs):
    with pytest.MonkeyPatch.context() as patch:
        defect.assert_found(patch, programs)


def defect_of(*stated, **scene):
    defects = Defects()
    defects(*stated, **scene)(nothing)
    return defects["nothing"]


def test_the_stated_error_finds_a_defect():
    found(defect_of(WrongAnswer), raiser(WrongAnswer("4")))
    found(defect_of(ValueError, "page 3"), raiser(ValueError("page 3 is free")))


def test_a_crash_passes_on():
    with pytest.raises(KeyError):
        found(defect_of(WrongAnswer), raiser(KeyError("page")))


@pytest.mark.parametrize(
    ("stated", "raised"),
    [
        ((ValueError, "page 3"), ValueError("invalid literal for int()")),
        ((AssertionError, "page 3"), WrongAnswer("page 3")),
        ((LookupError, "page 3"), KeyError("page 3")),
    ],
    ids=["message", "subclass", "crash"],
)
def test_another_error_does_not_find_a_defect(stated, raised):
    with pytest.raises(AssertionError):
        found(defect_of(*stated), raiser(raised))


def test_a_defect_that_no_program_notices_fails():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        found(defect_of(WrongAnswer), lambda: None)


def test_a_scene_runs_instead_of_the_programs():
    scene = raiser(AssertionError("the hit is too long"))
    found(defect_of(scene=scene), raiser(KeyError("page")))


def test_a_class_that_an_accident_raises_needs_a_message():
    with pytest.raises(ValueError, match="AssertionError may have any cause"):
        Defects()(AssertionError)
