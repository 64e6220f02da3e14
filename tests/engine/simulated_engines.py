"""Engines over a simulated device: one for each kind of cache, settings at random, and the books after every step."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp

from jaxkv.block_config import MambaConfig
from jaxkv.config import CacheConfig
from jaxkv.engine.engine import Engine
from jaxkv.engine.engine_config import EngineConfig
from jaxkv.engine.executor import Executor
from jaxkv.engine.programs import Programs
from jaxkv.engine.sequence import FINISHED
from jaxkv.model_config import ModelConfig, RopeConfig
from jaxkv.models.decoder import Decoder
from jaxkv.plan import plan_cache, tokens_ahead
from tests.engine.simulated import VOCAB, SimulatedDevice
from tests.engine.simulated_requests import (
    LONGEST,
    TOKENIZER,
    Faults,
    answer,
    groups_of_requests,
)

WINDOWS = {
    "full": (None, None),
    "windows": (5, None, 9),
    "all windows": (5, 6),
    "wide windows": (None, 20, 33),
}
KINDS = (*WINDOWS, "hybrid")


@cache
def model_of(kind):
    """Returns a model with a kind of cache, and parameters that nobody looks at."""
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
    return model, model.init_params(jax.random.key(1), jnp.float32)


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
        most_rebuilds: see `EngineConfig`.
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
def _planned(kind, rows, page, checkpoint_bytes, ahead):
    wish = CacheConfig(max_sequences=rows, page_size=page, checkpoint_bytes=checkpoint_bytes)
    limits = {"dtype": "float32", "max_model_len": LONGEST, "free_bytes": None, "ahead": ahead}
    return plan_cache(model_of(kind)[0], wish, **limits)


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
    )
    ahead = tokens_ahead(model, wish, config, LONGEST)
    layout, budget = _planned(
        setting.kind, setting.rows, setting.page, setting.checkpoint_bytes, ahead
    )
    executor = Executor(
        model,
        params,
        layout,
        _few(draw, setting, layout, budget.counts),
        max_tokens=LONGEST,
        max_rows=setting.rows,
        programs=Programs(),
        host_bytes=setting.host_bytes,
    )
    device = SimulatedDevice(executor, broken_every=setting.broken_every)
    engine = Engine(executor, TOKENIZER, config)
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


def check_books(engine):
    """Raises if accounts, index, host tier and schedule contradict themselves or each other (A1)."""
    accounts = engine.executor.accounts
    accounts.check()
    if engine.prefix is not None:
        engine.prefix.check()
    if engine.host is not None:
        engine.host.tier.check()
    running = engine.scheduler.running
    for sequence in running:
        held = accounts._held[sequence.number]
        assert held.computed == sequence.computed
        assert sequence.writable <= held.reserved
        assert sequence.collected <= sequence.computed
        assert sequence.pending >= 0
        assert sequence.reserved < sequence.longest or sequence.reserved == 0
    others = set(accounts._held) - {sequence.number for sequence in running}
    assert all(number < 0 for number in others), f"who does not run holds pages: {others}"


def assert_all_is_free(engine):
    accounts = engine.executor.accounts
    for group in engine.executor.layout.groups:
        free = accounts.num_free(group.name) + accounts.num_reclaimable(group.name)
        assert free == engine.executor.owner.counts[group.name] - (group.unit == "state")


class Play:
    """Lets an engine serve requests at random, over junk in whatever is free, and compares with the oracle.

    Args:
        draw: decides everything.
        setting: of the engine.
        most: groups of requests.

    Attributes:
        engine, device: of the play.
        sequences: all that were taken in, with the request of each.
    """

    def __init__(self, draw, setting, most):
        self.engine, self.device = engine_of(draw, setting)
        self.sequences = []
        self._draw, self._setting = draw, setting
        self._faults = Faults(self.engine, draw, setting.fault_rate)
        self._aborted = set()
        self._waiting = groups_of_requests(draw, most)
        self._arrivals, self._aborts = (
            draw.choice((0.03, 0.1, 0.3, 0.9)),
            draw.choice((0, 0, 0.02, 0.1)),
        )

    def run(self):
        """Serves everybody, with faults and without at the end, and compares what they got."""
        steps = 0
        while self._waiting or any(one.status != FINISHED for one, _ in self.sequences):
            self._arrive()
            if self._draw.random() < 0.7:
                self.device.fill_free()
            if self.engine.has_work:
                self._step()
                steps += 1
                assert steps < 8000, "nothing comes to an end"
        self._faults.end()
        while self.engine.has_work:
            self.engine.step()
        check_books(self.engine)
        assert_all_is_free(self.engine)
        for sequence, request in self.sequences:
            self._compare(sequence, answer(request, self._setting.broken_every))

    def _arrive(self):
        draw, engine = self._draw, self.engine
        while self._waiting and (draw.random() < self._arrivals or not engine.has_work):
            group = self._waiting.pop(0)
            try:
                made = engine.add(group, streamed=draw.random() < 0.3)
            except ValueError as error:
                assert "needs room" in str(error)
            else:
                self.sequences += zip(made, group, strict=True)
            if draw.random() < 0.5:
                return

    def _step(self):
        try:
            self.engine.step()
        except KeyboardInterrupt as interrupt:
            assert "injected" in str(interrupt)
        if self.sequences and self._draw.random() < self._aborts:
            sequence, _ = self._draw.choice(self.sequences)
            if sequence.status != FINISHED:
                self._aborted.add(sequence)
                self.engine.abort(sequence)
        check_books(self.engine)

    def _compare(self, sequence, wanted):
        got = tuple(sequence.token_ids)
        if sequence in self._aborted:
            assert got == wanted.token_ids[: sequence.generated]
            return
        if sequence.error is not None:
            assert self._setting.fault_rate, sequence.error
            assert got == wanted.token_ids[: sequence.generated]
            return
        assert (got, sequence.reason) == (wanted.token_ids, wanted.reason)
        if sequence.request.params.logprobs is not None:
            for told, (token, logprob) in zip(sequence.logprobs, wanted.logprobs, strict=True):
                assert abs(told[token] - logprob) < 1e-6
        if sequence.pieces is not None:
            ids = [piece.token_id for piece in sequence.pieces if piece.token_id is not None]
            assert ids == sequence.token_ids
            assert sum(piece.finish_reason is not None for piece in sequence.pieces) == 1
