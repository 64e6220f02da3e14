"""Scores given texts: the log-probability of each token, computed one text at a time on pages that are freed after it.

A text takes one step. If a window group is smaller than the text, it takes several steps, and pages out of the window
are freed between them.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxkv.config.sampling import SamplingParams
from jaxkv.runner.program_specs import ScoreSpec
from jaxkv.runner.rows import Row
from jaxkv.runner.sampled_rows import report_logprobs
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.sampling.fields import logprobs_size
from jaxkv.step.score import TokenScores


def score_texts(
    sequence_runner: SequenceRunner, texts: Sequence[tuple[int, ...]], *, adapter_slot: int = 0
) -> Iterator[np.ndarray]:
    """Yields, per text, the float32 log-probability of each token after the first, given the tokens before it.

    Args:
        sequence_runner: runs the steps.
        texts: token ids.
        adapter_slot: see `Row`, like all of this name here.

    Raises:
        OutOfPages: a text needs more pages than are free; the cache is unchanged.
    """
    for text in texts:
        scores = _score_text(sequence_runner, text, 0, adapter_slot=adapter_slot)
        yield np.asarray(scores.following)


def prompt_logprobs(
    sequence_runner: SequenceRunner, prompt: tuple[int, ...], top: int, *, adapter_slot: int = 0
) -> list[dict[int, float] | None]:
    """Returns, per token, token id -> natural log-probability, for the token itself and the `top` most likely ones.

    The first token follows nothing, so its entry is `None`.

    Raises:
        OutOfPages: the prompt needs more pages than are free; the cache is unchanged.
    """
    scores = _score_text(sequence_runner, prompt, logprobs_size(top), adapter_slot=adapter_slot)
    following = np.asarray(scores.following).tolist()
    top_ids, top_logprobs = np.asarray(scores.top_ids)[:, :top], np.asarray(scores.top)[:, :top]
    columns = zip(prompt[1:], following, top_ids, top_logprobs, strict=True)
    return [None, *(report_logprobs(*column) for column in columns)]


def score_program(
    sequence_runner: SequenceRunner, text: tuple[int, ...], top: int = 0, *, adapter_slot: int = 0
) -> ScoreSpec:
    """Returns the program of the first step that scores a text, and reports `top` most likely tokens."""
    row = _row(0, text[: _stride(sequence_runner, len(text))], 0, adapter_slot)
    return sequence_runner.score_spec(row, logprobs_size(top))


def _row(sequence: int, tokens: tuple[int, ...], start: int, adapter_slot: int) -> Row:
    """Returns the row of a step that scores `tokens`, which begin at `start` of their text."""
    greedy = SamplingParams(temperature=0.0)
    return Row(sequence, tokens, start, greedy, emits=False, adapter_slot=adapter_slot)


def _score_text(
    sequence_runner: SequenceRunner, text: tuple[int, ...], top: int, *, adapter_slot: int
) -> TokenScores:
    """Returns the scores of all tokens but the last, as NumPy arrays."""
    stride = _stride(sequence_runner, len(text))
    with sequence_runner.reserved(min(len(text), stride)) as sequence:
        row = _row(sequence, text[:stride], 0, adapter_slot)
        parts = [_score_part(sequence_runner, row, top)]
        while (start := sum(len(part.following) for part in parts)) < len(text) - 1:
            sequence_runner.allocator.commit(sequence, start)
            sequence_runner.allocator.free_out_of_window(sequence, start)
            sequence_runner.allocator.reserve(sequence, min(len(text), start + stride))
            row = _row(sequence, text[start : start + stride], start, adapter_slot)
            parts.append(_score_part(sequence_runner, row, top))
    return jax.tree.map(lambda *each: np.concatenate(each), *parts)


def _score_part(sequence_runner: SequenceRunner, row: Row, top: int) -> TokenScores:
    """Returns the scores at the tokens of one step but its last.

    The next step begins at the last token of this one. It computes that token again and overwrites it with equal
    values.
    """
    spec = sequence_runner.runner.fit(sequence_runner.score_spec(row, top))
    scores = sequence_runner.runner.read(sequence_runner.score(spec, [row]))
    return jax.tree.map(lambda column: column[: len(row.tokens) - 1], scores)


def _stride(sequence_runner: SequenceRunner, length: int) -> int:
    """Returns the tokens per step: the whole text, unless a window group is too small for it.

    Models with recurrent layers or `whole_prompts` always take the whole text: a state must not take a token twice,
    and rotary angles may depend on the length of the text.
    """
    most = sequence_runner.allocator.most_ahead
    if (
        most is None
        or most < 2
        or sequence_runner.runner.layout.state_groups
        or sequence_runner.runner.model.whole_prompts
    ):
        return length
    return min(length, most)
