"""Leaves this folder out where there is no torch: its files import it."""

import importlib.util

if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
    collect_ignore_glob = ["test_*.py"]
