"""New weights between two steps: tokens are those of the weights that sampled them, and nothing old is reused."""

from contextlib import suppress

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.errors import OutOfMemory
from jaxkv.programs.manifest import compile_count
from tests.engine import hybrid
from tests.engine.engines import (
    PAGE,
    ROWS,
    VOCAB,
    assert_idle,
    engine_for,
    model_of,
    request_of,
)
from tests.engine.host_engines import engine_for as engine_with_host
from tests.engine.oracle import generated

MODEL, FIRST = model_of("plain")


def other(params, seed):
    """Returns parameters of other values whose greedy tokens differ from those of `params`."""
    draw = np.random.default_rng(seed)

    def noisy(leaf):
        # In NumPy, which compiles nothing while tests are collected.
        values = np.asarray(leaf)
        noise = draw.normal(size=values.shape) * 0.5 * values.std()
        return jnp.asarray((values + noise).astype(values.dtype))

    return jax.tree.map(noisy, params)


SECOND, THIRD = other(FIRST, 1), other(FIRST, 2)
BY_VERSION = {0: FIRST, 1: SECOND, 2: THIRD}


def answers(params, requests):
    return [one.token_ids for one in generated(MODEL, params, tuple(requests), rows=ROWS)]


def served(engine, requests):
    states = [engine.add([request])[0] for request in requests]
    engine.run(states)
    return [tuple(state.token_ids) for state in states]


def prompts(seed, count, length=3 * PAGE):
    draw = np.random.default_rng(seed)
    head = draw.integers(0, VOCAB, length).tolist()
    return [[*head, *draw.integers(0, VOCAB, 3).tolist()] for _ in range(count)]


def segments(state):
    """Yields (version, tokens before, tokens) for each run of generated tokens of one version."""
    versions, tokens, begin = state.weight_versions, state.token_ids, 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or versions[end] != versions[begin]:
            yield versions[begin], [*state.request.prompt, *tokens[:begin]], tokens[begin:end]
            begin = end


def test_the_reference_models_differ():
    request = [request_of(prompts(0, 1)[0])]
    assert len({answers(params, request)[0] for params in BY_VERSION.values()}) == 3


def test_requests_after_an_update_have_the_tokens_of_the_new_weights_alone():
    engine = engine_for()
    requests = [request_of(prompt) for prompt in prompts(1, 3)]
    assert served(engine, requests) == answers(FIRST, requests)
    assert engine.prefix.stats.tokens_reused > 0
    assert engine.update_weights(SECOND) == 1
    assert served(engine, requests) == answers(SECOND, requests)
    assert engine.update_weights(FIRST, version="back") == "back"
    assert served(engine, requests) == answers(FIRST, requests)
    assert_idle(engine)


def test_without_the_clearing_a_later_request_would_see_old_pages(monkeypatch):
    monkeypatch.setattr(PrefixIndex, "clear", lambda self: None)
    engine = engine_for()
    requests = [request_of(prompt) for prompt in prompts(1, 3)]
    served(engine, requests)
    engine.update_weights(SECOND)
    assert served(engine, requests) != answers(SECOND, requests)


@pytest.mark.parametrize(
    ("seed", "overlap"),
    [
        (1, True),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
    ],
)
def test_each_token_is_the_one_that_its_weights_give_after_recomputed_updates(seed, overlap):
    draw = np.random.default_rng(seed)
    engine = engine_for(overlap=overlap, free_pages=20 if seed else None)
    waiting = [
        request_of(prompt, max_tokens=int(draw.integers(6, 20)))
        for prompt in prompts(seed, 7, length=int(draw.integers(1, 20)))
    ]
    states, updates = [], [(1, 12), (2, 36)]
    while waiting or engine.has_work:
        if waiting and draw.random() < 0.4:
            states += engine.add([waiting.pop()])
        if updates and sum(state.generated for state in states) >= updates[0][1]:
            version, _ = updates.pop(0)
            assert engine.update_weights(BY_VERSION[version], requests="recompute") == version
        engine.step()
    assert len({version for state in states for version in state.weight_versions}) == 3
    parts = [part for state in states for part in segments(state)]
    for version, params in BY_VERSION.items():
        mine = [(before, made) for known, before, made in parts if known == version]
        requests = [request_of(before, max_tokens=len(made)) for before, made in mine]
        assert answers(params, requests) == [tuple(made) for _, made in mine]
    assert_idle(engine)


def test_requests_that_go_on_with_old_keys_share_nothing_with_later_ones():
    engine = engine_for()
    [first, second] = [request_of(prompt, max_tokens=20) for prompt in prompts(3, 2)]
    [running] = engine.add([first])
    while running.generated < 4:
        engine.step()
    engine.update_weights(SECOND)
    engine.run([running])
    assert running.preemptions == 0
    assert set(running.weight_versions) == {0, 1}
    [(_, before, made), *_] = segments(running)
    assert answers(FIRST, [request_of(before, max_tokens=len(made))]) == [tuple(made)]
    again = request_of([*first.prompt, *running.token_ids], max_tokens=4)
    assert served(engine, [second, again]) == answers(SECOND, [second, again])
    assert_idle(engine)


def test_equal_weights_leave_requests_in_progress_unchanged():
    engine = engine_for()
    requests = [request_of(prompt, max_tokens=20) for prompt in prompts(4, 3)]
    states = [engine.add([request])[0] for request in requests]
    while engine.has_work:
        engine.step()
        engine.update_weights(FIRST)
    assert [tuple(state.token_ids) for state in states] == answers(FIRST, requests)


@pytest.mark.parametrize("cleared", [True, False])
def test_prefixes_on_the_host_are_dropped_too(monkeypatch, cleared):
    engine = engine_with_host()
    if not cleared:
        monkeypatch.setattr(type(engine.host), "clear", lambda self: None)
    requests = [request_of(prompt, max_tokens=4) for prompt in prompts(5, 2, length=40)]
    fill = [request_of(prompt, max_tokens=4) for prompt in prompts(6, 2, length=40)]
    served(engine, [*requests, *fill])
    assert len(engine.host.tier) > 0
    engine.update_weights(SECOND)
    assert (len(engine.host.tier) == 0) == cleared
    # Without the clearing a later request would see old pages.
    assert (served(engine, requests) == answers(SECOND, requests)) == cleared
    engine.prefix.check()


@pytest.mark.slow  # That `clear` removes checkpoints is shown by the tests of the prefix index.
@pytest.mark.parametrize("cleared", [True, False])
def test_checkpoints_of_recurrent_states_are_dropped_too(monkeypatch, cleared):
    if not cleared:
        monkeypatch.setattr(PrefixIndex, "clear", lambda self: None)
    engine = hybrid.engine_of(page=16, longest=128, budget=64, tokens=64)
    network, params = hybrid.model()
    new = other(params, 3)
    [prompt] = prompts(7, 1, length=60)
    request = request_of(prompt, max_tokens=6)
    first = served(engine, [request, request])
    assert engine.prefix.stats.tokens_reused > 0
    engine.update_weights(new)
    wanted = generated(network, new, (request,), rows=1)[0].token_ids
    assert (served(engine, [request, request]) == [wanted, wanted]) == cleared
    assert first[0] != wanted


def test_a_hundred_updates_compile_and_trace_nothing():
    engine = engine_for()
    request = request_of(prompts(8, 1)[0])
    wanted = {version: answers(params, [request])[0] for version, params in BY_VERSION.items()}
    served(engine, [request])
    programs, compiled = len(engine.runner.programs.manifest()), compile_count()
    forward = type(MODEL).forward
    chex.clear_trace_counter()
    try:
        type(MODEL).forward = chex.assert_max_traces(forward, n=0)
        for update in range(100):
            engine.update_weights(BY_VERSION[update % 3])
            if update % 10 == 0:
                assert served(engine, [request]) == [wanted[update % 3]]
    finally:
        type(MODEL).forward = forward
    assert engine.runner.weight_version == 100
    assert (len(engine.runner.programs.manifest()), compile_count()) == (programs, compiled)


def renamed(params):
    return {("embedding" if name == "embed" else name): leaf for name, leaf in params.items()} | {
        "extra": jnp.zeros(3)
    }


def first_leaf(change):
    def changed(params):
        leaves, structure = jax.tree.flatten(params)
        return jax.tree.unflatten(structure, [change(leaves[0]), *leaves[1:]])

    return changed


def deleted(leaf):
    gone = jnp.array(leaf, copy=True)
    gone.delete()
    return gone


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, "which the model has not"),
        (first_leaf(lambda leaf: leaf[:-1]), "wanted float32"),
        (first_leaf(lambda leaf: leaf.astype(jnp.bfloat16)), "got bfloat16"),
        (first_leaf(lambda leaf: leaf.tolist()), "structure"),
        (first_leaf(lambda leaf: 1.5), "got float, wanted a JAX or NumPy array"),
        (first_leaf(deleted), "the array was deleted"),
        (lambda params: None, "it lacks"),
    ],
    ids=["names", "shape", "dtype", "list", "scalar", "deleted", "none"],
)
def test_an_update_that_does_not_fit_changes_nothing(change, message):
    engine = engine_for()
    request = request_of(prompts(9, 1)[0])
    wanted = answers(FIRST, [request])
    assert served(engine, [request]) == wanted
    before, kept = engine.runner.params, engine.prefix.stats
    with pytest.raises(ValueError, match=message):
        engine.update_weights(change(SECOND), requests="recompute")
    with pytest.raises(ValueError, match="requests must be one of"):
        engine.update_weights(SECOND, requests="drop")
    with pytest.raises(ValueError, match="version must be"):
        engine.update_weights(SECOND, version=True)
    assert engine.runner.params is before
    assert engine.runner.weight_version == 0
    assert engine.prefix.stats == kept
    assert served(engine, [request]) == wanted
    assert engine.prefix.stats.tokens_reused > 0


def test_numpy_arrays_are_put_on_the_device():
    engine = engine_for()
    request = request_of(prompts(10, 1)[0])
    mine = jax.tree.map(np.array, SECOND)
    engine.update_weights(mine)
    for leaf in jax.tree.leaves(mine):
        leaf[...] = 0
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(engine.runner.params))
    assert served(engine, [request]) == answers(SECOND, [request])


def test_weights_that_their_owner_deleted_are_named_and_may_be_replaced():
    engine = engine_for()
    mine = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), SECOND)
    engine.update_weights(mine)
    jax.tree.leaves(mine)[0].delete()
    request = request_of(prompts(11, 1)[0])
    [state] = engine.add([request])
    engine.run([state])
    assert state.reason == "error"
    assert "update_weights" in str(state.error)
    engine.update_weights(THIRD)
    assert served(engine, [request]) == answers(THIRD, [request])
    assert_idle(engine)


@pytest.mark.parametrize("call", ["sleep", "recompute"])
def test_an_interrupt_inside_a_call_loses_no_token_and_reuses_nothing_old(monkeypatch, call):
    engine = engine_for()
    requests = [request_of(prompt, max_tokens=12) for prompt in prompts(14, 2)]
    states = [engine.add([request])[0] for request in requests]
    while states[0].generated < 4:
        engine.step()
    read = type(engine.runner).read

    def interrupted(self, out):
        monkeypatch.setattr(type(engine.runner), "read", read)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(engine.runner), "read", interrupted)
    calls = {
        "sleep": engine.sleep,
        "recompute": lambda: engine.update_weights(SECOND, requests="recompute"),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert not engine.asleep
    engine.run(states)
    for state in states:
        for version, before, made in segments(state):
            again = request_of(before, max_tokens=len(made))
            assert answers(BY_VERSION[version], [again]) == [tuple(made)]
    later = request_of(requests[0].prompt, max_tokens=6)
    assert served(engine, [later]) == answers(BY_VERSION[engine.runner.weight_version], [later])
    assert_idle(engine)


def test_no_memory_for_new_weights_changes_nothing(monkeypatch):
    engine = engine_for()
    request = request_of(prompts(15, 1)[0])

    def full(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(jax, "device_put", full)
    with pytest.raises(OutOfMemory, match="updating the weights"):
        engine.update_weights(jax.tree.map(np.asarray, SECOND))
    monkeypatch.undo()
    assert engine.runner.weight_version == 0
    assert served(engine, [request]) == answers(FIRST, [request])


def bytes_of(engine):
    counts = engine.runner.owner.counts
    return sum(array.nbytes for array in engine.runner.layout.arrays(counts))


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_every_byte_of_the_cache_and_requests_go_on_afterwards(level):
    engine = engine_for()
    requests = [request_of(prompt, max_tokens=20) for prompt in prompts(12, 5)]
    states = [engine.add([request])[0] for request in requests]
    while states[0].generated < 5:
        engine.step()
    held = engine.runner.cache.arrays
    assert sum(array.nbytes for array in held) == bytes_of(engine)
    engine.sleep(level)
    assert all(array.is_deleted() for array in held)
    assert not engine.has_work
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.step()
    with pytest.raises(RuntimeError, match="sleeps"):
        engine.add([requests[0]])
    if level == 2:
        assert engine.runner.params is None
        with pytest.raises(RuntimeError, match="update_weights first"):
            engine.wake_up()
        assert engine.asleep
        engine.update_weights(FIRST, version=0)
    compiled = compile_count()
    engine.wake_up()
    engine.run(states)
    assert compile_count() == compiled
    assert [tuple(state.token_ids) for state in states] == answers(FIRST, requests)
    assert sum(array.nbytes for array in engine.runner.cache.arrays) == bytes_of(engine)
    assert_idle(engine)


def test_a_wake_up_that_finds_no_memory_may_be_tried_again(monkeypatch):
    engine = engine_for()
    request = request_of(prompts(13, 1)[0])
    engine.sleep()
    owner = type(engine.runner.owner)
    rebuild = owner.rebuild

    def fails(self):
        raise MemoryError("no memory")

    monkeypatch.setattr(owner, "rebuild", fails)
    with suppress(MemoryError):
        engine.wake_up()
    assert engine.asleep
    monkeypatch.setattr(owner, "rebuild", rebuild)
    engine.wake_up()
    assert served(engine, [request]) == answers(FIRST, [request])


def test_prefixes_on_the_host_survive_a_sleep():
    engine = engine_with_host()
    requests = [request_of(prompt, max_tokens=4) for prompt in prompts(5, 2, length=40)]
    fill = [request_of(prompt, max_tokens=4) for prompt in prompts(6, 2, length=40)]
    served(engine, [*requests, *fill])
    kept = len(engine.host.tier)
    assert kept > 0
    engine.sleep()
    engine.wake_up()
    assert len(engine.host.tier) == kept
    [state] = engine.add([requests[0]])
    engine.run([state])
    assert state.cached > 0
    assert tuple(state.token_ids) == answers(FIRST, [requests[0]])[0]
    engine.prefix.check()
