"""Tuned schedules are read once from a file per kind of device; what no file knows is left to heuristics."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

from pallas_kernels import tuning

ENTRY = {"stages": 3, "cluster": 2, "us": 12.5}


@dataclass(frozen=True)
class Card:
    device_kind: str
    platform: str = "gpu"


@pytest.fixture
def on_card(monkeypatch, tmp_path):
    """Pretends that JAX compiles for a card, whose file holds what is given."""

    def pretend(kind, text=None):
        monkeypatch.setattr(tuning, "FOLDER", tmp_path)
        monkeypatch.setattr(tuning, "get_default_device", lambda: Card(kind))
        if text is not None:
            tuning.tuned_path(Card(kind)).write_text(text)

    tuning.load_tuned.cache_clear()
    yield pretend
    tuning.load_tuned.cache_clear()


def test_a_cpu_has_no_tuned_schedules():
    assert jax.default_backend() != "cpu" or tuning.tuned("paged_attention", "any") is None


def test_an_unknown_device_has_no_tuned_schedules(on_card):
    on_card("NVIDIA Unheard-of 9000")
    assert tuning.tuned("op", "class") is None


def test_a_known_class_gives_the_fields_of_its_schedule_without_its_time(on_card):
    on_card("NVIDIA H200", json.dumps({"op": {"class": ENTRY}}))
    assert tuning.tuned("op", "class") == {"stages": 3, "cluster": 2}
    assert tuning.tuned("op", "another class") is None
    assert tuning.tuned("another op", "class") is None


def test_a_file_is_named_after_its_device():
    assert tuning.tuned_path(Card("NVIDIA H200"), Path("/f")) == Path("/f/nvidia-h200.json")
    assert tuning.tuned_path(Card("NVIDIA H100 80GB HBM3"), Path("/f")) == Path(
        "/f/nvidia-h100-80gb-hbm3.json"
    )
    assert tuning.tuned_path(Card("anything", "cpu")) is None


def test_a_file_is_read_once(on_card):
    on_card("NVIDIA H200", json.dumps({"op": {"class": ENTRY}}))
    first = tuning.tuned("op", "class")
    tuning.tuned_path(Card("NVIDIA H200")).write_text("gone")
    assert tuning.tuned("op", "class") is first


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "Expecting property name"),
        ("[1]", "the file must be an object"),
        ('{"op": 3}', "op must be an object, got 3"),
        ('{"op": {"class": [1]}}', "op / class must be an object"),
        ('{"op": {"class": {"stages": "3"}}}', "op / class / stages must be an integer, got '3'"),
        ('{"op": {"class": {"stages": true}}}', "stages must be an integer, got True"),
    ],
)
def test_a_damaged_file_says_what_is_wrong_and_what_to_do(on_card, text, told):
    on_card("NVIDIA H200", text)
    with pytest.raises(ValueError, match=r"pallas_kernels\.workbench\.tune") as refused:
        tuning.tuned("op", "class")
    assert told in str(refused.value)
    assert "nvidia-h200.json is damaged" in str(refused.value)


def test_the_files_in_the_package_are_whole():
    for path in sorted(tuning.FOLDER.glob("*.json")):
        assert tuning.load_tuned(path)
