"""`PromptInputs`: the tensors at fixed addresses from which a recorded packed prompt reads everything that changes.

Ids and positions are copied on the device. The host uploads lengths, slots and page tables, which are new for each
prompt. Tiles of queries, which the attention kernel needs, are planned before each replay, since JAX computes them.
"""

from collections.abc import Sequence as Rows

import jax
import numpy as np
import torch

from jaxkv.cache.page_allocator import PageAllocator
from jaxkv.cache.spec import CacheLayout
from torch_bridge.graphs.decode_inputs import ALIGNMENT, pinned
from torch_bridge.ops.calls import call, hand_out
from torch_bridge.ops.direct import Plan
from torch_bridge.sharing.dlpack import from_torch
from torch_bridge.transformers_cache.sequences import Sequences
from torch_bridge.transformers_cache.tables import (
    FixedGroup,
    FixedPrompt,
    FixedTables,
    GroupTables,
)


class PromptInputs:
    """Inputs of packed prompts of up to `tokens` new tokens in up to `rows` rows.

    Tokens from the number of real ones on are padding: they belong to no row and have a slot past the last page. Rows
    from the number of real ones on have no token.

    Args:
        layout: the groups of layers, all of them paged.
        allocator: knows the pages of each row.
        rows: number of rows that are recorded.
        tokens: number of tokens that are recorded.
        device: torch's device.

    Attributes:
        ids, positions: int64 [1, tokens].
        last: index of each row's last new token, int64 [rows]; 0 for a row without.
        tables: lengths, slots, page tables, and bounds of the rows' tokens.
    """

    def __init__(
        self,
        layout: CacheLayout,
        allocator: PageAllocator,
        rows: int,
        tokens: int,
        device: torch.device,
    ) -> None:
        self._groups, self._device = layout.paged_groups, device
        self._rows, self._tokens = rows, tokens
        self._totals = {one.name: allocator.pool(one.name).num_total for one in self._groups}
        self._tiles: dict[Plan, list[torch.Tensor]] = {}
        widest = max(rows + 1, tokens)
        stride = -(-widest // ALIGNMENT) * ALIGNMENT
        with torch.inference_mode(False):
            self.ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
            self.positions = torch.zeros(1, tokens, dtype=torch.int64, device=device)
            self.last = torch.zeros(rows, dtype=torch.int64, device=device)
            self._place = torch.arange(tokens, dtype=torch.int32, device=device)
            self._packed = torch.zeros(
                _LINES + len(self._groups), stride, dtype=torch.int32, device=device
            )
            page_tables = {
                name: torch.zeros(rows, total, dtype=torch.int32, device=device)
                for name, total in self._totals.items()
            }
            is_padding = torch.zeros(tokens, dtype=torch.bool, device=device)
        lengths, bounds = self._packed[0, :rows], self._packed[1, : rows + 1]
        fixed = {
            group.name: FixedGroup(page_tables[group.name], self._packed[_LINES + index, :tokens])
            for index, group in enumerate(self._groups)
        }
        self.tables = FixedTables(
            lengths, fixed, {}, FixedPrompt(bounds, is_padding, self._tiles_of)
        )

    def fill(
        self, sequences: Sequences, new: np.ndarray, ids: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Queues the copies of one prompt's inputs on torch's current stream. The host does not wait.

        Args:
            sequences: the real rows; their counts include the new tokens, whose pages are reserved.
            new: number of new tokens of each row, int [rows].
            ids: the new tokens, row after row, [new tokens], on the device.
            positions: [new tokens], on the device.
        """
        count = len(ids)
        torch._foreach_copy_([self.ids[0, :count], self.positions[0, :count]], [ids, positions])
        tables = [GroupTables(group, sequences, new) for group in self._groups]
        for group, made in zip(self._groups, tables, strict=True):
            pages = made.pages
            target = self.tables.groups[group.name].page_table[: len(pages), : pages.shape[1]]
            target.copy_(pinned(pages, self._device), non_blocking=True)
        lengths = [row.num_tokens for row in sequences.rows]
        packed = self._pack(lengths, new, tables)
        self._packed.copy_(pinned(packed, self._device), non_blocking=True)
        for plan, tiles in self._tiles.items():
            torch._foreach_copy_(tiles, self._planned(plan))

    def update_tables(self) -> None:
        """Computes what follows from the bounds of the rows, on the device; a part of the recorded work."""
        bounds, prompt = self._packed[1], self.tables.prompt
        assert prompt is not None
        self.last.copy_((bounds[1 : self._rows + 1] - 1).clamp(min=0))
        prompt.is_padding.copy_(self._place >= bounds[self._rows])

    def _pack(self, lengths: Rows[int], new: np.ndarray, tables: Rows[GroupTables]) -> np.ndarray:
        packed = np.zeros(tuple(self._packed.shape), np.int32)
        packed[0, : len(lengths)] = lengths
        total = int(new.sum())
        packed[1, 1 : self._rows + 1] = total
        packed[1, 1 : len(new) + 1] = new.cumsum()
        for line, group, made in zip(packed[_LINES:], self._groups, tables, strict=True):
            line[:] = self._totals[group.name] * group.page_size
            line[:total] = made.slots_of_new
        return packed

    def _tiles_of(self, plan: Plan) -> list[torch.Tensor]:
        """Returns a plan's results at fixed addresses, which each later `fill` computes anew."""
        if plan not in self._tiles:
            self._tiles[plan] = [one.clone() for one in self._planned(plan)]
        return self._tiles[plan]

    def _planned(self, plan: Plan) -> list[torch.Tensor]:
        prompt = self.tables.prompt
        assert prompt is not None
        arrays: list[jax.Array] = [from_torch(self.tables.seq_lens), from_torch(prompt.cu_q_lens)]
        return [hand_out(one) for one in call(plan, *arrays)]


_LINES = 2
"""Lines of the packed array before the groups' slots: lengths of rows, and bounds of their new tokens."""
