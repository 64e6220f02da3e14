"""Engines over a simulated device: one for each kind of cache, with random settings."""

from dataclasses import dataclass
from functools import cache
from itertools import count

import jax
import jax.numpy as jnp

from jaxkv.config.blocks import MambaConfig
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.engine.engine import Engine
from jaxkv.models.decoder import Decoder
from jaxkv.plan import plan_cache, tokens_ahead
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from tests.engine.drafters import AnyPace, DeviceGuesser, Guesser
from tests.engine.simulated import SimulatedDevice
from tests.engine.simulated_memory import SlowMemory
from tests.engine.simulated_requests import LONGEST, TOKENIZER, answer
from tests.engine.simulated_text import VOCAB

WINDOWS = {
    "full": (None, None),
    "windows": (5, None, 9),
    "all windows": (5, 6),
    "wide windows": (None, 20, 33),
}
KINDS = (*WINDOWS, "hybrid")


@cache
def model_of(kind):
    """Returns a model with a kind of cache, and the types of its parameters."""
    if kind == "hybrid":
        config = ModelConfig(
            family="hybrid",
            vocab_size=VOCAB,
            hidden_size=64,
            num_layers=2,
            heads=4,
            kv_heads=2,
            head_dim=16,
            ffn_size=64,
            max_positions=LONGEST,
            rope=RopeConfig(rotary_dim=16),
            windows=(None, None),
            pattern=(("mamba2", "gated"), ("attention", "gated")),
            mamba=MambaConfig(heads=4, head_dim=16, d_state=16, d_conv=4, groups=2, chunk_size=4),
        )
    else:
        config = ModelConfig(
            family="gemma3_text",
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=len(WINDOWS[kind]),
            heads=4,
            kv_heads=2,
            head_dim=8,
            ffn_size=48,
            max_positions=LONGEST,
            rope=RopeConfig(rotary_dim=8),
            window_rope=RopeConfig(rotary_dim=8, theta=100.0),
            windows=WINDOWS[kind],
        )
    model = Decoder(config)
    return model, jax.eval_shape(lambda: model.init_params(jax.random.key(1), jnp.float32))


@dataclass(frozen=True)
class Setting:
    """How an engine serves, and how much memory it has.

    Attributes:
        kind: of its cache.
        rows, page, budget, steps, overlap, prefix: see `CacheConfig` and `EngineConfig`.
        spare: pages of each group beyond what the longest request needs; `None` for plenty.
        host_bytes: of the host tier; 0 for none.
        checkpoint_bytes: for states of a hybrid's prefixes.
        coarse: one program of each kind, and chunks that fill no bucket.
        fault_rate: how often a step fails.
        broken_every: see `simulated.is_finite`.
        most_rebuilds, idle_checks: see `EngineConfig`.
        drafts: most drafts of a row; 0 for no speculation.
        rightness: probability of each draft to be right.
        drafted_share: probability of each step to have drafts; `None` to decide by measured times.
        on_device: steps that verify drafts end with the next ones.
    """

    kind: str
    rows: int = 4
    page: int = 4
    budget: int = 16
    steps: int = 1
    overlap: bool = True
    prefix: bool = True
    spare: int | None = None
    host_bytes: int = 0
    checkpoint_bytes: int | None = None
    coarse: bool = False
    fault_rate: float = 0.0
    broken_every: int = 0
    most_rebuilds: int = 10**6
    idle_checks: bool = True
    drafts: int = 0
    rightness: float = 0.0
    drafted_share: float | None = 1.0
    on_device: bool = False


def draw_setting(draw, kind, **fixed):
    """Returns a setting at random, but for what is `fixed`."""
    drawn = {
        "rows": draw.choice((1, 2, 4, 5)),
        "page": draw.choice((4, 8, 16)),
        "budget": draw.choice((4, 7, 16, 40)),
        "steps": draw.choice((1, 2, 3, 4, 8, 16)),
        "overlap": draw.random() < 0.8,
        "prefix": draw.random() < 0.85,
        "spare": draw.choice((None, 0, 1, 3, 6)),
        "host_bytes": draw.choice((0, 0, 12_000, 40_000, 2**22)),
        "checkpoint_bytes": draw.choice((0, 2**22, 2**24)) if kind == "hybrid" else None,
        "coarse": draw.random() < 0.3,
        "fault_rate": draw.choice((0, 0, 0, 0.01, 0.04)),
        "broken_every": draw.choice((0, 0, 0, 97)),
    }
    return Setting(kind, **drawn | fixed)


@cache
def _planned(kind, rows, page, checkpoint_bytes, ahead, speculation=None):
    wish = CacheConfig(max_sequences=rows, page_size=page, checkpoint_bytes=checkpoint_bytes)
    limits = {"dtype": "float32", "max_model_len": LONGEST, "free_bytes": None, "ahead": ahead}
    return plan_cache(model_of(kind)[0], wish, **limits, speculation=speculation)


def engine_of(draw, setting):
    """Returns an engine and its device."""
    model, params = model_of(setting.kind)
    wish = CacheConfig(
        max_sequences=setting.rows,
        page_size=setting.page,
        checkpoint_bytes=setting.checkpoint_bytes,
    )
    config = EngineConfig(
        token_budget=max(setting.budget, setting.rows),
        overlap=setting.overlap,
        prefix_cache=setting.prefix,
        steps_per_launch=setting.steps,
        most_rebuilds=setting.most_rebuilds,
        idle_checks=setting.idle_checks,
        speculation=SpeculationConfig(tokens=setting.drafts) if setting.drafts else None,
    )
    ahead = tokens_ahead(model, wish, config, LONGEST)
    layout, budget = _planned(
        setting.kind,
        setting.rows,
        setting.page,
        setting.checkpoint_bytes,
        ahead,
        config.speculation if setting.on_device else None,
    )
    sequence_runner = SequenceRunner(
        ModelRunner(model, params, layout, _few(draw, setting, layout, budget.counts), Programs()),
        max_tokens=LONGEST,
        max_rows=setting.rows,
    )
    device = SimulatedDevice(sequence_runner, broken_every=setting.broken_every)
    engine = Engine(
        sequence_runner, TOKENIZER, config, host_bytes=setting.host_bytes, clock=count().__next__
    )
    if engine.speculation is not None:
        engine.speculation.drafter = guesser = Guesser(
            draw,
            setting.rightness,
            lambda request: answer(request, setting.broken_every).token_ids,
            VOCAB,
        )
        assert (engine.shapes.drafter is not None) == setting.on_device
        if setting.on_device:
            engine.shapes.drafter = DeviceGuesser(guesser, engine)
        if setting.drafted_share is not None:
            engine.speculation.pace = AnyPace(draw, setting.drafted_share)
    if engine.host is not None:
        engine.host.transfers.memory = SlowMemory(draw)
    if setting.coarse:
        shapes = engine.shapes
        shapes.decode_rows, shapes.lengths = (setting.rows,), (LONGEST,)
        shapes.token_buckets = (max(16, setting.budget),)
        engine.scheduler._fill = lambda rows, tokens: tokens
    return engine, device


def _few(draw, setting, layout, counts):
    """Returns how many pages and states each group has."""
    counts = dict(counts)
    for group in layout.groups if setting.spare is not None else ():
        if group.unit == "state":
            few = setting.rows + 1 + draw.choice((0, 1, 4, 9))
        elif group.window is None:
            few = -(-LONGEST // group.page_size) + setting.spare
        else:
            few = -(-(group.window - 1) // group.page_size) + 1 + draw.choice((1, 2, 4, 8))
        counts[group.name] = min(counts[group.name], few)
    return counts
