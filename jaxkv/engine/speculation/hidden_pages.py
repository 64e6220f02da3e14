"""`HiddenPages`: where the verifying model's cache keeps the hidden states of requests for a head that drafts."""

import jax
import numpy as np

from jaxkv.engine.request_state import RequestState
from jaxkv.runner.draft_programs import HiddenPool
from jaxkv.runner.sequence_runner import SequenceRunner

_GROUP = "hidden_states"


class HiddenPages:
    """The hidden states that the verifying model's cache keeps, in pages beside those of keys and values.

    Args:
        verifier: runs the verifying model.
        drafts: drafts of a row.

    Attributes:
        pool: shape and dtype of the pool.
    """

    def __init__(self, verifier: SequenceRunner, drafts: int) -> None:
        self._verifier, self._drafts = verifier, drafts
        group = verifier.runner.layout.group(_GROUP)
        [self._layer], [array] = group.layers, group.spec.arrays
        [width] = array.shape
        count = verifier.runner.counts[_GROUP]
        self.pool = HiddenPool(count, group.page_size, width, array.dtype)

    @property
    def array(self) -> jax.Array:
        """The pool; the next step of the verifying model donates it."""
        return self._verifier.runner.cache.layer(self._layer)[_GROUP]

    def slots(self, sequence: RequestState, start: int, count: int) -> np.ndarray:
        """Returns the slots of positions [start, start + count) of a request, int32."""
        table = self._verifier.allocator.pages(sequence.number, _GROUP)
        return self.pool.slots(table, start, count)

    def end_of_text(self, sequence: RequestState) -> list[int]:
        """Returns `KeptHidden.first_page` and `page_table` of a request, behind a step that adds 1 token or more."""
        first = max(0, len(sequence.tokens) - (self._drafts + 1)) // self.pool.page_size
        columns = self.pool.columns(self._drafts)
        table = self._verifier.allocator.pages(sequence.number, _GROUP)
        pages = table[first : first + columns]
        return [first, *pages, *[0] * (columns - len(pages))]
