"""The engine's side of the host tier: its making, and prefixes that are swapped in before a request needs them."""
