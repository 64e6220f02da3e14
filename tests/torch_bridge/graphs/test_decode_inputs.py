"""The fixed inputs of recorded steps hold, step after step, what an ordinary step makes from the rows."""

import numpy as np
import pytest
import torch

from jaxkv.cache.spec import group_layers
from jaxkv.cache.variants import gqa, place, window
from torch_bridge import lease
from torch_bridge.graphs.decode_inputs import DecodeInputs
from torch_bridge.transformers_cache.sequences import Sequences, Unread
from torch_bridge.transformers_cache.store import Store
from torch_bridge.transformers_cache.tables import GroupTables

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
ROOM = 4


def step(sequences, real):
    """Appends columns and commits them; returns the new tokens of each row."""
    with lease(sequences.store.owner) as views:
        sequences.grow(real, views)
        views.commit()
    sequences.commit(Unread(None, None, real, sequences.num_columns - real.shape[1]))
    return real.sum(axis=1)


@pytest.mark.parametrize("seed", range(3))
def test_they_follow_steps_forks_chunks_tokens_taken_back_and_fewer_rows(seed):
    random = np.random.default_rng(seed)
    options = {"dtype": "float32", "page_size": 2}
    layout = group_layers(place([gqa(1, 2, **options), window(1, 2, window=4, **options)]))
    store = Store(layout, {group.name: 300 for group in layout.groups}, CPU)
    inputs = DecodeInputs(layout, store.allocator, ROOM, CPU)
    sequences = Sequences(store)
    for number in range(60):
        chosen = random.integers(8)
        if not sequences.rows or chosen == 0:
            sequences.release()
            rows = int(random.integers(1, ROOM + 1))
            sequences.open_rows([None] * rows, np.zeros((rows, 0), bool), 0)
            step(sequences, random.random((rows, 5)) < 0.7)
        elif chosen == 1:
            step(sequences, random.random((len(sequences.rows), 3)) < 0.5)
        elif chosen == 2:
            kept, sequences = sequences, sequences.fork()
            if random.random() < 0.5:
                kept.release()
        elif chosen == 3:
            sequences.reorder(random.integers(len(sequences.rows), size=ROOM).tolist())
        elif chosen == 5:
            # As many tokens as were taken back, and other pages.
            back = int(random.integers(1, 6))
            kept = sequences.fork()
            sequences.crop(back)
            step(sequences, np.ones((len(sequences.rows), back), bool))
            kept.release()
        rows = len(sequences.rows)
        new = step(sequences, np.ones((rows, 1), bool))
        if chosen == 4:
            continue  # An ordinary forward ran.
        ids = torch.from_numpy(random.integers(9, size=(rows, 1)))
        positions = torch.full((1 if chosen == 6 else rows, 1), number)
        inputs.fill(sequences.rows, ids, positions)
        inputs.update_tables()
        assert torch.equal(inputs.ids[:rows], ids)
        assert (inputs.positions[:rows] == number).all()
        lengths = [row.num_tokens for row in sequences.rows]
        assert inputs.tables.seq_lens.tolist() == lengths + [0] * (ROOM - rows)
        for group in layout.groups:
            fixed, wanted = inputs.tables.groups[group.name], GroupTables(group, sequences, new)
            past = 300 * group.page_size
            assert fixed.narrow_slots.tolist() == wanted.slots.tolist() + [past] * (ROOM - rows)
            assert fixed.slots.dtype == torch.int64
            for row, length in enumerate(lengths):
                used = -(-length // group.page_size)
                assert torch.equal(fixed.page_table[row, :used], wanted.page_table[row, :used])
