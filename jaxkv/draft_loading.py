"""Loads a smaller model or head that drafts, and makes its cache; refuses one that cannot draft for the verifier."""

import sys
from collections.abc import Callable
from pathlib import Path

from jaxkv.cache.spec import CacheLayout
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.engine.speculation.draft_model import DraftModel
from jaxkv.memory import named_exhaustion
from jaxkv.models.decoder import Decoder
from jaxkv.models.draft_heads.eagle3 import names_eagle3
from jaxkv.models.draft_heads.head import DraftHead
from jaxkv.models.draft_heads.load import head_of, load_head
from jaxkv.models.protocol import Model, Params
from jaxkv.models.registry import build_model, load_config, load_params, resolve_dtype
from jaxkv.plan import free_bytes, plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.buckets import LOOSE_TOKENS
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.runner.step_shapes import StepShapes, grain_of
from jaxkv.weights.hub import fetch_weights, resolve_model

_SHARE = 0.1
"""Most of the free memory that the keys and values of the smaller model or head take."""

_TOKEN_BUDGET = 512
"""Most tokens of a step of the smaller model or head, while it computes prompts."""


def load_draft_model(
    config: SpeculationConfig | None,
    verifier: Model,
    *,
    directory: Path | None,
    fetch: Callable[[], None],
    dtype: str,
    max_model_len: int,
    max_sequences: int,
    strict: bool,
    progress: bool,
) -> SequenceRunner | None:
    """Loads the smaller model or the head that drafts, and makes its cache; returns `None` for other methods.

    It is loaded before the memory of the verifying model is planned, which so leaves it out.

    Args:
        config: the options of speculation.
        verifier: the model that verifies its drafts.
        directory: the directory of that model; `None` for one without files.
        fetch: gets the files of that model's weights to the directory.
        dtype: dtype name of that model's parameters.
        max_model_len: longest sequence, in tokens.
        max_sequences: most sequences of a step of the verifying model.
        strict: after a warm-up, refuse to compile anything more.
        progress: show a progress bar on stderr.

    Raises:
        ValueError: the models have different vocabularies, either is of a kind that cannot draft or be drafted for, the
            model lacks the layers of "mtp", or one sequence does not fit into a tenth of the free memory.
        BadCheckpoint, UnknownConfig: the files of the smaller model or the head are damaged, or not supported.
    """
    if config is None or config.method == "ngram":
        return None
    head = head_of(config, verifier)
    if head is None:
        model, params, dtype = _load_smaller(config, verifier, max_model_len, progress=progress)
    else:
        assert isinstance(verifier, Decoder), "others have no head"
        folder = _directory_of(head, config, directory, fetch, progress=progress)
        bar = progress and sys.stderr.isatty()
        with named_exhaustion("loading the head that drafts"):
            model, params = load_head(head, folder, verifier.config, dtype=dtype, progress=bar)
    if model.whole_prompts:
        raise ValueError(
            "what drafts needs prompts that can be computed in chunks, which this model's or head's cannot; choose "
            "another"
        )
    # With one draft each, so many rows fit in a step that verifies drafts.
    rows = max(1, min(max_sequences, LOOSE_TOKENS // 2))
    layout, budget = plan_cache(
        model,
        CacheConfig(max_sequences=rows),
        dtype=dtype,
        max_model_len=max_model_len,
        free_bytes=free_bytes(_SHARE),
    )
    _refuse_states(layout)
    runner = ModelRunner(model, params, layout, budget.counts, Programs(strict=strict))
    return SequenceRunner(runner, max_tokens=max_model_len, max_rows=rows)


def _directory_of(
    head: DraftHead,
    config: SpeculationConfig,
    verifiers: Path | None,
    fetch: Callable[[], None],
    *,
    progress: bool,
) -> Path:
    """Returns the directory that has a head's weights: its own, or for an MTP layer that of the verifying model."""
    if not head.is_mtp:
        directory = resolve_model(config.model, progress=progress)
        fetch_weights(config.model, directory, progress=progress)
        return directory
    if verifiers is None:
        raise ValueError(
            "mtp reads the model's own directory, and this model has none; make it by LLM(directory)"
        )
    fetch()
    return verifiers


def _load_smaller(
    config: SpeculationConfig, verifier: Model, max_model_len: int, *, progress: bool
) -> tuple[Decoder, Params, str]:
    """Returns the smaller model, its parameters and the name of their dtype."""
    if not isinstance(verifier, Decoder):
        raise ValueError(
            f"draft_model is supported for a Decoder on one device, got a {type(verifier).__name__}; use ngram"
        )
    directory = resolve_model(config.model, progress=progress)
    if names_eagle3(directory):
        raise ValueError(f'{config.model} is an EAGLE-3 head; give method="eagle3" with it')
    keys = load_config(directory)
    dtype = resolve_dtype("auto", keys.dtype)
    model = build_model(keys).limited(min(max_model_len, keys.max_positions))
    _check(model, verifier, max_model_len)
    fetch_weights(config.model, directory, progress=progress)
    with named_exhaustion("loading the draft model"):
        bar = progress and sys.stderr.isatty()
        return model, load_params(directory, model, dtype=dtype, progress=bar), dtype


def drafter_of(
    smaller: SequenceRunner | None, verifier: SequenceRunner, engine: EngineConfig
) -> DraftModel | None:
    """Returns the drafter of a loaded model for an engine over `verifier`; `None` without one."""
    if smaller is None:
        return None
    assert engine.speculation is not None, "only speculation loads a draft model"
    runner, longest = smaller.runner, smaller.length_buckets[-1]
    shapes = StepShapes(
        runner.layout,
        max_tokens=longest,
        max_rows=smaller.max_rows,
        token_budget=max(smaller.max_rows, min(_TOKEN_BUDGET, smaller.max_rows * longest)),
        whole_prompts=False,
        grain=grain_of(runner.layout, runner.implementation.name),
    )
    return DraftModel(smaller, verifier, engine.speculation.tokens, shapes)


def _check(model: Decoder, verifier: Decoder, max_model_len: int) -> None:
    if model.vocab_size != verifier.vocab_size:
        raise ValueError(
            f"a draft model needs the vocabulary of the model that verifies its drafts, which has "
            f"{verifier.vocab_size:,} ids; it has {model.vocab_size:,}. Choose a model of the same family and size of "
            f"vocabulary"
        )
    if model.max_positions < max_model_len:
        raise ValueError(
            f"the draft model supports {model.max_positions:,} tokens, but sequences may have {max_model_len:,}; "
            f"lower max_model_len"
        )


def _refuse_states(layout: CacheLayout) -> None:
    if layout.state_groups:
        names = ", ".join(group.name for group in layout.state_groups)
        raise ValueError(
            f"a draft model needs layers without recurrent states, which rejected drafts would change; got {names}"
        )
