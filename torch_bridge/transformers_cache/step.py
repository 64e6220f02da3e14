"""`Step`: one forward on leased pages. Writes and gathers the layers' keys and values, and makes the ops' arguments.

Made before the model runs and ended after it. Index tables go to the device once per group of layers, on first use.
"""

import threading
import weakref
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import jax
import numpy as np
import torch

from jaxkv.cache.spec import PagedSpec
from torch_bridge.ops.direct import fitted, write_kernel
from torch_bridge.sharing.dlpack import from_torch
from torch_bridge.sharing.leases import Lease
from torch_bridge.transformers_cache.sequences import Sequences
from torch_bridge.transformers_cache.tables import (
    FixedGroup,
    FixedPrompt,
    FixedTables,
    GroupTables,
    NotRecordable,
    UnknownCount,
    upload,
)

_TWICE = "layer {} updated the cache twice in one forward; is an inner module called on its own inside it?"
_ACTIVE: ContextVar["weakref.ref[Step] | None"] = ContextVar("active_step", default=None)


def active() -> "Step | None":
    """Returns the step of this thread's current forward; attention needs it, since Transformers passes it no cache.

    An interrupted forward leaves its step here, so attention also checks `Step.take_written`.
    """
    found = _ACTIVE.get()
    return None if found is None else found()


class Step:
    """The writes and reads of one forward.

    Args:
        sequences: the rows, whose counts include the step's tokens.
        lease: write lease of the whole pool.
        real: bool [rows, queries], which of the step's columns hold tokens.
        attends_pages: attention reads the pages itself, so nothing is gathered for it.
        fixed: tensors at fixed addresses in place of tables made from the rows, for a step that a graph records. The
            lease may then be a plain mapping, and ops that need JAX are called as custom ops.
        packed: the model receives the rows' tokens in one line of a batch of one, row after row, without padding.

    Attributes:
        lease, attends_pages, fixed, packed: as given.
        new: number of new tokens of each row, int [rows].
        num_rows, num_queries: shape of the batch that the model receives.
        num_tokens: new tokens, without padding.
        num_columns: cached columns before the step; raises when it is computed with, in a step that a graph records.
        is_dense: the step has no padding.
        decodes: every row has exactly one new token.
        launches: kernels found for this step's layers, by group, shapes, dtypes and settings.
        thread: id of the thread that made the step.
        unwritten: layers with pages that have not written their keys and values yet.
    """

    def __init__(
        self,
        sequences: Sequences,
        lease: Lease,
        real: np.ndarray,
        *,
        attends_pages: bool,
        fixed: FixedTables | None = None,
        packed: bool = False,
    ) -> None:
        self._sequences = sequences
        self._real = real
        self._device = sequences.store.device
        self._tables: dict[str, GroupTables] = {}
        self._places: dict[str, torch.Tensor] = {}
        self.lease = lease
        self.attends_pages = attends_pages
        self.fixed, self.packed = fixed, packed
        self.new = real.sum(axis=1)
        self.num_rows, self.num_queries = real.shape
        self.num_tokens = int(self.new.sum())
        self.is_dense = self.num_tokens == real.size
        self.decodes = self.is_dense and self.num_queries == 1 and not packed
        self.launches: dict[Hashable, Callable[..., Any] | None] = {}
        self.thread = threading.get_ident()
        before = sequences.num_columns - self.num_queries
        unknown: Any = UnknownCount()
        self.num_columns: int = before if fixed is None else unknown
        layout = sequences.store.layout
        self._group_of = {layer: group for group in layout.paged_groups for layer in group.layers}
        self.unwritten = set(self._group_of)
        # A single token after others updates its states in place, which is not seen here.
        updates = before == 0 or self.num_queries > 1
        layers = {layer for group in layout.state_groups for layer in group.layers}
        self._unseen_states = layers if updates else set()
        self._seen_states: set[int] = set()
        self._unattended: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._outer: weakref.ref[Step] | None = None

    def enter(self) -> None:
        """Makes this the active step of the thread, until `leave`."""
        self._outer = _ACTIVE.get()
        _ACTIVE.set(weakref.ref(self))

    def leave(self) -> None:
        """Restores the step that was active before `enter`, if this one is the active step."""
        if active() is self:
            _ACTIVE.set(self._outer)

    def check_complete(self) -> None:
        """Raises `RuntimeError` if a layer has not written to the cache, or not read the pages that it was to read."""
        missing = self.unwritten | self._unseen_states
        if missing:
            raise RuntimeError(
                f"layers {sorted(missing)} took no notice of the JaxkvCache that the forward was given, as with "
                f"gradient checkpointing in training mode, which drops caches. Call model.eval(), or pass no cache"
            )
        if self._unattended:
            raise RuntimeError(
                f"layers {sorted(self._unattended)} have an attention of their own, which got the new keys alone, "
                f'since the model is set to attention "jaxkv"; call model.set_attn_implementation("sdpa")'
            )

    def keeps(self, layer: int) -> bool:
        """Whether a layer has pages of its own; a layer that attends to another layer's keys has none."""
        return layer in self._group_of

    def note_state(self, layer: int) -> None:
        """Records that a recurrent layer updates its states; raises `ValueError` if it has in this step."""
        if layer in self._seen_states:
            raise ValueError(_TWICE.format(layer))
        self._seen_states.add(layer)
        self._unseen_states.discard(layer)

    def take_written(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the keys and values that a layer wrote in this step, once; `None` on later calls."""
        return self._unattended.pop(layer, None)

    def group(self, layer: int) -> str:
        """Returns the name of the layer's group: the layers with the same storage."""
        return self._group_of[layer].name

    def tables(self, layer: int) -> GroupTables | FixedGroup:
        """Returns the index tables of a layer's group."""
        group = self._group_of[layer]
        if self.fixed is not None:
            return self.fixed.groups[group.name]
        found = self._tables.get(group.name)
        if found is None:
            found = self._tables[group.name] = GroupTables(group, self._sequences, self.new)
        return found

    def pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's pages of keys and of values; they are leased, so do not keep them."""
        return self.lease[f"layer{layer}.key"], self.lease[f"layer{layer}.value"]

    def window(self, layer: int) -> int | None:
        """Returns how many tokens a layer's queries see; `None` for all."""
        spec = self._group_of[layer].spec
        assert isinstance(spec, PagedSpec)
        return spec.window

    @property
    def fixed_prompt(self) -> FixedPrompt | None:
        """Bounds and padding at fixed addresses, in a prompt that a graph records."""
        return None if self.fixed is None else self.fixed.prompt

    @property
    def ends_in_tokens(self) -> bool:
        """Whether the last column has a token of each row."""
        return bool(self._real[:, -1].all())

    @cached_property
    def tokens(self) -> torch.Tensor:
        """Flat indices into `rows * queries` of the step's tokens, int64 [tokens]."""
        return upload(np.flatnonzero(self._real), self._device)

    @cached_property
    def seq_lens(self) -> torch.Tensor:
        """Tokens of each row, the step's included, int32 [rows]."""
        if self.fixed is not None:
            return self.fixed.seq_lens
        lengths = np.array([row.num_tokens for row in self._sequences.rows], np.int32)
        return torch.from_numpy(lengths).to(self._device, copy=True)

    @cached_property
    def seq_lens_array(self) -> jax.Array:
        """`seq_lens` as a JAX array."""
        return from_torch(self.seq_lens)

    @cached_property
    def cu_q_lens(self) -> torch.Tensor:
        """Offsets of each row's tokens among the step's packed tokens, int32 [rows + 1]."""
        if self.fixed_prompt is not None:
            return self.fixed_prompt.cu_q_lens
        bounds = np.zeros(self.num_rows + 1, np.int32)
        np.cumsum(self.new, out=bounds[1:])
        return torch.from_numpy(bounds).to(self._device, copy=True)

    @cached_property
    def _token_of_column(self) -> torch.Tensor:
        """Index of the row's token in each column, int64 [rows, columns]; padding, which masks hide, has index 0."""
        counted = self._sequences.real.cumsum(axis=1) - 1
        return upload(np.maximum(counted, 0), self._device)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Packs [rows, heads, queries, head_dim] to [tokens, heads, head_dim], row after row, without padding.

        In a packed step the values are [1, heads, tokens, head_dim].
        """
        if self.decodes:
            return values.squeeze(2)
        if self.packed:
            return values[0].transpose(0, 1)
        flat = values.transpose(1, 2).reshape(-1, values.shape[1], values.shape[3])
        return flat if self.is_dense else flat[self.tokens]

    def pack_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """Packs one number per column, [rows or 1, queries], to [tokens]; in a packed step they are [1, tokens]."""
        if self.packed:
            return numbers[0]
        flat = numbers.expand(self.num_rows, -1).reshape(-1)
        return flat if self.is_dense else flat[self.tokens]

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """Unpacks [tokens, heads, head_dim] to [rows, queries, heads, head_dim], with zeros at padding.

        In a packed step the result is [1, tokens, heads, head_dim].
        """
        if self.decodes:
            return values.unsqueeze(1)
        if self.fixed_prompt is not None:
            # Kernels leave what belongs to no row as it was in memory.
            values = values.masked_fill(self.fixed_prompt.is_padding[:, None, None], 0)
        if self.packed:
            return values.unsqueeze(0)
        shape = (self.num_rows, self.num_queries, *values.shape[1:])
        if self.is_dense:
            return values.reshape(shape)
        out = values.new_zeros(shape)
        out.view(-1, *values.shape[1:])[self.tokens] = values
        return out

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes a layer's new keys and values, [rows, kv_heads, queries, head_dim], to its pages.

        Raises:
            ValueError: the layer has already written in this step, or the heads or dtype differ from the pages'.
        """
        if layer not in self.unwritten:
            raise ValueError(_TWICE.format(layer))
        self.unwritten.remove(layer)
        if self.attends_pages:
            self._unattended[layer] = keys, values
        pools = self.pools(layer)
        packed = [self.pack(new.detach() if new.requires_grad else new) for new in (keys, values)]
        # The kernel is looked up once per step for all layers of the same group, shapes and dtypes.
        kind = (self.group(layer), keys.shape, values.shape, keys.dtype, values.dtype)
        if kind not in self.launches:
            self._check_heads(layer, packed, pools)
            self.launches[kind] = self._find_write(layer, packed, pools)
        launch = self.launches[kind]
        if launch is not None:
            launch(self.tables(layer).narrow_slots, *map(fitted, packed), *pools)
            return
        if self.fixed is not None:
            if keys.is_cuda:
                raise NotRecordable(
                    f"torch has no kernel here that writes {keys.dtype} keys to pages in {pools[0].dtype}"
                )
            for pages, rows in zip(pools, packed, strict=True):
                flat = pages.flatten(0, 1)
                # Padding rows write to one more slot, past the last page.
                wide = torch.cat([flat, flat[:1]])
                wide.index_copy_(0, self.tables(layer).slots, rows.to(pages.dtype))
                flat.copy_(wide[:-1])
            return
        tables = self.tables(layer)
        slots = tables.slots
        if isinstance(tables, GroupTables) and tables.written is not None:
            slots = slots[tables.written]
            packed = [rows[tables.written] for rows in packed]
        for pages, rows in zip(pools, packed, strict=True):
            pages.flatten(0, 1).index_copy_(0, slots, rows.to(pages.dtype))

    def _check_heads(
        self, layer: int, packed: list[torch.Tensor], pools: tuple[torch.Tensor, ...]
    ) -> None:
        for role, pages, rows in zip(("key", "value"), pools, packed, strict=True):
            if rows.shape[1:] != pages.shape[2:]:
                raise ValueError(
                    f"layer {layer} has {role}s of {rows.shape[1]} heads of {rows.shape[2]}, but the cache was made "
                    f"for {pages.shape[2]} of {pages.shape[3]}; JaxkvCache does not support this model's attention"
                )
            if torch.promote_types(rows.dtype, pages.dtype) != pages.dtype:
                raise ValueError(
                    f"layer {layer} has {role}s in {rows.dtype}, which pages in {pages.dtype} would round; make the "
                    f"cache of a model in one dtype, by model.to(...)"
                )

    def _find_write(
        self, layer: int, packed: list[torch.Tensor], pools: tuple[torch.Tensor, ...]
    ) -> Callable[..., Any] | None:
        """Returns a function that launches the write kernel; `None` without one, and for a prompt that runs once."""
        if not (self.decodes or self.fixed_prompt is not None) or any(
            rows.dtype != pages.dtype for rows, pages in zip(packed, pools, strict=True)
        ):
            return None
        return write_kernel(self.tables(layer).narrow_slots, *map(fitted, packed), *pools)

    def gather(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of a layer's keys and values of all columns, [rows, kv_heads, columns, head_dim]."""
        name = self._group_of[layer].name
        if name not in self._places:
            tables = self.tables(layer)
            assert isinstance(tables, GroupTables), "a recorded step attends to pages"
            self._places[name] = tables.places(self._token_of_column)
        places = self._places[name]
        keys, values = (pool.flatten(0, 1)[places].transpose(1, 2) for pool in self.pools(layer))
        return keys, values
