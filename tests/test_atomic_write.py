"""Whole files or none, and what killed processes left; that of the program store is in `programs/test_store.py`."""

import os

import pytest

from jaxkv.atomic_write import atomic_write, remove_abandoned, unfinished_files


def test_the_file_is_replaced_at_the_end_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with atomic_write(path) as unfinished:
        unfinished.write_text("new")
        assert path.read_text() == "old"
        assert unfinished in unfinished_files(tmp_path)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_raises_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail():
        with atomic_write(path) as unfinished:
            unfinished.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_cannot_begin_is_reported_by_its_folder(tmp_path):
    with pytest.raises(FileNotFoundError) as refused, atomic_write(tmp_path / "none" / "file"):
        pass
    assert refused.value.filename == str(tmp_path / "none")
    assert ".jaxkv-unfinished" not in str(refused.value)


def test_the_unfinished_file_of_another_user_is_left_alone_and_its_links_are_not_followed(
    tmp_path, monkeypatch
):
    made = tmp_path / ".file.x.jaxkv-unfinished"
    made.mkdir()
    (made / "lock").symlink_to(tmp_path / "target")
    os.utime(made, (0, 0))
    monkeypatch.setattr(os, "geteuid", lambda: made.stat().st_uid + 1)
    remove_abandoned(tmp_path)
    assert made.exists()
    assert not (tmp_path / "target").exists()


def test_a_write_that_has_only_just_begun_is_left_alone(tmp_path):
    made = tmp_path / ".file.x.jaxkv-unfinished"
    made.mkdir()
    remove_abandoned(tmp_path)
    assert made.exists()
