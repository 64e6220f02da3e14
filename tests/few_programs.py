"""Engines that compile few programs, for tests of which no one depends on the sizes of programs."""


def few_programs(engine, tokens=64):
    """Lets steps that generate have one size, and steps of up to `tokens` tokens with prompts another; returns it.

    What engines choose among all sizes is in tests/runner/test_step_shapes.py and tests/engine/test_simulated.py.

    Args:
        engine: an `Engine`, or an `LLM` or `AsyncLLM` that has one.
        tokens: of the smallest program of prompts.
    """
    shapes = getattr(engine, "engine", engine).shapes
    shapes.decode_rows = shapes.decode_rows[-1:]
    enough = tuple(size for size in shapes.token_buckets if size >= tokens)
    shapes.token_buckets = enough or shapes.token_buckets[-1:]
    return engine
