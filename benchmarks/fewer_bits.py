"""Measures the perplexity of a model with its weights plain and rounded to 8 and 4 bits, without calibration.

    python -m benchmarks.fewer_bits [--model path/to/directory]

The texts are those files of the Python standard library that the package's model was not trained on, cut to windows of
equal length, of which every token after the first counts. Record: fewer-bits-NAME.
"""

import argparse
import math
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from jaxkv import LLM, default_model
from jaxkv.examples.python_text import is_held_out, read_sources

FORMS = tuple(("float32", form) for form in (None, "fp8", "int8", "int4")) + tuple(
    ("bfloat16", form) for form in (None, "fp8", "int8")
)
"""(dtype to compute in, `quantization`). With float32 rounding weights is all that differs; with bfloat16 fp8 rounds
activations too."""


def held_out_windows(llm: LLM, source: Path, count: int, tokens: int) -> list[list[int]]:
    """Returns windows of the held-out files' tokens."""
    if llm.tokenizer is None:
        raise ValueError("the model has no tokenizer, which turns the texts into tokens")
    texts = [text for name, text in read_sources(source).items() if is_held_out(name)]
    stream = np.concatenate([np.asarray(llm.tokenizer.encode(text)) for text in texts])
    return [
        [int(token) for token in stream[begin : begin + tokens]]
        for begin in range(0, min(count * tokens, len(stream) - tokens), tokens)
    ]


def measure(
    model: Path | None, dtype: str, quantization: str | None, source: Path, count: int, tokens: int
) -> dict[str, Any]:
    """Returns the row of one form of the weights."""
    with LLM(
        model,
        dtype=dtype,
        quantization=quantization,
        max_model_len=tokens + 1,
        max_num_seqs=1,
        progress=False,
    ) as llm:
        scores = np.concatenate(llm.score(held_out_windows(llm, source, count, tokens)))
        projections = [size for form, size in llm.stats().weights.items() if form != dtype]
    loss = -float(scores.astype(np.float64).mean())
    return {
        "weights": quantization or "as trained",
        "dtype": dtype,
        "tokens": len(scores),
        "loss, nats": round(loss, 4),
        "perplexity": round(math.exp(loss), 3),
        "bytes of rounded weights": sum(projections) or None,
    }


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a model directory (default: the package's)")
    parser.add_argument("--windows", type=int, default=64, help="most windows")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a window")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where records are written")
    options = parser.parse_args()
    source = Path(sysconfig.get_paths()["stdlib"])
    rows = [
        measure(options.model, dtype, form, source, options.windows, options.tokens)
        for dtype, form in FORMS
    ]
    name = (options.model or default_model.path()).resolve().name.replace("_", "-")
    path = save_record(f"fewer-bits-{name}", rows, folder=options.folder)
    print(render(load_record(path)))


if __name__ == "__main__":
    main()
