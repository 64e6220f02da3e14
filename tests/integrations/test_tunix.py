"""`JaxkvRollout` inside tunix's own `RLCluster`; needs google-tunix, which no extra installs."""

import json
import shutil
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.flax import load_file

from jaxkv import LLM, CacheConfig, default_model
from jaxkv.examples.small_llama import SmallLlama, forward

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("tunix.rl.rollout.base_rollout")
    from tunix.models.llama3.model import ModelConfig
    from tunix.models.llama3.params import create_model_from_safe_tensors
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout.base_rollout import RolloutConfig

    from jaxkv.integrations.tunix import JaxkvRollout

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPTS = ["def add(", "def add(", "class Node"]
PAD = 1


class Actor(nnx.Module):
    """The small model of the package as a module that tunix can train."""

    def __init__(self):
        loaded = load_file(default_model.path() / "model.safetensors")
        self.weights = nnx.Dict(
            {name: nnx.Param(leaf.astype(jnp.float32)) for name, leaf in loaded.items()}
        )

    def __call__(self, ids):
        return forward(SmallLlama(), {name: one[...] for name, one in self.weights.items()}, ids)


class Tokens:
    """The package's tokenizer under the names that tunix asks for."""

    def __init__(self, tokenizer):
        self.encode, self.decode = tokenizer.encode, tokenizer.decode

    def bos_id(self):
        return 0

    def eos_id(self):
        return 0

    def pad_id(self):
        return PAD


def named(state):
    return [(name, one[...]) for name, one in state["weights"].items()]


LLAMA = ModelConfig(
    num_layers=6,
    vocab_size=4096,
    embed_dim=256,
    hidden_dim=576,
    num_heads=8,
    head_dim=32,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-5,
    weight_tying=True,
)


def named_llama(state):
    """Yields the tensors of tunix's own Llama 3 under their names in a checkpoint."""
    flat = nnx.to_pure_dict(state)
    yield "model.embed_tokens.weight", flat["embedder"]["input_embedding"]
    yield "model.norm.weight", flat["final_norm"]["w"]
    for layer, parts in flat["layers"].items():
        prefix = f"model.layers.{layer}."
        for name, weight in parts["attn"].items():
            matrix = weight["w"]
            shape = (-1, LLAMA.embed_dim) if name == "o_proj" else (LLAMA.embed_dim, -1)
            yield f"{prefix}self_attn.{name}.weight", matrix.reshape(shape).T
        for name, weight in parts["mlp"].items():
            yield f"{prefix}mlp.{name}.weight", weight["kernel"].T
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", parts[name]["w"]


@pytest.fixture(scope="module")
def cluster():
    llm = LLM(
        dtype="float32",
        cache=CacheConfig(max_sequences=4, page_size=16),
        max_model_len=64,
        progress=False,
    )
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("fsdp",))
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=partial(JaxkvRollout, llm=llm, weights=named),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.sgd(1e-2), eval_every_n_steps=10, max_steps=2
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=6,
            max_prompt_length=8,
            temperature=0.7,
            seed=5,
            return_logprobs=True,
        ),
    )
    return rl_cluster.RLCluster(
        actor=Actor(), tokenizer=Tokens(llm.tokenizer), cluster_config=config
    ), llm


def logprobs(actor, prompt, tokens, temperature):
    logits = actor(jnp.asarray([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1] / temperature
    told = jax.nn.log_softmax(logits)
    return np.asarray(told)[np.arange(len(tokens)), tokens]


def test_a_cluster_generates_and_reports_the_log_probabilities_of_its_actor(cluster):
    trainer, llm = cluster
    out = trainer.generate(PROMPTS)
    assert out.left_padded_prompt_tokens.shape == (3, 8)
    assert out.tokens[0].tolist() != out.tokens[1].tolist()
    actor = trainer.actor_trainer.model
    for prompt, padded, text, tokens, told in zip(
        PROMPTS, out.left_padded_prompt_tokens, out.text, out.tokens, out.logprobs, strict=True
    ):
        ids = llm.tokenizer.encode(prompt)
        assert padded.tolist() == [PAD] * (8 - len(ids)) + ids
        assert text == llm.tokenizer.decode([*ids, *tokens])[len(prompt) :]
        np.testing.assert_allclose(told, logprobs(actor, ids, tokens, 0.7), atol=1e-5)


def test_old_log_probabilities_are_those_of_the_actor_and_0_for_padding(cluster):
    trainer, llm = cluster
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS[1:]]
    outputs = [[5, 6, 7], [8, 9, 10, 11]]
    left = np.asarray([[PAD] * (8 - len(one)) + one for one in ids])
    right = np.asarray([one + [PAD] * (5 - len(one)) for one in outputs])
    found = trainer.get_old_per_token_logps(jnp.asarray(left), jnp.asarray(right))
    for row, prompt, tokens in zip(found, ids, outputs, strict=True):
        wanted = logprobs(trainer.actor_trainer.model, prompt, tokens, 1.0)
        np.testing.assert_allclose(row[: len(tokens)], wanted, atol=1e-5)
        assert not row[len(tokens) :].any()


def test_new_weights_of_the_actor_reach_the_engine(cluster):
    trainer, llm = cluster
    actor, before = trainer.actor_trainer.model, llm.weight_version
    norm = actor.weights["model.norm.weight"]
    norm[...] = norm[...] * 3.0
    trainer.sync_weights()
    assert llm.weight_version == before + 1
    out = trainer.generate(PROMPTS[:1])
    ids = llm.tokenizer.encode(PROMPTS[0])
    np.testing.assert_allclose(out.logprobs[0], logprobs(actor, ids, out.tokens[0], 0.7), atol=1e-4)


@pytest.fixture
def plain_promotion():
    """JAX's own defaults, which tunix's code needs; for all threads, because its learner has several."""
    strict = {
        name: getattr(jax.config, name)
        for name in ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")
    }
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    for name, value in strict.items():
        jax.config.update(name, value)


def test_tunix_trains_its_own_llama_by_grpo_on_our_rollouts(plain_promotion, tmp_path):
    """The learner gives the engine new weights after each step by itself, and both agree on log-probabilities."""
    folder = tmp_path / "model"
    shutil.copytree(default_model.path(), folder)
    settings = json.loads((folder / "config.json").read_text())
    # tunix 0.1.7 rotates by the base of a million whatever `rope_theta` is.
    (folder / "config.json").write_text(json.dumps(settings | {"rope_theta": 1e6}))
    cache = CacheConfig(max_sequences=4, page_size=16)
    llm = LLM(folder, dtype="float32", cache=cache, max_model_len=64, progress=False)
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    actor, reference = (
        create_model_from_safe_tensors(str(folder), LLAMA, mesh, dtype=jnp.float32) for _ in "12"
    )
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=partial(JaxkvRollout, llm=llm, weights=named_llama),
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(1e-3),
            eval_every_n_steps=100,
            max_steps=2,
            mini_batch_size=2,
            train_micro_batch_size=2,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=6, max_prompt_length=8, temperature=0.9, return_logprobs=True
        ),
    )
    trainer = rl_cluster.RLCluster(
        actor=actor, reference=reference, tokenizer=Tokens(llm.tokenizer), cluster_config=config
    )
    learner = GRPOLearner(
        rl_cluster=trainer,
        reward_fns=lambda prompts, completions, **_: [float(len(one)) for one in completions],
        algo_config=GRPOConfig(num_generations=2),
    )
    before = llm.weight_version
    learner.train([{"prompts": np.asarray(PROMPTS[1:])}, {"prompts": np.asarray(["x = ", "if "])}])
    assert llm.weight_version == before + 2
    trained = trainer.actor_trainer.model
    for name, weight in named_llama(nnx.state(trained, nnx.Param)):
        if name == "model.embed_tokens.weight":
            np.testing.assert_array_equal(llm.params["embed"], weight)
            assert not np.array_equal(weight, reference.embedder.input_embedding[...])
    out = trainer.generate(PROMPTS[1:])
    for prompt, tokens, told in zip(PROMPTS[1:], out.tokens, out.logprobs, strict=True):
        ids = [*llm.tokenizer.encode(prompt), *tokens.tolist()]
        size = len(ids)
        mask = jnp.tril(jnp.ones((size, size), bool))[None]
        logits, _ = trained(jnp.asarray([ids]), jnp.arange(size)[None], None, mask)
        logprobs = jax.nn.log_softmax(logits[0, -len(tokens) - 1 : -1] / 0.9)
        wanted = np.asarray(logprobs)[np.arange(len(tokens)), tokens]
        np.testing.assert_allclose(told, wanted, atol=1e-4)
