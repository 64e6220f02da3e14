"""Scores given texts: the log-probability of each token, computed one text at a time on pages that are freed after it.

A text takes one step. If a window group is smaller than the text, it takes several steps, and pages out of the window
are freed between them.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxkv.config.sampling import SamplingParams
from jaxkv.runner.rows import Row
from jaxkv.runner.sequence_runner import SequenceRunner


def score_texts(
    sequence_runner: SequenceRunner, texts: Sequence[tuple[int, ...]]
) -> Iterator[np.ndarray]:
    """Yields, per text, the float32 log-probability of each token after the first, given the tokens before it.

    Raises:
        OutOfPages: a text needs more pages than are free; the cache is unchanged.
    """
    for text in texts:
        stride = _stride(sequence_runner, len(text))
        with sequence_runner.reserved(min(len(text), stride)) as sequence:
            parts = [_score(sequence_runner, sequence, text, 0, stride)]
            while (start := sum(map(len, parts))) < len(text) - 1:
                sequence_runner.allocator.commit(sequence, start)
                sequence_runner.allocator.free_out_of_window(sequence, start)
                sequence_runner.allocator.reserve(sequence, min(len(text), start + stride))
                parts.append(_score(sequence_runner, sequence, text, start, stride))
        yield np.concatenate(parts)


def _score(
    sequence_runner: SequenceRunner, sequence: int, text: tuple[int, ...], start: int, stride: int
) -> np.ndarray:
    """Returns the log-probabilities of the tokens at `start + 1` to the end of one step.

    The next step begins at the last token of this one. It computes that token again and overwrites it with equal
    values.
    """
    part = text[start : start + stride]
    row = Row(sequence, part, start, SamplingParams(temperature=0.0), emits=False)
    spec = sequence_runner.runner.fit(sequence_runner.score_spec(row))
    return sequence_runner.runner.read(sequence_runner.score(spec, [row]))[: len(part) - 1]


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
