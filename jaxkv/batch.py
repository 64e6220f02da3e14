"""The inputs of one step. Every runtime value is an array, so one executable serves all lengths, slots and ids.

Shapes are those of the program (its bucket). Padding has no effect: padding tokens have write slots out of range, and
padding rows have no tokens.
"""

from jaxtyping import Array, Float, Int

from jaxkv._pytree import pytree, static_field
from jaxkv.sampling.batch import SamplingBatch
from pallas_kernels.shared_keys import SharedKeys


@pytree
class PagedTables:
    """Page table and write slots of one group of paged layers.

    Attributes:
        page_table: page ids of each row, padded with a valid id whose contents are masked.
        write_slots: slot (`page * page_size + offset`) of each token. Token r has the slot `num_slots + r`, out of
            range, if it is padding, or if a shared page holds it already.
        shared: rows that begin with the same pages; `None` in programs that read each row's keys for it alone.
    """

    page_table: Int[Array, "rows table_width"]
    write_slots: Int[Array, " tokens"]
    shared: SharedKeys | None = None


@pytree
class StateTables:
    """Ids of the states that one group of recurrent layers reads and writes.

    Attributes:
        read_states: id of the state before each row's tokens; 0 is the zero state, for new sequences.
        write_states: id of the state after each row's tokens; padding row r has `num_states + r`.
        snapshot_ends: for each snapshot, the packed index after its last token, ascending. A snapshot is taken at a
            multiple of the layer's chunk within its row, or at the row's end. Padding lies past the tokens. `None` for
            steps without snapshots.
        snapshot_states: id of the state that each snapshot is written to; padding i has `num_states + i`.
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
        sampling: sampling parameters and state ids of the rows.
        hidden: the hidden state beside each token that a `DraftHead` reads; `None` for any other model.
        decode: static; every real row has exactly one query and token r belongs to row r.
        fresh: static; no row has tokens from before this step, so attention need not read pages.
    """

    tokens: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    cu_q_lens: Int[Array, " row_bounds"]
    seq_lens: Int[Array, " rows"]
    paged: tuple[PagedTables, ...]
    states: tuple[StateTables, ...]
    sampling: SamplingBatch
    hidden: Float[Array, "tokens width"] | None = None
    decode: bool = static_field(default=False)
    fresh: bool = static_field(default=False)
