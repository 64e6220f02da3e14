"""Cache capacity by format: bytes per token and per sequence, and sequences that fit into a memory budget.

    python -m benchmarks.capacity
    python -m benchmarks.capacity --budget-gib 60 --context 4096,131072

The numbers are computed from the cache layouts, without a GPU. Pages are counted whole. State and sampling groups are
included. Window groups include the tokens of the engine's steps in flight. Each row is compared with the same model
with plain bfloat16 pages of keys and values in every layer.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import RECORDS, load_record, save_record
from benchmarks.report import render
from jaxkv.cache.budget import Budget, bytes_per_sequence, plan_budget
from jaxkv.cache.spec import CacheLayout, PagedSpec, StateSpec, group_layers
from jaxkv.cache.variants import dsa, gqa, mamba2, mla, place, sampling, window
from jaxkv.config.engine import EngineConfig
from jaxkv.config.sampling import MAX_BIAS_ENTRIES

PAGE = 64
_PAGES: dict[str, Any] = {"dtype": "bfloat16", "page_size": PAGE}
_MOST_SEQUENCES = 2**16


@dataclass(frozen=True)
class Case:
    """A model and one cache format.

    Attributes:
        variant: name of the format.
        model: name of the model whose sizes are used.
        vocab_size: size of its vocabulary, which determines the sampling group.
        specs: cache specs of its layers.
        plain: cache specs of its layers with plain pages; `None` if `specs` are plain.
    """

    variant: str
    model: str
    vocab_size: int
    specs: tuple[PagedSpec | StateSpec, ...]
    plain: tuple[PagedSpec | StateSpec, ...] | None = None

    def layout(self, specs: tuple[PagedSpec | StateSpec, ...]) -> CacheLayout:
        """Returns the cache layout, with the sampling group of an `LLM`."""
        choice = sampling(self.vocab_size, penalties=True, bias_entries=MAX_BIAS_ENTRIES)
        return group_layers(place([*specs, choice]))


def _llama(**options: Any) -> tuple[PagedSpec, ...]:  # noqa: ANN401 - the options of gqa
    return (gqa(8, 128, **_PAGES, **options),) * 32


_GEMMA = gqa(8, 256, **_PAGES)
_GEMMA_WINDOW = window(8, 256, window=1024, **_PAGES)
# 128 heads with keys of 192 and values of 128 components take as many bytes as 160 components of both.
_DEEPSEEK = (gqa(128, 160, **_PAGES),) * 61
_GRANITE = gqa(8, 64, **_PAGES)
_GRANITE_MAMBA = mamba2(
    heads=64, head_dim=64, d_state=128, d_conv=4, groups=1, dtype="bfloat16", chunk_size=256
)

CASES = (
    Case("pages, bfloat16", "Llama-3.1-8B", 128256, _llama()),
    Case("pages, fp8", "Llama-3.1-8B", 128256, _llama(quantised="fp8"), _llama()),
    Case("pages, int8", "Llama-3.1-8B", 128256, _llama(quantised="int8"), _llama()),
    Case(
        "windows of 1024 in 5 of 6 layers",
        "Gemma-3-12B",
        262208,
        tuple(_GEMMA if layer % 6 == 5 else _GEMMA_WINDOW for layer in range(48)),
        (_GEMMA,) * 48,
    ),
    Case("MLA, bfloat16", "DeepSeek-V3", 129280, (mla(512, 64, **_PAGES),) * 61, _DEEPSEEK),
    Case(
        "DSA, 656 + 132 bytes",
        "DeepSeek-V3.2",
        129280,
        (dsa(512, 64, 128, page_size=PAGE),) * 61,
        _DEEPSEEK,
    ),
    Case(
        "Mamba-2 in 36 of 40 layers",
        "Granite-4.0-H-Micro",
        100352,
        tuple(_GRANITE if layer % 10 == 5 else _GRANITE_MAMBA for layer in range(40)),
        (_GRANITE,) * 40,
    ),
)


def most_sequences(layout: CacheLayout, budget_bytes: int, context: int, ahead: int) -> int:
    """Returns how many sequences of `context` tokens fit at once; 0 if none fits."""

    def fits(count: int) -> bool:
        try:
            plan = _plan(layout, budget_bytes, count, context, ahead)
        except ValueError:
            return False
        return plan.num_sequences >= count

    low, high = 0, _MOST_SEQUENCES
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _plan(
    layout: CacheLayout, budget_bytes: int | None, sequences: int, context: int, ahead: int
) -> Budget:
    sizes = {"max_sequences": sequences, "max_tokens": context}
    return plan_budget(layout, budget_bytes, **sizes, ahead=ahead)


def measure(budget_bytes: int, contexts: Sequence[int]) -> list[dict[str, Any]]:
    """Returns a row for each case and context."""
    ahead = 2 * EngineConfig().token_budget
    rows = []
    for context in contexts:
        for case in CASES:
            layout, plain = case.layout(case.specs), case.layout(case.plain or case.specs)
            held, held_plain = (_held(one, context, ahead) for one in (layout, plain))
            count = most_sequences(layout, budget_bytes, context, ahead)
            most = most_sequences(plain, budget_bytes, context, ahead)
            rows.append(
                {
                    "variant": case.variant,
                    "model": case.model,
                    "context_tokens": context,
                    "budget_gib": budget_bytes / 2**30,
                    "bytes_per_token": round(held / context),
                    "plain_bytes_per_token": round(held_plain / context),
                    "sequence_mib": held / 2**20,
                    "sequences": count,
                    "plain_sequences": most,
                    "times_plain": count / most if most else None,
                }
            )
    return rows


def _held(layout: CacheLayout, context: int, ahead: int) -> int:
    """Returns the bytes of one sequence at the end of its context, without the sampling group."""
    groups = [group for group in layout.groups if not group.in_place]
    return sum(bytes_per_sequence(group, context, ahead) for group in groups)


def main(arguments: Sequence[str] | None = None) -> None:
    """Computes, prints and records the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--budget-gib", type=float, default=100.0, help="memory for the cache")
    parser.add_argument("--context", default="8192,65536", help="tokens of every sequence")
    parser.add_argument("--folder", type=Path, default=RECORDS, help="where the record goes")
    options = parser.parse_args(arguments)
    contexts = [int(part) for part in options.context.split(",")]
    rows = measure(int(options.budget_gib * 2**30), contexts)
    path = save_record("capacity", rows, folder=options.folder)
    print(render(load_record(path)))


if __name__ == "__main__":
    main()
