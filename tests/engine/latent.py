"""Engines over a tiny model with latent attention, and a record of the steps that they ran."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.config.blocks import IndexConfig, LatentConfig, MixtureConfig
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.engine.engine import Engine
from jaxkv.models.decoder import Decoder
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from tests.engine.engines import OTHER_HOLDER, TOKENIZER, VOCAB, fill_free, keep_junk

ROWS, PAGE, LONGEST, TOKENS = 3, 8, 64, 32
LATENT = LatentConfig(kv_lora_rank=24, rope_dim=8, nope_dim=12, value_dim=10, q_lora_rank=20)
# Chooses fewer tokens than prompts have.
SPARSE = replace(LATENT, index=IndexConfig(heads=16, head_dim=12, topk=14))
_PROGRAMS = {}


@cache
def model(latent=LATENT, layers=1, layer_offset=0, window=None):
    """Returns a model with random weights that make some tokens clearly more likely than others.

    With a window, there is one more layer, of plain attention over it.
    """
    mixer = "latent" if latent.index is None else "sparse_latent"
    beside = [] if window is None else [window]
    pattern = [(mixer, "mixture+shared")] * layers + [("attention", "mixture+shared")] * len(beside)
    made = Decoder(
        ModelConfig(
            family="deepseek_v3",
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=len(pattern),
            heads=4,
            kv_heads=4,
            head_dim=latent.query_dim,
            ffn_size=48,
            max_positions=LONGEST,
            rope=RopeConfig(rotary_dim=latent.rope_dim),
            windows=(*[None] * layers, *beside),
            pattern=tuple(pattern),
            latent=latent,
            mixture=MixtureConfig(
                experts=4,
                top_k=2,
                size=16,
                gated=True,
                scoring="sigmoid",
                correction=True,
                shared_size=16,
            ),
        ),
        layer_offset=layer_offset,
    )
    draw = np.random.default_rng(3)

    def leaf(path, wanted):
        # On the host, where no shape compiles anything.
        scale = "norm" in (name := path[-1].key) and "bias" not in name
        values = np.ones(wanted.shape) if scale else draw.normal(size=wanted.shape) * 0.16
        return jnp.asarray(values, wanted.dtype)

    return made, jax.tree_util.tree_map_with_path(leaf, made.param_shapes("float32"))


def engine_of(latent=LATENT, *, programs=None, free_pages=None, window=None, **options):
    """Returns an engine whose pools hold junk wherever nothing is kept; `options` are of `EngineConfig`.

    Of each group all but `free_pages` pages are taken.
    """
    network, params = model(latent, window=window)
    wish = CacheConfig(max_sequences=ROWS, page_size=PAGE)
    limits = {"dtype": "float32", "max_model_len": LONGEST, "free_bytes": None}
    layout, budget = plan_cache(network, wish, **limits)
    sequence_runner = SequenceRunner(
        ModelRunner(
            network,
            params,
            layout,
            budget.counts,
            programs or _PROGRAMS.setdefault((latent, window), Programs()),
        ),
        max_tokens=LONGEST,
        max_rows=ROWS,
    )
    if free_pages is not None:
        sequence_runner.allocator.open(OTHER_HOLDER)
        sequence_runner.allocator.reserve(
            OTHER_HOLDER, (ROWS * LONGEST // PAGE - free_pages) * PAGE
        )
    fill_free(sequence_runner)
    engine = Engine(
        sequence_runner, TOKENIZER, EngineConfig(**({"token_budget": TOKENS} | options))
    )
    # One size of each kind, so that few programs serve all tests.
    engine.shapes.decode_rows, engine.shapes.token_buckets = (ROWS,), (TOKENS,)
    engine.scheduler._fill = lambda least, most: most
    keep_junk(engine)
    return engine


def watch(engine):
    """Returns a list that grows by one word for each step: "decode", "expanded" or "absorbed"."""
    ran, step = [], engine.sequence_runner.step

    def noting(shape, rows):
        ran.append("decode" if shape.decode else "expanded" if shape.fresh else "absorbed")
        return step(shape, rows)

    engine.sequence_runner.step = noting
    return ran
