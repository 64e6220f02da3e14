"""Makes the `Speculation` of an engine, and refuses models whose tokens cannot be taken back."""

from collections.abc import Callable

from jaxkv.cache.spec import CacheLayout
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.engine.speculation.drafter import Drafter
from jaxkv.engine.speculation.ngrams import NgramDrafter
from jaxkv.engine.speculation.pace import Pace
from jaxkv.engine.speculation.speculation import Speculation
from jaxkv.models.protocol import Model, TakesBack
from jaxkv.runner.step_shapes import StepShapes, draft_counts


def open_speculation(
    model: Model,
    layout: CacheLayout,
    shapes: StepShapes,
    config: SpeculationConfig | None,
    clock: Callable[[], float],
    drafter: Drafter | None = None,
) -> Speculation | None:
    """Returns what drafts for an engine; `None` if nothing does.

    Args:
        model: the model that verifies them.
        layout: groups of its cache.
        shapes: padded shapes of the engine's steps.
        config: the options.
        clock: returns seconds; must be monotonic.
        drafter: drafts; `None` for the one of a method that needs no weights.

    Raises:
        ValueError: the model has states that cannot be taken back, or computes prompts in one step, or no step holds
            the drafts of a row.
    """
    if config is None:
        return None
    if layout.state_groups and not isinstance(model, TakesBack):
        names = ", ".join(group.name for group in layout.state_groups)
        raise ValueError(
            f"speculation of a {type(model).__name__} needs a cache without recurrent states, from which it cannot "
            f"take rejected tokens back; got one with {names}. Turn speculation off"
        )
    if model.whole_prompts:
        raise ValueError(
            "speculation needs a model whose prompts can be computed in chunks, which this one's cannot; turn "
            "speculation off"
        )
    if shapes.most_drafts(1) < config.tokens:
        raise ValueError(
            f"a step of at most {shapes.token_buckets[-1]} tokens does not hold {config.tokens} drafts and the token "
            f"before them; raise token_budget or lower SpeculationConfig.tokens"
        )
    if config.method != "ngram" and drafter is None:
        raise ValueError("an engine that drafts with a model is given it; make it by LLM")
    pace = Pace(clock, draft_counts(config.tokens), adaptive=config.adaptive)
    return Speculation(
        drafter or NgramDrafter(config.longest_ngram, config.shortest_ngram),
        config.tokens,
        most_drafts=shapes.most_drafts,
        pace=pace,
        drafts_next=lambda: shapes.drafter is not None,
    )
