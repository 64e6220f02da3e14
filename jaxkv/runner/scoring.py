"""How likely given texts are: one text at a time, in one step, over pages that are given back at once.

Where layers have windows and their pools are smaller than a text, it takes several steps, and what the windows have
passed is given back between them.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxkv.config.sampling import SamplingParams
from jaxkv.runner.model_runner import Executor
from jaxkv.runner.rows import Row


def score_texts(executor: Executor, texts: Sequence[tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Yields, per text, the float32 log-probability of each token after the first, given those before it.

    Raises:
        OutOfPages: a text needs more pages than are free; nothing was consumed.
    """
    for text in texts:
        stride = _stride(executor, len(text))
        with executor.reserved(min(len(text), stride)) as sequence:
            parts = [_score(executor, sequence, text, 0, stride)]
            while (start := sum(map(len, parts))) < len(text) - 1:
                executor.allocator.commit(sequence, start)
                executor.allocator.free_out_of_window(sequence, start)
                executor.allocator.reserve(sequence, min(len(text), start + stride))
                parts.append(_score(executor, sequence, text, start, stride))
        yield np.concatenate(parts)


def _score(
    executor: Executor, sequence: int, text: tuple[int, ...], start: int, stride: int
) -> np.ndarray:
    """Returns how likely the tokens are that follow those at `start` and after, but for the last of the step.

    That one is computed once more at the beginning of the next step, which overwrites it with itself.
    """
    part = text[start : start + stride]
    row = Row(sequence, part, start, SamplingParams(temperature=0.0), emits=False)
    spec = executor.fit(executor.score_spec(row))
    return executor.read(executor.score(spec, [row]))[: len(part) - 1]


def _stride(executor: Executor, length: int) -> int:
    """Returns the tokens of a step: all of them, unless a window group is too small for that.

    States of recurrent layers cannot take a token twice, and angles may depend on the whole text.
    """
    most = executor.allocator.most_ahead
    if most is None or most < 2 or executor.layout.state_groups or executor.model.whole_prompts:
        return length
    return min(length, most)
