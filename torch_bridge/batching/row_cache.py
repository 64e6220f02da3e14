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
from torch_bridge.transformers_cache.cache_layers import Running, layers_of
from torch_bridge.transformers_cache.forward_call import CACHE_NAMES
from torch_bridge.transformers_cache.lent_states import LentStates
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
        names = inspect.signature(parts.model.forward).parameters
        self._keeps_logits = "logits_to_keep" in names
        self._takes_positions = "position_ids" in names
        self._cache_name = next(name for name in CACHE_NAMES if name in names)
        self._attends_pages = bool(parts.store.layout.paged_groups)
        self._empty: Sequence | None = None
        self._states: LentStates | None = None
        super().__init__(layers=layers_of(parts.plans, self._sequences, self._running))

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
        return self._forward(np.ones((len(rows), 1), bool), ids, positions, 1)[:, -1]

    def prompt(
        self, row: tuple[int, int], ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Returns the logits after a whole prompt, [1, vocab_size]; for models whose rows cannot be packed.

        Args:
            row: number in the allocator, and tokens of the prompt.
            ids: int64 [1, tokens].
            positions: int64 [1, tokens].
        """
        self._set_rows([row])
        return self._forward(np.ones((1, row[1]), bool), ids, positions, 1)[:, -1]

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
        real = np.arange(new.max())[None] < new[:, None]
        logits = self._forward(real, ids, positions, last, packed=True)[0]
        return logits if self._keeps_logits else logits[last]

    def replay(self, arguments: Mapping[str, Any], forward: Callable[..., Any]) -> Any:  # noqa: ANN401
        """Returns the output of the current step if it was replayed, else `None`; see `JaxkvCache.replay`."""
        step, states = self._running.step, self._states
        if step is None or states is None or step.fixed is not None:
            return None
        if step.thread != threading.get_ident():
            return None
        out = self._graphs.replay(forward, arguments, self._sequences, self._running)
        states.end_replay(replayed=out is not None)
        return out

    def _set_rows(self, rows: Rows[tuple[int, int]]) -> None:
        self._sequences.rows = [Sequence(number, None, None, length) for number, length in rows]
        columns = max(length for _, length in rows)
        # Attention reads the pages by the rows' lengths, so columns are only counted.
        self._sequences.real = np.broadcast_to(np.True_, (len(rows), columns))

    def _forward(
        self,
        real: np.ndarray,
        ids: torch.Tensor,
        positions: torch.Tensor,
        keep: int | torch.Tensor,
        *,
        packed: bool = False,
    ) -> torch.Tensor:
        """Returns the logits of the model's forward. If it fails, the pool counts as lost."""
        arguments: dict[str, Any] = {"input_ids": ids, self._cache_name: self, "use_cache": True}
        if self._takes_positions:
            arguments["position_ids"] = positions
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        lease = self._store.borrow()
        try:
            step = Step(
                self._sequences, lease, real, attends_pages=self._attends_pages, packed=packed
            )
            states = LentStates(
                self._sequences, lease, self.layers, has_previous=step.num_columns > 0
            )
            if not self._graphs.can_replay:
                states.lend()
            self._running.step, self._states = step, states
            step.enter()
            try:
                out = self._model(**arguments)
            except BaseException:
                states.drop()
                raise
            finally:
                self._running.step = self._states = None
                step.leave()
            step.check_complete()
            states.take_back()
            self._store.give_back(lease)
        except BaseException as error:
            lease.abandon(f"ended in {error!r}", cause=error)
            raise
        return out.logits
