"""Transformers' interface to the layers of a `JaxkvCache`: keys and values in pages, states, or both.

A layer's tensors are leased, so it has them during a forward only.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from jaxkv.cache.spec import PagedSpec, StateSpec
from torch_bridge.transformers_cache.gradients import refuse_gradient
from torch_bridge.transformers_cache.model_layout import LayerPlan
from torch_bridge.transformers_cache.sequences import Sequences
from torch_bridge.transformers_cache.step import Step
from torch_bridge.transformers_cache.uncompiled import uncompiled

_OUTSIDE = (
    "a JaxkvCache was updated outside of the forward of the model it was made for; pass the cache to that model, as "
    "past_key_values or cache_params, and call model(...), not model.forward or a module inside"
)


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
            raise RuntimeError(_OUTSIDE)
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


class _OnUse(dict[int, torch.Tensor | None]):
    """The states that a model reads by their number. One that is missing is asked for when it is first read."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self._ask = ask

    def __missing__(self, number: int) -> torch.Tensor | None:
        self._ask()
        return self.get(number)


class StateLayer(LinearAttentionLayer):
    """States of one recurrent layer: the model reads `conv_states[0]` and `recurrent_states[0]` and updates them.

    Args:
        layer: index of the layer.
        running: holds the current step.
    """

    is_compileable = False

    def __init__(self, layer: int, running: Running) -> None:
        super().__init__()
        self._layer = layer
        self._running = running
        self._lend: Callable[[], Mapping[str, torch.Tensor]] | None = None
        # A weak reference: without cycles a layer goes with its cache.
        this: weakref.ref[StateLayer] = weakref.ref(self)
        self.conv_states, self.recurrent_states = (_OnUse(lambda: _ask(this)) for _ in range(2))

    @property
    def is_croppable(self) -> bool:
        """False: a state has no memory of the states before it."""
        return False

    def bind(
        self,
        pools: Mapping[str, torch.Tensor],
        lend: Callable[[], Mapping[str, torch.Tensor]],
        *,
        has_previous: bool,
    ) -> None:
        """Gives the layer its rows' states for one forward. They are lent when the model first reads one of them.

        Args:
            pools: role -> the states of all rows; the convolution's under "conv".
            lend: returns the states of the rows, role -> [rows, *shape].
            has_previous: whether the rows have columns already. If not, the states are written before they are read.
        """
        self._clear()
        for role, pool in pools.items():
            if role == "conv":
                self.conv_kernel_size[0] = pool.shape[-1]
                self.is_conv_states_initialized[0] = True
                self.dtype, self.device = pool.dtype, pool.device
            else:
                self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = has_previous
        self._lend = lend

    def lend(self) -> None:
        """Has the layer's states lent now, unless they are or it is bound to none."""
        if self._lend is None:
            return
        lend, self._lend = self._lend, None
        for role, held in lend().items():
            (self.conv_states if role == "conv" else self.recurrent_states)[0] = held

    def unbind(self) -> tuple[torch.Tensor, ...]:
        """Takes the states back: the convolution's, then the other if the layer has one; none if none were lent."""
        held = (self.conv_states.get(0), self.recurrent_states.get(0))
        self._clear()
        return tuple(one for one in held if one is not None)

    def _clear(self) -> None:
        self._lend = None
        self.conv_states.clear()
        self.recurrent_states.clear()
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = False
        self.has_previous_state[0] = False

    @uncompiled
    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,  # noqa: ANN401 - Transformers' own signature
    ) -> torch.Tensor:
        """Keeps the last inputs of the convolution; returns the earlier ones and the new, [rows, channels, columns].

        Args:
            conv_states: the new inputs, [rows, channels, queries].
            state_idx: 0, since a layer has one state.
            conv_kernel_size: the convolution's width, as the cache has it.
            **kwargs: passed by Transformers, unused.
        """
        step = self._running.step
        if step is None:
            raise RuntimeError(_OUTSIDE)
        step.note_state(self._layer)
        return super().update_conv_state(conv_states, state_idx, conv_kernel_size)


class PagedStateLayer(StateLayer, PagedLayer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Keys and values in pages beside states, for layers with attention and a recurrent mixer side by side.

    Args:
        layer: index of the layer.
        window: tokens a query sees, itself included; `None` for all.
        sequences: the cache's rows.
        running: holds the current step.
    """

    def __init__(
        self, layer: int, window: int | None, sequences: Sequences, running: Running
    ) -> None:
        PagedLayer.__init__(self, layer, window, sequences, running)
        StateLayer.__init__(self, layer, running)


def _ask(layer: weakref.ref[StateLayer]) -> None:
    this = layer()
    if this is not None:
        this.lend()


def layers_of(
    plans: Sequence[LayerPlan], sequences: Sequences, running: Running
) -> list[CacheLayerMixin | LinearAttentionCacheLayerMixin]:
    """Returns the layers of a cache.

    Args:
        plans: the cache needs of each layer.
        sequences: the cache's rows.
        running: holds the current step.
    """
    return [_layer(index, plan, sequences, running) for index, plan in enumerate(plans)]


def _layer(
    index: int, plan: LayerPlan, sequences: Sequences, running: Running
) -> CacheLayerMixin | LinearAttentionCacheLayerMixin:
    has_pages = any(isinstance(spec, PagedSpec) for spec in plan.specs)
    has_states = any(isinstance(spec, StateSpec) for spec in plan.specs)
    if has_pages and has_states:
        return PagedStateLayer(index, plan.window, sequences, running)
    if has_pages:
        return PagedLayer(index, plan.window, sequences, running)
    # Transformers has such a layer for blocks that remember nothing.
    return StateLayer(index, running) if has_states else LinearAttentionLayer()
