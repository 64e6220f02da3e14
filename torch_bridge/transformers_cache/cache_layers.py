"""`PagedLayer`: Transformers' interface to one attention layer of a `JaxkvCache`. Its tensors are in the `Step`."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from torch_bridge.transformers_cache.gradients import refuse_gradient
from torch_bridge.transformers_cache.sequences import Sequences
from torch_bridge.transformers_cache.step import Step
from torch_bridge.transformers_cache.uncompiled import uncompiled


class Running:
    """The current step, shared by a cache and its layers; `None` between forwards."""

    def __init__(self) -> None:
        self.step: Step | None = None


class PagedLayer(CacheLayerMixin):
    """Keys and values of one layer in pages.

    Args:
        layer: index of the layer.
        window: tokens a query sees, itself included; `None` for all.
        sequences: the cache's rows.
        running: holds the current step.
    """

    is_compileable = False
    is_croppable = True
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
        """Does nothing: the pages are allocated when the cache is made."""

    @uncompiled
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401 - Transformers' own signature
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values to the pages.

        Returns the keys and values of all columns; or the new ones unchanged, if attention reads the pages.

        Args:
            key_states: [rows, kv_heads, queries, head_dim], rotated.
            value_states: [rows, kv_heads, queries, head_dim].
            *args: passed by Transformers, unused.
            **kwargs: passed by Transformers, unused.
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
        # Under autocast the pages have a wider dtype than the keys.
        keys, values = (held.to(key_states.dtype) for held in step.gather(self._layer))
        return refuse_gradient(keys, key_states), refuse_gradient(values, value_states)

    @uncompiled
    def get_seq_length(self) -> int:
        """Returns the number of cached columns, padding included; this step's count once the layer has written them."""
        step = self._running.step
        if step is None or (self._updated is step and step.fixed is None):
            return self._sequences.num_columns
        return step.num_columns

    @uncompiled
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the number of columns that the mask covers, and the index of the first one."""
        step = self._running.step
        before = self._sequences.num_columns if step is None else step.num_columns
        if step is not None and step.fixed is not None:
            return before, 0
        return before + query_length, 0

    def get_max_length(self) -> int:
        """Returns -1: the pool is shared, so no row has a limit of its own."""
        return -1
