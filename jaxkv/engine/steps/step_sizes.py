"""`StepSizes`: what chooses the program of a step: padded shapes, smaller steps after an OOM, several steps at once."""

from dataclasses import dataclass

from jaxkv.cache.spec import CacheLayout
from jaxkv.config.engine import EngineConfig
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.engine.steps.multi_step import MultiStep
from jaxkv.engine.steps.oom_backoff import OomBackoff
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.runner.step_shapes import StepShapes, clamp_token_budget, grain_of, may_share_keys
from jaxkv.step.text_drafter import NgramLookup, NoGuesses, TextDrafter


@dataclass(frozen=True)
class StepSizes:
    """The three that choose the program of an engine's steps.

    Attributes:
        shapes: padded shapes of single steps.
        oom_backoff: records shapes that ran out of memory, and cuts steps to smaller ones.
        multi_step: decides when several decode steps are sent as one program.
    """

    shapes: StepShapes
    oom_backoff: OomBackoff
    multi_step: MultiStep


def open_step_sizes(
    sequence_runner: SequenceRunner, config: EngineConfig, *, checkpoints: bool
) -> StepSizes:
    """Returns the sizes of an engine's steps.

    Args:
        sequence_runner: runs the steps.
        config: engine options.
        checkpoints: whether prefill steps make checkpoints of recurrent states.
    """
    runner = sequence_runner.runner
    whole = runner.model.whole_prompts
    most = {"max_tokens": sequence_runner.length_buckets[-1], "max_rows": sequence_runner.max_rows}
    shapes = StepShapes(
        runner.layout,
        **most,
        token_budget=clamp_token_budget(config.token_budget, **most),
        whole_prompts=whole,
        pinned=config.pinned_shapes,
        grain=grain_of(runner.layout, runner.implementation.name),
        checkpoints=checkpoints,
        lora=runner.adapters is not None,
        drafts=0 if config.speculation is None else config.speculation.tokens,
        drafter=text_drafter_of(config.speculation, runner.layout),
        shares=may_share_keys(
            runner.layout,
            runner.implementation.name,
            batch_invariant=runner.model.batch_invariant,
        ),
    )
    oom_backoff = OomBackoff(
        shapes.token_buckets, shapes.decode_rows, whole=whole, refusal=runner.refusal
    )
    steps = 1 if config.pinned_shapes else config.steps_per_launch
    return StepSizes(shapes, oom_backoff, MultiStep(runner, shapes, oom_backoff, steps))


def text_drafter_of(config: SpeculationConfig | None, layout: CacheLayout) -> TextDrafter | None:
    """Returns what drafts on the device; `None` without drafts, or if the cache was made without room for them."""
    if config is None or layout.kept_drafts < config.tokens:
        return None
    if config.method != "ngram":
        return NoGuesses()
    return NgramLookup(config.longest_ngram, config.shortest_ngram)
