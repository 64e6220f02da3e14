"""Measures how near log-probabilities of a published model are to float32, for each format of the cache.

    python -m benchmarks.accuracy --model path/to/directory

The texts are this repository's documents. The reference is Transformers in float32, without TF32. Transformers in
bfloat16 is measured for comparison. An error is the absolute difference of one token's log-probability, in nats, given
the tokens before it. Record: accuracy-NAME, with the directory's name.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from jaxkv import LLM, CacheConfig
from jaxkv.text.tokenizer import load_tokenizer
from pallas_kernels.dispatch import Unsupported

Row = dict[str, Any]

CACHES = ("auto", "int8", "fp8")
ROOT = Path(__file__).parent.parent


def make_texts(folder: Path, count: int, tokens: int) -> list[list[int]]:
    """Returns the ids of the first tokens of several documents."""
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ValueError(f"{folder} has no tokenizer, which turns the documents into tokens")
    paths = [*sorted((ROOT / "docs" / "how-to").glob("*.md")), *sorted(ROOT.glob("*.md"))]
    return [list(tokenizer.encode(path.read_text()))[:tokens] for path in paths[:count]]


def score_with_transformers(folder: Path, dtype: str, texts: Sequence[list[int]]) -> np.ndarray:
    """Returns the log-probability of every token after the first of each text, in float64, one after the other."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    place = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model = model.eval().to(place)
    scores = []
    with torch.no_grad():
        for ids in texts:
            logits = model(torch.tensor([ids], device=place)).logits[0, :-1]
            every = torch.log_softmax(logits.double(), -1)
            chosen = every[torch.arange(len(ids) - 1), torch.tensor(ids[1:], device=place)]
            scores.append(chosen.cpu().numpy())
    return np.concatenate(scores)


def score_with_jaxkv(
    folder: Path, cache: str, texts: Sequence[list[int]]
) -> tuple[str, np.ndarray]:
    """Returns the implementation that ran, and log-probabilities in the form of `score_with_transformers`."""
    options = CacheConfig(dtype=cache, max_sequences=4)
    with LLM(
        folder,
        dtype="bfloat16",
        max_model_len=max(map(len, texts)) + 1,
        cache=options,
        progress=False,
    ) as llm:
        scores = llm.score(texts)
        return str(llm.stats().implementation), np.concatenate(scores).astype(np.float64)


def compare(name: str, got: np.ndarray, wanted: np.ndarray) -> Row:
    """Returns the row of one way to compute the scores."""
    errors = np.abs(got - wanted)
    return {
        "computed by": name,
        "tokens": len(errors),
        "mean error": round(float(errors.mean()), 4),
        "rms error": round(float(np.sqrt(np.mean(errors**2))), 4),
        "99th percentile": round(float(np.quantile(errors, 0.99)), 4),
        "largest": round(float(errors.max()), 3),
    }


def measure(folder: Path, count: int, tokens: int) -> list[Row]:
    """Returns a row for Transformers in bfloat16 and one for each format of our cache."""
    texts = make_texts(folder, count, tokens)
    wanted = score_with_transformers(folder, "float32", texts)
    theirs = score_with_transformers(folder, "bfloat16", texts)
    rows = [compare("Transformers, bfloat16", theirs, wanted)]
    for cache in CACHES:
        label = "bfloat16" if cache == "auto" else cache
        try:
            ran, ours = score_with_jaxkv(folder, cache, texts)
        except Unsupported as error:
            rows.append({"computed by": f"jaxkv, {label} cache", "refused": str(error)})
            continue
        rows.append(compare(f"jaxkv, {label} cache ({ran.split(',')[0]})", ours, wanted))
    return rows


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face model directory")
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of a text")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where records are written")
    options = parser.parse_args()
    rows = measure(options.model, options.texts, options.tokens)
    name = f"accuracy-{options.model.resolve().name}"
    path = save_record(name, rows, folder=options.folder)
    print(render(load_record(path)))


if __name__ == "__main__":
    main()
