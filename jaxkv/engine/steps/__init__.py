"""Steps on the host: which rows they have, how they are prepared, their sizes, and those in flight."""
