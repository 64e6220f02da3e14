"""JAX's compilation cache on disk: private, repaired when an entry is broken, and off where it cannot be used."""

import logging
import os
import stat
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.programs import compile as compilation
from jaxkv.programs.jax_cache import (
    MIN_COMPILE_SECONDS,
    VARIABLE,
    enable_compile_cache,
    repaired_entries,
)
from jaxkv.programs.manifest import Lowering, Programs
from jaxkv.runner.program_specs import StepSpec
from tests.jax_settings import cache_settings

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    # The store of traced programs would answer before JAX is asked; it has tests of its own.
    monkeypatch.setattr(compilation, "open_store", lambda: None)
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    with cache_settings(**before | {"jax_compilation_cache_dir": None}):
        yield


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_default_folder_is_private_and_in_the_users_cache(tmp_path):
    folder = enable_compile_cache({"XDG_CACHE_HOME": str(tmp_path / "caches")})
    assert folder == tmp_path / "caches" / "jaxkv" / "programs"
    assert mode(folder) == 0o700
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == MIN_COMPILE_SECONDS
    assert enable_compile_cache({}) == folder


def test_without_xdg_the_folder_is_under_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for environment in ({}, {"XDG_CACHE_HOME": "relative"}):
        jax.config.update("jax_compilation_cache_dir", None)
        assert enable_compile_cache(environment) == tmp_path / ".cache" / "jaxkv" / "programs"


def test_the_variable_names_another_folder_or_none(tmp_path):
    assert enable_compile_cache({VARIABLE: "off", "XDG_CACHE_HOME": str(tmp_path)}) is None
    assert jax.config.jax_compilation_cache_dir is None
    assert enable_compile_cache({VARIABLE: str(tmp_path / "mine")}) == tmp_path / "mine"


def test_what_the_user_configured_stays(tmp_path):
    theirs = tmp_path / "theirs"
    jax.config.update("jax_compilation_cache_dir", str(theirs))
    seconds = jax.config.jax_persistent_cache_min_compile_time_secs
    assert enable_compile_cache({VARIABLE: str(tmp_path / "mine")}) == theirs
    assert jax.config.jax_compilation_cache_dir == str(theirs)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == seconds
    assert not (tmp_path / "mine").exists()


def test_a_disabled_cache_stays_disabled(tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    assert enable_compile_cache({VARIABLE: str(tmp_path)}) is None
    assert jax.config.jax_compilation_cache_dir is None


def refused(environment, caplog):
    with caplog.at_level(logging.WARNING):
        assert enable_compile_cache(environment) is None
    assert jax.config.jax_compilation_cache_dir is None
    (record,) = caplog.records
    return record.getMessage()


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    message = refused({VARIABLE: str(tmp_path / "file" / "programs")}, caplog)
    assert "cannot be written" in message
    assert VARIABLE in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_said_once(tmp_path, caplog):
    tmp_path.chmod(0o500)
    assert "cannot be written" in refused({VARIABLE: str(tmp_path)}, caplog)


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path, caplog):
    # Its entries are code that this process would run.
    tmp_path.chmod(0o777)
    assert "can be written by others" in refused({VARIABLE: str(tmp_path)}, caplog)


def test_a_folder_of_another_user_is_not_used(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert "belongs to another user" in refused({VARIABLE: str(tmp_path)}, caplog)


def test_a_relative_folder_is_not_used(caplog):
    assert "not an absolute path" in refused({VARIABLE: "programs"}, caplog)


def compile_step():
    """Compiles the same program as a new process would: each call makes a function, which JAX has not traced."""
    cache = jnp.zeros((64, 32))

    def step(cache, ints):
        return cache.at[ints].set(1.0, mode="drop"), cache.shape[0] * ints

    lowering = Lowering(step, (cache, np.arange(4, dtype=np.int32)), 0)
    return Programs().get(StepSpec(4, 4, (1,), decode=True), lambda: lowering)


@pytest.fixture
def entries(tmp_path):
    enable_compile_cache({VARIABLE: str(tmp_path)})
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return lambda: sorted(tmp_path.glob("jit_decode_4x4x1-*-cache"))


def test_a_program_is_loaded_the_second_time_and_passes_the_same_audit(entries):
    first = compile_step()
    second = compile_step()
    assert (first.loaded, second.loaded) == (False, True)
    assert second.report == first.report
    assert len(entries()) == 1


@pytest.mark.parametrize("size", [0, 100, 600])
def test_an_entry_cut_short_is_deleted_and_written_again(entries, caplog, size):
    # Left alone, JAX would warn of it and compile anew in every process, for ever.
    compile_step()
    (entry,) = entries()
    whole = entry.stat().st_size
    os.truncate(entry, size)
    with caplog.at_level(logging.WARNING):
        assert not compile_step().loaded
    (record,) = caplog.records
    assert (
        "Error reading persistent compilation cache entry for 'jit_decode_4x4x1'"
        in record.getMessage()
    )
    assert "deleted the 1 entries" in record.getMessage()
    assert abs(entry.stat().st_size - whole) < whole / 10
    assert compile_step().loaded


def test_repairing_passes_other_warnings_on():
    with pytest.warns(UserWarning, match="something else"), repaired_entries():
        warnings.warn("something else", stacklevel=1)
