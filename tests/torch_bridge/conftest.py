"""Skips this folder without torch, which its files import."""

import importlib.util

if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
    collect_ignore_glob = ["test_*.py"]
