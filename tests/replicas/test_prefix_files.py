"""The files of several replicas are found again by the path that was given."""

import itertools
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxkv.replicas.prefix_files import found_files, new_files, texts_of


def test_files_of_replicas_are_found_in_order(tmp_path):
    files = new_files(tmp_path / "a.b.safetensors", 11)
    assert files[10].name == "a.b.10-of-11.safetensors"
    for file in reversed(files):
        file.touch()
    assert found_files(tmp_path / "a.b.safetensors") == files


def test_a_file_of_one_llm_is_taken_as_it_is(tmp_path):
    (tmp_path / "one").touch()
    assert found_files(tmp_path / "one") == [tmp_path / "one"]


def test_files_that_another_number_of_replicas_saved_later_come_before_older_ones(tmp_path):
    path, ages = tmp_path / "x.st", itertools.count()
    for files in (new_files(path, 3), [path], new_files(path, 2), [path]):
        for file in files:
            file.touch()
            os.utime(file, ns=(0, next(ages)))
        assert found_files(path) == files


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither .*x\.st nor .*x\.0-of-2\.st"):
        found_files(tmp_path / "x.st")
    with pytest.raises(FileNotFoundError, match="there is neither"):
        found_files(tmp_path / "no" / "x.st")
    new_files(tmp_path / "x.st", 2)[0].touch()
    with pytest.raises(FileNotFoundError, match=r"x\.1-of-2\.st is missing"):
        found_files(tmp_path / "x.st")


def test_the_longest_texts_of_a_file_are_read(tmp_path):
    tables = {
        "parents": np.array([-1, 0, 0, -1], np.int32),
        "tokens": np.arange(8, dtype=np.int32).reshape(4, 2),
    }
    save_file(tables, tmp_path / "f")
    assert texts_of(tmp_path / "f") == [[0, 1, 2, 3], [0, 1, 4, 5], [6, 7]]
