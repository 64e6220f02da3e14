"""The KV cache: its layout, its memory, and the accounting of its pages and states.

Read in this order:
    spec.py: memory layout as data (arrays, groups).
    variants.py: one spec per kind of cache (GQA, sliding window, MLA, sparse MLA, Mamba-2, gated delta rule).
    pool.py, page_allocator.py: which sequence holds which page or state; plain Python on the host.
    integrity.py: checks of these records.
    state.py: the arrays on the device.
    owner.py: the owner of the arrays between two steps.
    budget.py: from bytes of memory to numbers of pages and states.
    prefix/, kept_pages/, kept_states/: the prefix index, its pages and its checkpoints of recurrent states.
"""
