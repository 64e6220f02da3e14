"""Records of benchmarks: complete where possible, and explicit about unknown fields."""

import json
import subprocess
import sys

import jax
import pytest

from benchmarks.record import load_record, read_commit, save_record


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "benchmarks/records").mkdir(parents=True)
    (tmp_path / "code.py").write_text("1\n")
    (tmp_path / "benchmarks/records/old.json").write_text("{}\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    return tmp_path


def test_a_record_comes_back_as_it_was_saved(tmp_path):
    rows = [{"case": "a", "us": 1.5, "refused": None}, {"case": "b", "us": None, "refused": "no"}]
    path = save_record("some-op", rows, folder=tmp_path / "new")
    record = load_record(path)
    assert path.name == "some-op.json"
    assert record.name == "some-op"
    assert record.rows == rows
    assert record.jax == jax.__version__
    assert record.device
    assert record.date.endswith("+00:00")


def test_a_record_names_no_folder_of_the_interpreter(tmp_path):
    record = load_record(save_record("some-op", [], folder=tmp_path))
    assert "/" not in record.command.split()[0]


def test_without_a_gpu_the_processor_is_named(tmp_path):
    if jax.default_backend() != "cpu":
        pytest.skip("there is an accelerator")
    record = load_record(save_record("some-op", [], folder=tmp_path))
    assert record.platform == "cpu"
    assert record.driver == "none"
    assert record.device != "cpu"


def test_nan_is_not_recorded(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        save_record("some-op", [{"us": float("nan")}], folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_commit_and_its_changes_are_told(checkout):
    commit, dirty = read_commit(checkout)
    assert len(commit) == 40
    assert dirty is False
    (checkout / "code.py").write_text("2\n")
    assert read_commit(checkout) == (commit, True)


def test_new_records_do_not_make_the_code_look_changed(checkout):
    (checkout / "benchmarks/records/old.json").write_text('{"new": 1}\n')
    (checkout / "benchmarks/records/new.json").write_text("{}\n")
    assert read_commit(checkout)[1] is False


def test_without_history_the_commit_is_unknown_or_told(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("JAXKV_COMMIT", raising=False)
    assert read_commit(tmp_path) == ("unknown", None)
    monkeypatch.setenv("JAXKV_COMMIT", "abc")
    assert read_commit(tmp_path) == ("abc", None)
    monkeypatch.setenv("PATH", "")
    assert read_commit(tmp_path) == ("abc", None)


@pytest.mark.parametrize("text", ["nothing", json.dumps({"name": "a"}), json.dumps([1])])
def test_a_file_that_is_no_record_is_named(tmp_path, text):
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"odd\.json is not a benchmark record"):
        load_record(path)


def test_a_command_names_no_folder_of_the_machine(tmp_path, monkeypatch):
    line = [
        "/somewhere/python3",
        "-m",
        "benchmarks.ops",
        "x",
        "--folder",
        str(tmp_path),
        "--model",
        "/somewhere/else/small",
        "--seconds",
        "1",
    ]
    monkeypatch.setattr(sys, "orig_argv", line)
    record = load_record(save_record("x", [{"us": 1.0}], folder=tmp_path))
    assert record.command == "python3 -m benchmarks.ops x --model small --seconds 1"
