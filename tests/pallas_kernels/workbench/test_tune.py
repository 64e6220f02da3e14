"""Tuning: which schedule wins, what is written, and that a schedule which is asked for is the one that runs."""

import json
from dataclasses import dataclass, field

import pytest

from pallas_kernels import tuning
from pallas_kernels.paged_attention.cases import CASES
from pallas_kernels.paged_attention.mosaic_schedule import Schedule
from pallas_kernels.workbench import search_space, tune
from pallas_kernels.workbench.op_benchmark import prepare
from pallas_kernels.workbench.tune import Space, Trial, fastest, find_space, write_tuned
from tests.pallas_kernels.contract import device

RULE, DEEP, WIDE = {"stages": 2, "width": 1}, {"stages": 4, "width": 1}, {"stages": 2, "width": 8}
SPACE = Space("rows 8", (RULE, DEEP, WIDE))


@dataclass(frozen=True)
class FakeCase:
    name: str
    ci: bool = False


@dataclass(frozen=True)
class FakeBenchInputs:
    inputs: dict
    shared: dict = field(default_factory=dict)
    own: tuple = ({}, {})


def arrays(case):
    return device(case.inputs(0, "bfloat16"))


def trials(*times, case="a", space=SPACE):
    return [
        Trial(case, space, fields, us) for fields, us in zip(space.candidates, times, strict=True)
    ]


@pytest.fixture
def fake_op(monkeypatch):
    """An op with two cases of one class and a clock that says what it is told."""
    cases = {name: FakeCase(name, ci=name == "small") for name in ("short", "long", "small")}
    times = {"short": (5.0, 4.0, 9.0), "long": (50.0, 90.0, None)}

    def clock(bench, candidates, seconds):
        for fields in candidates:
            us = times[bench.inputs["case"]][SPACE.candidates.index(fields)]
            yield us, "" if us else "WrongResult: it differs from the reference by 3"

    monkeypatch.setattr(tune, "load_cases", lambda op: cases)
    monkeypatch.setattr(tune, "TUNED_OPS", {"fake": None})
    monkeypatch.setattr(tune, "find_space", lambda op, inputs: SPACE)
    monkeypatch.setattr(tune, "prepare", lambda op, case, *_: FakeBenchInputs({"case": case.name}))
    monkeypatch.setattr(tune, "refuse_profilers", lambda: None)
    monkeypatch.setattr(tune, "time_schedules", clock)


def test_the_fastest_schedule_of_a_class_wins():
    assert fastest(trials(9.0, 7.0, 8.0)) == {"rows 8": {**DEEP, "us": 7.0}}


def test_the_rules_schedule_stays_unless_it_is_beaten_by_more_than_noise():
    assert fastest(trials(10.0, 9.9, 12.0))["rows 8"] == {**RULE, "us": 10.0}
    assert fastest(trials(10.0, 9.7, 12.0))["rows 8"] == {**DEEP, "us": 9.7}


def test_a_schedule_must_do_well_on_all_cases_of_its_class():
    both = trials(10.0, 5.0, 9.0, case="a") + trials(10.0, 40.0, 9.0, case="b")
    assert fastest(both)["rows 8"] == {**WIDE, "us": 9.0}


def test_a_schedule_that_failed_on_one_case_is_out():
    both = trials(10.0, 5.0, 9.0, case="a") + trials(10.0, None, None, case="b")
    assert fastest(both)["rows 8"] == {**RULE, "us": 10.0}
    assert fastest(trials(None, None, None)) == {}


def test_writing_keeps_other_classes_and_ops(tmp_path):
    path = tmp_path / "deep" / "card.json"
    write_tuned(path, {"op": {"x": {"stages": 1, "us": 2.5}}, "other": {"x": {"tile": 64}}})
    write_tuned(path, {"op": {"y": {"stages": 3, "us": 1.0}, "x": {"stages": 2, "us": 2.0}}})
    assert json.loads(path.read_text()) == {
        "op": {"x": {"stages": 2, "us": 2.0}, "y": {"stages": 3, "us": 1.0}},
        "other": {"x": {"tile": 64}},
    }
    assert tuning.load_tuned(path)["op"]["x"] == {"stages": 2}


@pytest.mark.usefixtures("fake_op")
def test_the_command_times_real_cases_and_writes_the_winner(tmp_path, capsys):
    path = tmp_path / "card.json"
    assert tune.main(["fake", "--out", str(path)]) == 0
    assert json.loads(path.read_text()) == {"fake": {"rows 8": {**RULE, "us": 5.0}}}
    out = capsys.readouterr().out
    assert "short" in out
    assert "small" not in out
    assert "differs from the reference by 3" in out
    assert "stages=2 width=1  (by rule)" in out
    assert tune.main(["--case", "short", "--out", str(path)]) == 0
    assert json.loads(path.read_text()) == {"fake": {"rows 8": {**DEEP, "us": 4.0}}}


def test_it_goes_from_the_rules_schedule_to_faster_ones_that_differ_in_one_field(monkeypatch):
    def fields(a, b):
        return {"a": a, "b": b}

    candidates = tuple(fields(a, b) for a in (1, 2, 3) for b in (1, 2, 3))
    costs = {(1, 1): 9.0, (1, 2): 8.0, (2, 1): 7.0, (3, 1): 7.5, (2, 2): 5.0, (2, 3): None}
    asked = []

    def clock(bench, candidates, seconds):
        asked.append(candidates)
        yield from ((costs.get(tuple(each.values()), 8.5), "") for each in candidates)

    monkeypatch.setattr(tune, "time_schedules", clock)
    monkeypatch.setattr(tune, "find_space", lambda op, inputs: Space("x", candidates))
    monkeypatch.setattr(tune, "prepare", lambda op, case, *_: FakeBenchInputs({}))
    found = tune.try_schedules("fake", FakeCase("any"))
    assert fastest(found)["x"] == {"a": 2, "b": 2, "us": 5.0}
    assert asked[0] == (fields(1, 1),)
    assert len(found) == 8
    assert fields(3, 3) not in [trial.fields for trial in found]
    assert len(tune.try_schedules("fake", FakeCase("any"), everything=True)) == 9


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["nonesuch"], "nonesuch has no tuned schedules"), ([], "tuning needs a GPU")],
)
def test_the_command_refuses_what_it_cannot_tune(arguments, told, capsys, monkeypatch):
    monkeypatch.setattr(tune, "tuned_path", lambda device: None)
    with pytest.raises(SystemExit):
        tune.main(arguments)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("op", list(tune.TUNED_OPS))
def test_every_op_offers_its_rules_schedule_first_and_none_twice(op):
    for case in tune.load_cases(op).values():
        if case.ci and "short" in case.name:
            space = find_space(op, arrays(case))
            assert space.shape_class
            assert space.candidates
            assert len({tuple(fields.items()) for fields in space.candidates}) == len(
                space.candidates
            )


def test_a_schedule_on_trial_is_the_one_that_the_op_takes():
    case = next(case for case in CASES if case.name == "llama-b3-short")
    space = find_space("paged_attention", arrays(case))
    arguments = search_space.decode_arguments(arrays(case))
    for fields in space.candidates[:4]:
        with tuning.trying("paged_attention", fields):
            assert Schedule.of(*arguments) == Schedule(**fields)
    with tuning.trying("another op", space.candidates[-1]):
        assert Schedule.of(*arguments) == Schedule(**space.candidates[0])


def test_the_clock_checks_the_answer_before_it_times(monkeypatch):
    """On a CPU with the plain implementation, which knows no schedules: all take alike."""
    monkeypatch.setattr(tune, "KERNEL", "xla")
    case = next(case for case in CASES if case.name == "one-row")
    bench = prepare("paged_attention", case, "float32", 0)
    timed = list(tune.time_schedules(bench, [RULE, DEEP], 0.001))
    assert all(us is not None and us > 0 for us, _ in timed)
    bench.expected[0][:] += 1
    timed = list(tune.time_schedules(bench, [RULE], 0.001))
    assert timed[0][0] is None
    assert "WrongResult" in timed[0][1]
