"""What one step is told: every runtime value as an array, so that one executable serves any lengths, slots and ids.

Shapes are those of the program (its bucket). Padding is inert by construction: padded tokens have out-of-range
write slots, padded rows have no queries and no tokens.
"""

from jaxtyping import Array, Int

from jaxkv._pytree import pytree, static_field
from jaxkv.sampling.batch import SamplingBatch


@pytree
class PagedTables:
    """Where one group of paged layers reads and writes.

    Attributes:
        page_table: page ids of each row, padded with a valid id that masking keeps unread.
        write_slots: slot (`page * page_size + offset`) of each token; token r has `num_slots + r` if it is padding, or
            is written already, in a page that others share.
    """

    page_table: Int[Array, "rows table_width"]
    write_slots: Int[Array, " tokens"]


@pytree
class StateTables:
    """Which states one group of recurrent layers reads and writes.

    Attributes:
        read_states: state each row starts from; 0 is the zero state, for fresh sequences.
        write_states: state each row ends in; padding row r has `num_states + r`.
        snapshot_ends: packed index after the last token of each state to keep on the way, ascending: a multiple of
            the layer's chunk in its row, or the row's end; padded with indices past the tokens. `None` keeps none.
        snapshot_states: where each is kept; padding i has `num_states + i`.
    """

    read_states: Int[Array, " rows"]
    write_states: Int[Array, " rows"]
    snapshot_ends: Int[Array, " snapshots"] | None = None
    snapshot_states: Int[Array, " snapshots"] | None = None


@pytree
class StepBatch:
    """One step over `rows` sequences and `tokens` new tokens, packed one sequence after the other.

    Attributes:
        tokens: ids of the new tokens.
        positions: their positions in their sequences.
        cu_q_lens: row r's tokens are `cu_q_lens[r]:cu_q_lens[r + 1]`; padding rows are empty.
        seq_lens: tokens of each row visible after this step; 0 for padding rows.
        paged: one entry per paged group, in the order of `CacheLayout.paged_groups`.
        states: one entry per recurrent group, in the order of `CacheLayout.state_groups` (the sampling
            group is not one of them).
        sampling: how the next tokens are chosen.
        decode: static; every real row has exactly one query and token r belongs to row r.
        fresh: static; promises that no row has tokens from before this step, so that nothing need be read from pages.
    """

    tokens: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    cu_q_lens: Int[Array, " row_bounds"]
    seq_lens: Int[Array, " rows"]
    paged: tuple[PagedTables, ...]
    states: tuple[StateTables, ...]
    sampling: SamplingBatch
    decode: bool = static_field(default=False)
    fresh: bool = static_field(default=False)
