"""What is remembered, and where: the lowest layer.

Read `spec.py` first (memory as data), then `variants.py` (one spec per way of remembering), `pool.py` and
`page_allocator.py` (who holds which ids, on the host), `state.py` (the arrays, on the device) and `owner.py`
(the one live cache). `budget.py` turns bytes into counts.
"""
