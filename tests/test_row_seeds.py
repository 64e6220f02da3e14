"""Seeds of rows: one source, the engine's rule for samples, and values that may be tracers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import sample_seed
from jaxkv.row_seeds import row_seeds

DRAWS = SamplingParams(temperature=1.0)
TWICE = SamplingParams(temperature=1.0, n=2)
EDGES = [0, 5, -1, -(2**31), 2**31 - 1]


def words(sampling, *, key=None, seeds=None, traced=False):
    """Returns the rows' seeds as ints."""
    low, high = row_seeds(sampling, key=key, seeds=seeds, traced=traced)
    for word in (low, high):
        assert word.dtype == np.int32
    pairs = zip(np.asarray(low).tolist(), np.asarray(high).tolist(), strict=True)
    return [(low % 2**32) + ((high % 2**32) << 32) for low, high in pairs]


def successors(seeds, sampling):
    """Returns the engine's seeds of all samples."""
    return [
        sample_seed(SamplingParams(seed=seed), sample)
        for seed, params in zip(seeds, sampling, strict=True)
        for sample in range(params.n)
    ]


def test_a_seed_of_sampling_params_has_the_samples_of_the_engine():
    seeds = [7, -3, 2**64 - 1, 2**32 - 1]
    sampling = [SamplingParams(seed=seed, n=3) for seed in seeds]
    assert words(sampling, traced=True) == successors(seeds, sampling)


@pytest.mark.parametrize("kind", [list, np.asarray, lambda seeds: jnp.asarray(seeds, jnp.int32)])
def test_seeds_are_the_seeds_of_the_prompts_first_samples(kind):
    sampling = [DRAWS, TWICE, DRAWS, TWICE, TWICE]
    assert words(sampling, seeds=kind(EDGES)) == successors(EDGES, sampling)


def test_seeds_of_64_bits_are_taken_from_the_host():
    seeds = [2**64 - 1, -(2**63)]
    assert words([TWICE, DRAWS], seeds=seeds) == successors(seeds, [TWICE, DRAWS])


def test_a_sample_of_an_unsigned_array_carries_into_the_high_word():
    seeds = jnp.asarray([2**32 - 1, 3], jnp.uint32)
    assert words([TWICE, TWICE], seeds=seeds) == [2**32 - 1, 2**32, 3, 4]


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_arrays_of_64_bits_keep_their_high_word(dtype):
    with jax.enable_x64(True):
        wanted = [2**40 + 5, 2**63 - 1] if dtype == "uint64" else [2**40 + 5, -7]
        seeds = jnp.asarray(wanted, dtype)
        assert words([TWICE, TWICE], seeds=seeds) == successors(wanted, [TWICE, TWICE])


def test_seeds_and_keys_that_are_tracers_compile_once():
    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(key, seeds):
        by_key = row_seeds([TWICE, DRAWS], key=key, seeds=None, traced=True)
        return by_key, row_seeds([TWICE, DRAWS], key=None, seeds=seeds, traced=True)

    for number in range(3):
        key, seeds = jax.random.key(number), jnp.asarray([number, -number], jnp.int32)
        by_key, by_seeds = run(key, seeds)
        chex.assert_trees_all_equal(
            by_key, row_seeds([TWICE, DRAWS], key=key, seeds=None, traced=False)
        )
        wanted = row_seeds([TWICE, DRAWS], key=None, seeds=[number, -number], traced=False)
        chex.assert_trees_all_equal(by_seeds, wanted)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_row_of_a_key_depends_on_the_key_and_the_rows_number_alone(impl):
    key, other = jax.random.key(0, impl=impl), jax.random.key(1, impl=impl)
    rows = words([DRAWS] * 6, key=key)
    assert len(set(rows)) == 6
    assert words([TWICE, DRAWS], key=key) == rows[:3]
    assert set(rows).isdisjoint(words([DRAWS] * 6, key=other))


def test_a_raw_key_gives_the_rows_of_the_typed_one():
    assert words([DRAWS] * 2, key=jax.random.PRNGKey(3)) == words(
        [DRAWS] * 2, key=jax.random.key(3)
    )


def test_a_key_is_not_copied_to_the_host(monkeypatch):
    key = jax.random.key(3)
    wanted = words([DRAWS], key=key)
    monkeypatch.setattr(type(key), "__repr__", lambda _: pytest.fail("its text holds its value"))
    assert words([DRAWS], key=key) == wanted


def test_rows_without_a_seed_draw_fresh_ones():
    sampling = [TWICE, DRAWS, SamplingParams(temperature=0.0)]
    first, second = words(sampling), words(sampling)
    assert len({*first[:3], *second[:3]}) == 5 + 1
    # A greedy row has a constant: a drawn one would change the compiled programs that hold it.
    assert first[3] == second[3] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"traced": True}, r"prompt 1 draws tokens .* pass key= .* or seeds="),
        ({"key": jax.random.key(0), "seeds": [1, 2]}, "both key and seeds"),
        ({"seeds": [1]}, "2 ints, one per prompt, got"),
        ({"seeds": [[1], [2]]}, "2 ints, one per prompt, got"),
        ({"seeds": [[1], [2, 3]]}, "seeds must be a list of ints, got"),
        ({"seeds": [1, 2.5]}, "seeds must be an int in"),
        ({"seeds": [1, 2**64]}, "seeds must be an int in"),
        ({"seeds": np.ones(2)}, "seeds must be an int in"),
        (
            {"seeds": jnp.ones(3, jnp.int32)},
            r"shape \(2,\), one per prompt, got int32 of shape \(3,\)",
        ),
        ({"seeds": jnp.ones(2)}, "got float32"),
        ({"key": jax.random.split(jax.random.key(0), 2)}, "one PRNG key.*pass seeds"),
        ({"key": jnp.ones(4, jnp.uint32)}, "one PRNG key.*got uint32 of shape"),
        ({"key": jnp.ones(2, jnp.int32)}, "one PRNG key.*got int32 of shape"),
    ],
)
def test_seeds_that_cannot_be_used_are_refused_with_a_reason(options, message):
    sampling = [SamplingParams(temperature=0.0), DRAWS]
    with pytest.raises(ValueError, match=message):
        words(sampling, **options)


@pytest.mark.parametrize("options", [{"key": jax.random.key(0)}, {"seeds": [1, 2]}])
def test_a_second_source_of_seeds_is_refused(options):
    with pytest.raises(ValueError, match=r"SamplingParams\(seed=4\) for prompt 1; pass one"):
        words([DRAWS, SamplingParams(seed=4)], **options)


def test_a_list_of_tracers_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="seeds is a list that holds tracers; make one"):
        jax.jit(lambda seed: words([DRAWS], seeds=[seed]))(1)
