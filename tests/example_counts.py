"""How many examples Hypothesis tries where each takes long."""

import os


def examples(count):
    """Returns `count` in `make test-all`, which compiles as users do, and a third of it in `make test`."""
    return count if os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "0" else -(-count // 3)
