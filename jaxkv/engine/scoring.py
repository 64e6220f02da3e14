"""How likely given texts are: one text at a time, in one step, over pages that are given back at once."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxkv.config import SamplingParams
from jaxkv.engine.executor import Executor
from jaxkv.engine.rows import Row


def score_texts(executor: Executor, texts: Sequence[tuple[int, ...]]) -> Iterator[np.ndarray]:
    """Yields, per text, the float32 log-probability of each token after the first, given those before it.

    Raises:
        OutOfPages: a text needs more pages than are free; nothing was consumed.
    """
    for text in texts:
        with executor.reserved(len(text)) as sequence:
            row = Row(sequence, text, 0, SamplingParams(temperature=0.0), emits=False)
            declared = executor.fit(executor.shapes.score(row))
            scores = executor.read(executor.score(declared, [row]))
        yield scores[: len(text) - 1]
