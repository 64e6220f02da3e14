"""Free memory, and the errors when it does not suffice."""

import gc
import inspect
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxkv import LLM, CacheConfig, SamplingParams, cli, memory, plan
from jaxkv.engine.warm_up import warn_of_sums
from jaxkv.errors import OutOfMemory
from jaxkv.memory import host_bytes, named_exhaustion, start_devices
from jaxkv.weights.safetensors import StoredTensor
from jaxkv.weights.stored_leaf import StoredLeaf
from tests.devices import needs_devices
from tests.one_layer import one_layer_model

ROOT = Path(__file__).parents[1]
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GIB = 2**30
CACHE = CacheConfig(max_sequences=1, page_size=16)
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes."


def tree(root, groups, files):
    """Writes /proc/self/cgroup and limits of control groups below a root."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


UNIFIED, FIRST = "sys/fs/cgroup/", "sys/fs/cgroup/memory/"


@pytest.mark.parametrize(
    ("groups", "files", "wanted"),
    [
        ("0::/\n", {UNIFIED + "memory.max": f"{GIB}\n"}, GIB),
        ("0::/\n", {UNIFIED + "memory.max": "max\n"}, MACHINE),
        (
            "0::/pod/inner\n",
            {UNIFIED + "pod/inner/memory.max": "max\n", UNIFIED + "pod/memory.max": f"{GIB}\n"},
            GIB,
        ),
        (
            "0::/pod/inner\n",
            {
                UNIFIED + "pod/inner/memory.max": f"{GIB // 2}\n",
                UNIFIED + "pod/memory.max": f"{GIB}\n",
            },
            GIB // 2,
        ),
        ("0::/../other\n", {UNIFIED + "memory.max": f"{GIB}\n"}, GIB),
        (
            "9:cpu,cpuacct:/job\n4:memory:/job\n0::/\n",
            {FIRST + "job/memory.limit_in_bytes": f"{GIB}\n"},
            GIB,
        ),
        # A container is told its path on the host, and sees its own group as the mount.
        (
            "4:memory:/docker/12ab\n",
            {FIRST + "memory.limit_in_bytes": f"{GIB}\n"},
            GIB,
        ),
        (
            "4:memory:/docker/12ab\n",
            {
                FIRST + "memory.limit_in_bytes": "9223372036854771712\n",
                FIRST + "memory.stat": f"cache 4096\nhierarchical_memory_limit {GIB}\n",
            },
            GIB,
        ),
        ("4:memory:/\n", {FIRST + "memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
        ("0::/\n", {UNIFIED + "memory.max": "no number\n"}, MACHINE),
        ("0::/\n", {}, MACHINE),
    ],
)
def test_the_smallest_limit_of_the_groups_around_a_process_counts(tmp_path, groups, files, wanted):
    assert host_bytes(tree(tmp_path, groups, files)) == min(wanted, MACHINE)


def test_a_machine_without_control_groups_has_its_own_memory(tmp_path):
    assert host_bytes(tmp_path) == MACHINE


def test_a_cache_on_a_cpu_has_a_share_of_a_quarter_of_what_a_container_allows(monkeypatch):
    monkeypatch.setattr(plan, "host_bytes", lambda: 4 * GIB)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert plan.free_bytes(0.5) == GIB // 2


def device_of(monkeypatch, free):
    """Makes the device report so many free bytes, as a GPU does."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(plan, "device_bytes", lambda: free)


def never_read(monkeypatch):
    def read(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(StoredTensor, "read", read)


def make(**options):
    return LLM(dtype="float32", max_model_len=64, progress=False, **{"cache": CACHE, **options})


@pytest.mark.parametrize(
    ("free", "options", "message"),
    [
        (10**6, {}, r"the weights alone need [\d,]+ bytes, but only 1,000,000 are free; .* dtype"),
        (19 * 10**6, {}, r"one sequence of 64 tokens needs [\d,]+; lower max_model_len"),
        (
            30 * 10**6,
            {"cache": CacheConfig(budget_bytes=40 * 10**6)},
            r"the weights need [\d,]+ bytes and the cache [\d,]+, but only 30,000,000 are free; "
            r"use a narrower dtype, a smaller max_model_len, .*max_sequences or budget_bytes",
        ),
    ],
)
def test_weights_and_cache_that_cannot_fit_are_refused_before_a_tensor_is_read(
    monkeypatch, free, options, message
):
    device_of(monkeypatch, free)
    never_read(monkeypatch)
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_the_cache_of_a_device_takes_its_share_of_what_the_weights_leave(monkeypatch):
    device_of(monkeypatch, 10 * GIB)
    assert plan.free_bytes(0.5, weights=4 * GIB) == 3 * GIB
    assert plan.free_bytes(0.5) == 5 * GIB


def with_pool(monkeypatch, stats):
    class Device:
        def memory_stats(self):
            return stats

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])


def test_what_jax_leaves_out_of_its_pool_follows_from_its_share(monkeypatch):
    with_pool(monkeypatch, {"bytes_limit": 75})
    assert memory.outside_bytes({}) == 25
    assert memory.outside_bytes({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}) == 75
    with_pool(monkeypatch, None)
    assert memory.outside_bytes({}) is None


@pytest.mark.parametrize(("kept", "warns"), [(0, False), (22, False), (24, True)])
def test_a_warm_up_warns_if_sums_need_more_than_jax_leaves(kept, warns, monkeypatch, caplog):
    """Two GiB are for the driver."""
    with_pool(monkeypatch, {"bytes_limit": 75 * 2**30})
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    warn_of_sums(kept * 2**30)
    assert ("XLA_PYTHON_CLIENT_MEM_FRACTION" in caplog.text) is warns


def test_memory_exhausted_while_loading_names_the_options_and_keeps_nothing(monkeypatch):
    error = jax.errors.JaxRuntimeError(EXHAUSTED)

    def exhausted(*_):
        held = np.zeros(7)
        assert held.size
        raise error

    monkeypatch.setattr(StoredLeaf, "read", exhausted)
    message = r"out of memory while loading weights of [\d,]+ bytes \(RESOURCE_EXHAUSTED.*dtype"
    with pytest.raises(OutOfMemory, match=message):
        make()
    assert error.__traceback__ is None


@pytest.mark.parametrize("error", [MemoryError("no room"), jax.errors.JaxRuntimeError(EXHAUSTED)])
def test_memory_exhausted_for_the_cache_names_the_options(monkeypatch, error):
    def exhausted(*_, **__):
        raise error

    monkeypatch.setattr("jaxkv.cache.owner.init_cache", exhausted)
    with pytest.raises(
        OutOfMemory, match=r"out of memory while making a cache of [\d,]+ bytes.*budget_bytes"
    ):
        make()


@pytest.mark.parametrize("error", [MemoryError("no room"), jax.errors.JaxRuntimeError(EXHAUSTED)])
def test_the_command_tells_of_exhausted_memory_in_one_line(monkeypatch, capsys, error):
    def exhausted(*_):
        raise error

    monkeypatch.setattr(StoredLeaf, "read", exhausted)
    assert cli.main(["generate", "def", "--max-model-len", "64"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("jaxkv: out of memory while loading weights")
    assert told.count("\n") == 1
    assert "--cache-bytes" in told


def test_exhausted_memory_while_scoring_names_the_options(monkeypatch, tmp_path):
    llm = make(model=one_layer_model(tmp_path / "one"))

    def exhausted(*_):
        raise jax.errors.JaxRuntimeError(EXHAUSTED)

    monkeypatch.setattr(llm.engine.runner, "read", exhausted)
    with pytest.raises(OutOfMemory, match="while scoring texts"):
        llm.score("def add(")
    monkeypatch.undo()
    assert llm.generate("def", SamplingParams(max_tokens=1, temperature=0.0))


def test_other_errors_pass_as_they_are():
    error = jax.errors.JaxRuntimeError("INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError) as caught, named_exhaustion("working"):
        raise error
    assert caught.value is error
    assert memory.is_out_of_memory(OutOfMemory("out of memory"))


def started():
    """Waits for the thread that takes a device's pool of memory."""
    for thread in threading.enumerate():
        if thread.name == "jaxkv-devices":
            thread.join(60)


@needs_devices(2)
def test_the_pool_is_taken_on_the_device_that_the_caller_has_chosen(monkeypatch):
    """By a thread that is no daemon, since XLA aborts a process that ends while a daemon uses it."""
    made, put = [], jax.device_put

    def device_put(array):
        assert not threading.current_thread().daemon
        made.append(put(array))
        return made[-1]

    monkeypatch.setattr(jax, "device_put", device_put)
    with jax.default_device(jax.devices()[1]):
        start_devices()
    started()
    assert [array.device for array in made] == [jax.devices()[1]]


def test_devices_that_do_not_start_are_told_at_once(monkeypatch):
    """JAX tells it once, and would compute on the CPU from then on."""

    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(RuntimeError, match="Unable to initialize backend"):
        LLM()


def test_a_pool_that_cannot_be_taken_is_left_to_the_next_array(monkeypatch):
    def device_put(array):
        raise jax.errors.JaxRuntimeError(EXHAUSTED)

    hook = []
    monkeypatch.setattr(threading, "excepthook", hook.append)
    monkeypatch.setattr(jax, "device_put", device_put)
    start_devices()
    started()
    assert not hook


def test_what_exists_is_not_looked_at_inside_a_block_and_is_again_after_it():
    # In a process of its own, since a collection here would look at all that tests/conftest.py has frozen.
    imports = "import gc, weakref\nfrom jaxkv.memory import without_old_objects\n"
    script = f"{imports}{inspect.getsource(look_at_cycles)}look_at_cycles()"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def look_at_cycles():
    class Node:
        """Part of a cycle."""

    def cycle():
        one = Node()
        one.other = Node()
        one.other.other = one
        return one, weakref.ref(one)

    old, seen_old = cycle()
    with without_old_objects():  # noqa: F821 - imported by the process that runs this
        assert gc.get_freeze_count() > 0
        new, seen_new = cycle()
        del old, new
        gc.collect()
        assert seen_old() is not None
        assert seen_new() is None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert seen_old() is None
