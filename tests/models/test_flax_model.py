"""A user's nnx module generates the tokens that it gives when run over the whole text without a cache."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv import SamplingParams
from jaxkv.batch import PagedTables, StepBatch
from jaxkv.cache.spec import LayerSpec, group_layers
from jaxkv.cache.state import init_cache
from jaxkv.cache.variants import gqa, mamba2, place, window
from jaxkv.examples import flax_nnx_model as example
from jaxkv.models.flax_model import FlaxModel
from jaxkv.models.protocol import Model
from jaxkv.sampling.batch import SamplingBatch

PROMPTS = [[1, 2, 3], [40, 41, 42, 43, 44, 45, 46, 47], [7]]
NEW = 24
LENGTH = 40


def dense_attend(window_of):
    """Returns an `attend` over one whole sequence that remembers nothing."""

    def attend(layer, q, k, v, *, scale, window=None):
        group = q.shape[1] // k.shape[1]
        k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("qhd,khd->hqk", q, k) * jnp.asarray(scale, q.dtype)
        at = jnp.arange(q.shape[0])
        back = at[:, None] - at[None, :]
        reach = window or window_of.get(layer) or q.shape[0]
        seen = (back >= 0) & (back < reach)
        weights = jax.nn.softmax(jnp.where(seen[None, :, :], scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", weights, v)

    return attend


def dense_logits(module, window_of):
    """Returns a function from ids to the logits after the last of them, without any cache.

    The sequence is padded at its end, which a causal model does not see, so that it compiles once.
    """
    graph, state = nnx.split(module)

    @jax.jit
    def score(state, tokens, last):
        module = nnx.merge(graph, state)
        positions = jnp.arange(LENGTH, dtype=jnp.int32)
        hidden = module(tokens, positions, dense_attend(window_of))
        return module.logits(hidden[last][None, :])[0]

    def logits(ids):
        padded = jnp.asarray([*ids, *[0] * (LENGTH - len(ids))], jnp.int32)
        return np.asarray(score(state, padded, len(ids) - 1))

    return logits


def greedy_from_scratch(module, prompts, new, window_of=None):
    """Runs whole sequences again for each token; returns the ids and the smallest top-2 margin."""
    logits_of, margin, rows = dense_logits(module, window_of or {}), np.inf, []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(new):
            logits = logits_of(ids)
            second, first = np.sort(logits)[-2:]
            margin = min(margin, first - second)
            ids.append(int(np.argmax(logits)))
        rows.append(ids[len(prompt) :])
    return rows, margin


def generated(model, params, prompts=PROMPTS, new=NEW, **options):
    sampling = SamplingParams(temperature=0.0, max_tokens=new)
    out = jaxkv.generate(params, model, prompts, sampling=sampling, **options)
    return np.asarray(out.tokens).tolist()


class Windowed(example.Transformer):
    """Layers that differ in what they remember, declared in an order that grouping must undo."""

    def cache_specs(self, *, page_size, dtype):
        sizes = {"page_size": page_size, "dtype": dtype}
        narrow = window(example.KV_HEADS, example.HEAD_DIM, window=5, **sizes)
        return place([narrow, gqa(example.KV_HEADS, example.HEAD_DIM, **sizes), narrow])[::-1]


@pytest.fixture(autouse=True)
def float32_products():
    """A user's module chooses the precision of its products: on a GPU the default rounds their inputs to TF32."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def module():
    return example.Transformer(nnx.Rngs(0))


@pytest.fixture(scope="module")
def model(module):
    return FlaxModel(module)


def test_cached_generation_equals_running_the_module_from_scratch(module, model):
    wanted, margin = greedy_from_scratch(module, PROMPTS, NEW)
    assert margin > 1e-4
    assert generated(model, model.params_of(module)) == wanted


def test_layers_attend_in_the_windows_they_declared():
    module = Windowed(nnx.Rngs(1))
    model = FlaxModel(module)
    wanted, margin = greedy_from_scratch(module, PROMPTS, NEW, {0: 5, 2: 5})
    assert margin > 1e-4
    assert generated(model, model.params_of(module)) == wanted
    assert wanted != greedy_from_scratch(module, PROMPTS, NEW)[0]


def test_each_layer_writes_where_its_own_group_says():
    module = Windowed(nnx.Rngs(1))
    model = FlaxModel(module)
    layout = group_layers(model.cache_specs(page_size=4, dtype="float32"))
    assert [group.layers for group in layout.paged_groups] == [(0, 2), (1,)]
    pages = (1, 2)
    tables = tuple(
        PagedTables(
            page_table=jnp.asarray([[page]], jnp.int32),
            write_slots=4 * page + jnp.arange(3, dtype=jnp.int32),
        )
        for page in pages
    )
    batch = StepBatch(
        tokens=jnp.asarray([5, 6, 7], jnp.int32),
        positions=jnp.arange(3, dtype=jnp.int32),
        cu_q_lens=jnp.asarray([0, 3], jnp.int32),
        seq_lens=jnp.asarray([3], jnp.int32),
        paged=tables,
        states=(),
        sampling=SamplingBatch(state_ids=jnp.zeros(1, jnp.int32), carry=jnp.zeros(1, jnp.int32)),
    )
    cache = init_cache(layout, {group.name: 3 for group in layout.groups})
    cache, _ = jax.jit(model.forward)(model.params_of(module), cache, batch)
    for layer, page in ((0, 1), (1, 2), (2, 1)):
        for role in ("key", "value"):
            used = np.asarray(cache.layer(layer)[role]).any(axis=(2, 3))
            assert np.argwhere(used).tolist() == [[page, 0], [page, 1], [page, 2]]


# Log-probabilities of `generate` are compared in tests/test_scoring.py, logits of a module in the tests above.
@pytest.mark.slow
def test_logprobs_are_those_of_the_module(module, model):
    out = jaxkv.generate(
        model.params_of(module),
        model,
        PROMPTS,
        sampling=SamplingParams(temperature=0.0, max_tokens=1, logprobs=3),
    )
    logits_of = dense_logits(module, {})
    for row, prompt in enumerate(PROMPTS):
        top, ids = jax.lax.top_k(jax.nn.log_softmax(logits_of(prompt)), 3)
        np.testing.assert_array_equal(out.top_ids[row, 0], ids)
        np.testing.assert_allclose(out.top_logprobs[row, 0], top, atol=1e-4)


# tests/models/families/test_quantised_cache.py has narrower caches, and the specs' dtype is in the test below.
@pytest.mark.slow
def test_a_narrower_cache_dtype_serves(module, model):
    assert np.shape(generated(model, model.params_of(module), cache_dtype="bfloat16")) == (3, NEW)


def test_it_is_a_model(model):
    assert isinstance(model, Model)
    assert (model.vocab_size, model.num_layers, model.max_positions) == (97, 3, 256)
    assert model.cache_specs(page_size=16, dtype="bfloat16") == place(
        [gqa(2, 8, page_size=16, dtype="bfloat16")] * 3
    )


def test_modules_of_one_shape_share_one_program(module, model, monkeypatch):
    # nnx works while a program is traced and at no other time.
    generated(model, model.params_of(module))
    merges = []
    merge = nnx.merge
    monkeypatch.setattr(nnx, "merge", lambda *args: merges.append(args) or merge(*args))
    other = example.Transformer(nnx.Rngs(5))
    same = FlaxModel(other)
    assert same == model
    assert hash(same) == hash(model)
    tokens = generated(same, same.params_of(other))
    assert merges == []
    # Another program is traced anew; it need not be compiled.
    sampling = SamplingParams(temperature=0.0, max_tokens=4 * NEW)
    prompt = jnp.asarray(PROMPTS[:1], jnp.int32)
    jax.eval_shape(
        lambda params: jaxkv.generate(params, same, prompt, sampling=sampling).tokens,
        same.params_of(other),
    )
    assert merges
    assert tokens == greedy_from_scratch(other, PROMPTS, NEW)[0]


# A module that is trained is followed in tests/test_live_weights.py; a jitted trainer calls `generate` in
# tests/test_generation.py.
@pytest.mark.slow
def test_a_trainer_generates_from_the_parameters_it_has_just_changed(module, model):
    @jax.jit
    def train_and_generate(params):
        changed = jax.tree.map(lambda leaf: leaf * jnp.asarray(0.5, leaf.dtype), params)
        tokens = jaxkv.generate(
            changed,
            model,
            jnp.asarray([PROMPTS[0]], jnp.int32),
            sampling=SamplingParams(temperature=0.0, max_tokens=4),
        ).tokens
        return changed, tokens

    changed, tokens = train_and_generate(model.params_of(module))
    twin = example.Transformer(nnx.Rngs(0))
    nnx.update(twin, changed)
    assert np.asarray(tokens).tolist() == greedy_from_scratch(twin, PROMPTS[:1], 4)[0]


def test_parameters_are_the_modules_own_arrays(module, model):
    params = model.params_of(module)
    assert params["tokens"]["embedding"] is module.tokens.embedding[...]


def test_random_parameters_have_the_modules_shapes(module, model):
    params = model.init_params(jax.random.key(0), "bfloat16")
    wanted = jax.tree.map(lambda leaf: leaf.shape, model.params_of(module))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == wanted
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), model.param_shapes("bfloat16")
    )


class Dropping(example.Transformer):
    """Drops half of the last hidden state, and normalises it over the batch, while it is trained."""

    def __init__(self, rngs, *, training):
        super().__init__(rngs)
        self.drop = nnx.Dropout(0.5, deterministic=not training, rngs=rngs)
        self.scale = nnx.BatchNorm(example.HIDDEN, use_running_average=not training, rngs=rngs)
        self.deterministic = not training

    def __call__(self, tokens, positions, attend):
        hidden = self.scale(self.drop(super().__call__(tokens, positions, attend)))
        # A flag of the module's own, which is no `nnx.Dropout`.
        return hidden if self.deterministic else -hidden


def test_variables_that_are_no_floats_are_carried_along():
    module = Dropping(nnx.Rngs(0), training=False)
    model = FlaxModel(module)
    tokens = generated(model, model.params_of(module), new=4)
    assert tokens == greedy_from_scratch(module, PROMPTS, 4)[0]
    random = generated(model, model.init_params(jax.random.key(1), "float32"), new=4)
    assert np.shape(random) == (3, 4)


def test_a_module_in_training_mode_generates_in_evaluation_mode_and_keeps_its_own():
    module, twin = (Dropping(nnx.Rngs(0), training=training) for training in (True, False))
    model = FlaxModel(module)
    params = model.params_of(module)
    tokens = generated(model, params, new=4)
    assert tokens == greedy_from_scratch(twin, PROMPTS, 4)[0]
    assert model == FlaxModel(twin)
    flags = (module.drop.deterministic, module.scale.use_running_average, module.deterministic)
    assert flags == (False, False, False)
    assert params["scale"]["mean"] is module.scale.mean[...]


@pytest.mark.parametrize(
    ("call", "changed"),
    [
        (lambda self, x: self.drop(x, deterministic=False), "drop.rngs.count"),
        (lambda self, x: self.scale(x, use_running_average=False), "scale.mean, scale.var"),
        (lambda self, x: setattr(self, "new", nnx.BatchStat(x.mean())) or x, "new"),
    ],
)
@pytest.mark.parametrize("method", ["__call__", "logits"])
def test_a_module_that_trains_while_it_generates_is_refused(call, changed, method):
    def trains(self, x, *rest):
        if method == "logits":
            return super(Dropping, self).logits(call(self, x))
        return call(self, super(Dropping, self).__call__(x, *rest))

    module = type("Trains", (Dropping,), {method: trains})(nnx.Rngs(0), training=True)
    model = FlaxModel(module)
    with pytest.raises(ValueError, match=f"the module changes {changed} while it generates"):
        generated(model, model.params_of(module), new=2)


def test_a_state_serves_as_parameters(module, model):
    assert generated(model, nnx.state(module)) == generated(model, model.params_of(module))


def test_a_module_as_model_is_refused_with_the_call_that_works(module, model):
    call = inspect.unwrap(jaxkv.generate)
    with pytest.raises(ValueError, match=r"nnx module Transformer; make `model = jaxkv.FlaxModel"):
        call(model.params_of(module), module, PROMPTS)


@pytest.mark.parametrize(
    ("params_of", "reason"),
    [
        (lambda module: module, r"params is the nnx module Transformer; pass model.params_of"),
        (
            lambda module: {"norm": module.norm.scale[...]},
            "params differs in structure from the module",
        ),
    ],
)
def test_params_that_are_not_the_modules_are_refused(module, model, params_of, reason):
    with pytest.raises(ValueError, match=reason):
        generated(model, params_of(module), new=2)


# Its module generates in test_cached_generation_equals_running_the_module_from_scratch.
@pytest.mark.slow
def test_the_example_prints_what_it_generates(capsys):
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("[1, 2, 3] -> [")


def specs(*, layers=(0, 1, 2), heads=example.KV_HEADS):
    def cache_specs(self, *, page_size, dtype):
        spec = gqa(heads, example.HEAD_DIM, page_size=page_size, dtype=dtype)
        return tuple(LayerSpec(layer, spec) for layer in layers)

    return cache_specs


def state_specs(self, *, page_size, dtype):
    state = mamba2(heads=2, head_dim=4, d_state=4, d_conv=4, groups=1, dtype=dtype)
    return place([state])


def variant(**members):
    return type("Variant", (example.Transformer,), members)(nnx.Rngs(0))


def attend_with(**changes):
    """Returns a module's call that attends once, in a way changed by the arguments."""

    def call(self, tokens, positions, attend):
        x = self.tokens(tokens)
        k = jnp.zeros((tokens.shape[0], changes.get("kv_heads", 2), 8), x.dtype)
        q = jnp.zeros((tokens.shape[0], 6, 8), x.dtype)
        for layer in changes.get("layers", (0, 1, 2)):
            attend(layer, q, k, k, scale=1.0, window=changes.get("window"))
        return x

    return call


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"cache_specs": specs(layers=())}, "must name layers 0, 1, 2"),
        ({"cache_specs": specs(layers=(0, 2))}, r"once each, got \[0, 2\]"),
        ({"cache_specs": specs(layers=(0, 0, 1))}, r"once each, got \[0, 0, 1\]"),
        ({"cache_specs": state_specs}, "is of kind 'mamba2'; the layers of a FlaxModel must be"),
    ],
)
def test_specs_that_cannot_be_served_are_refused_when_the_model_is_made(members, reason):
    with pytest.raises(ValueError, match=reason):
        FlaxModel(variant(**members))


def test_a_module_that_lacks_the_protocol_is_told_what():
    with pytest.raises(
        ValueError, match="Linear lacks vocab_size, max_positions, cache_specs, logits"
    ):
        FlaxModel(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"__call__": attend_with(layers=(0, 1))}, r"did not attend in layers \[2\]"),
        ({"__call__": attend_with(layers=(0, 1, 1))}, "layer 1 attended twice in one call"),
        ({"__call__": attend_with(layers=(0, 3))}, "layer 3 is not in cache_specs"),
        (
            {"__call__": attend_with(kv_heads=3)},
            r"key has \[kv_heads, head_dim\] \[3, 8\], its spec",
        ),
        (
            {"__call__": attend_with(window=6), "cache_specs": Windowed.cache_specs},
            "layer 0 attends to 6 tokens, but its spec keeps only 5",
        ),
        (
            {"logits": lambda self, hidden: hidden.astype(jnp.float32)},
            r"logits are float32\[3, 48\], wanted float32\[3, 97\]",
        ),
        (
            {"logits": lambda self, hidden: self.tokens.attend(hidden).astype(jnp.bfloat16)},
            r"logits are bfloat16\[3, 97\], wanted float32",
        ),
    ],
)
def test_a_module_that_breaks_the_protocol_is_told_how_while_it_is_traced(members, reason):
    module = variant(**members)
    model = FlaxModel(module)
    with pytest.raises(ValueError, match=reason):
        generated(model, model.params_of(module), new=2)


def test_a_narrower_window_than_declared_may_be_asked_for():
    module = variant(__call__=attend_with(window=3), cache_specs=Windowed.cache_specs)
    model = FlaxModel(module)
    assert np.shape(generated(model, model.params_of(module), new=2)) == (3, 2)


def test_parameters_of_another_shape_are_refused(model):
    class Wider(example.Transformer):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.norm = nnx.LayerNorm(example.HIDDEN + 1, rngs=rngs)

    with pytest.raises(ValueError, match="the parameters of this Wider differ"):
        model.params_of(Wider(nnx.Rngs(0)))
