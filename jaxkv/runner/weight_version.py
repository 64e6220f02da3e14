"""`WeightVersion`: the name of one set of parameters."""

WeightVersion = int | str
"""A number that counts updates, or a name that the trainer gives."""
