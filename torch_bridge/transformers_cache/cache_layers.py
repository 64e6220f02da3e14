"""What Transformers sees of one attention layer of our cache. It keeps no tensor; the step on its way does."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from torch_bridge.transformers_cache.gradients import refuse_gradient
from torch_bridge.transformers_cache.sequences import Sequences
from torch_bridge.transformers_cache.step import Step
from torch_bridge.transformers_cache.uncompiled import uncompiled


class Running:
    """The step on its way, if there is one."""

    def __init__(self) -> None:
        self.step: Step | None = None


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer in pages.

    Args:
        layer: its number.
        window: tokens a query sees; `None` for all.
        sequences: the rows.
        running: the step on its way.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(
        self, layer: int, window: int | None, sequences: Sequences, running: Running
    ) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.is_initialized = True
        self._layer = layer
        self._sequences = sequences
        self._running = running
        self._updated: Step | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the pages were there before."""

    @uncompiled
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401 - Transformers' own signature
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values and returns those of all columns, or the new ones if attention reads pages.

        Args:
            key_states: [rows, kv_heads, queries, head_dim], rotated.
            value_states: likewise.
            *args: of Transformers, unused.
            **kwargs: of Transformers, unused.
        """
        step = self._running.step
        if step is None:
            raise RuntimeError(
                "JaxkvCache.update was called outside of the forward of the model it was made for; pass the cache to "
                "that model, as past_key_values, and call model(...), not model.forward or a module inside"
            )
        step.write(self._layer, key_states, value_states)
        self._updated = step
        if step.attends_pages:
            return key_states, value_states
        # Under autocast pages are wider than what is computed.
        keys, values = (held.to(key_states.dtype) for held in step.gather(self._layer))
        return refuse_gradient(keys, key_states), refuse_gradient(values, value_states)

    @uncompiled
    def get_seq_length(self) -> int:
        """Returns the remembered columns, padding included, this step's once the layer has them."""
        step = self._running.step
        if step is None or self._updated is step:
            return self._sequences.num_columns
        return step.num_columns

    @uncompiled
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many columns a query may see, and the first of them."""
        step = self._running.step
        before = self._sequences.num_columns if step is None else step.num_columns
        return before + query_length, 0

    def get_max_length(self) -> int:
        """Returns -1: the pool is shared, so no row has a limit of its own."""
        return -1
