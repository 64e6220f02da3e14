"""`RowCache`: a Transformers cache for forwards over rows that the scheduler has chosen, in a `JaxkvCache`'s pool."""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from torch_bridge.transformers_cache.cache import CacheParts
from torch_bridge.transformers_cache.cache_layers import PagedLayer, Running
from torch_bridge.transformers_cache.sequences import Sequence, Sequences
from torch_bridge.transformers_cache.step import Step
from torch_bridge.transformers_cache.tables import padded


class RowCache(Cache):
    """Runs forwards over any rows whose pages are reserved. It reserves nothing, and keeps no rows between forwards.

    Args:
        parts: what a `JaxkvCache` and its forks share.
    """

    def __init__(self, parts: CacheParts) -> None:
        self._model, self._store, self._graphs = parts.model, parts.store, parts.graphs
        self._sequences, self._running = Sequences(parts.store), Running()
        self._keeps_logits = "logits_to_keep" in inspect.signature(parts.model.forward).parameters
        self._empty: Sequence | None = None
        super().__init__(
            layers=[
                PagedLayer(index, plan.window, self._sequences, self._running)
                for index, plan in enumerate(parts.plans)
            ]
        )

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Holds an empty sequence, with which packed steps pad their rows."""
        number = self._store.new_number()
        self._store.allocator.open(number)
        self._empty = Sequence(number, None, None)
        try:
            yield
        finally:
            self._empty = None
            self._store.allocator.release(number)

    def decode(
        self, rows: Rows[tuple[int, int]], ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Returns the logits after one new token per row, [rows, vocab_size].

        Args:
            rows: (number in the allocator, tokens with the new one) of each row.
            ids: int64 [rows, 1].
            positions: int64 [rows, 1].
        """
        self._set_rows(rows)
        step = self._step(np.ones((len(rows), 1), bool), packed=False)
        options = {"logits_to_keep": 1} if self._keeps_logits else {}
        return self._forward(step, input_ids=ids, position_ids=positions, **options)[:, -1]

    def prefill(
        self,
        rows: Rows[tuple[int, int]],
        counts: Rows[int],
        ids: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the logits after each row's last new token, [rows, vocab_size].

        Args:
            rows: (number in the allocator, tokens with the new ones) of each row.
            counts: number of new tokens of each row.
            ids: the new tokens, row after row without padding, int64 [1, tokens].
            positions: int64 [1, tokens].
            last: index of each row's last token in `ids`, int64 [rows].
        """
        assert self._empty is not None, "prefill runs inside `serving`"
        self._set_rows(rows)
        # Few numbers of rows, for which kernels are compiled.
        missing = padded(len(rows), 1) - len(rows)
        self._sequences.rows += [self._empty] * missing
        new = np.array([*counts, *[0] * missing])
        step = self._step(np.arange(new.max())[None] < new[:, None], packed=True)
        options = {"logits_to_keep": last} if self._keeps_logits else {}
        logits = self._forward(step, input_ids=ids, position_ids=positions, **options)[0]
        return logits if self._keeps_logits else logits[last]

    def replay(self, arguments: Mapping[str, Any], forward: Callable[..., Any]) -> Any:  # noqa: ANN401
        """Returns the output of the current decode step if it was replayed, else `None`; see `JaxkvCache.replay`."""
        step = self._running.step
        if step is None or not step.decodes or step.fixed is not None:
            return None
        if step.thread != threading.get_ident():
            return None
        return self._graphs.replay(forward, arguments, self._sequences, self._running)

    def _set_rows(self, rows: Rows[tuple[int, int]]) -> None:
        self._sequences.rows = [Sequence(number, None, None, length) for number, length in rows]
        columns = max(length for _, length in rows)
        # Attention reads the pages by the rows' lengths, so columns are only counted.
        self._sequences.real = np.broadcast_to(np.True_, (len(rows), columns))

    def _step(self, real: np.ndarray, *, packed: bool) -> Step:
        lease = self._store.borrow()
        try:
            return Step(self._sequences, lease, real, attends_pages=True, packed=packed)
        except BaseException:
            self._store.give_back(lease)
            raise

    def _forward(self, step: Step, **arguments: Any) -> torch.Tensor:  # noqa: ANN401 - the model's own
        """Returns the logits of the model's forward. If it fails, the pool counts as lost."""
        self._running.step = step
        step.enter()
        try:
            try:
                out = self._model(**arguments, past_key_values=self, use_cache=True)
            finally:
                self._running.step = None
                step.leave()
            step.check_complete()
            self._store.give_back(step.lease)
        except BaseException as error:
            step.lease.abandon(f"ended in {error!r}", cause=error)
            raise
        return out.logits
