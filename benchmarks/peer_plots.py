"""Draws jaxkv beside other engines and the floor, from records, as the pictures of docs/comparison.md.

python -m benchmarks.peer_plots docs/images
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grouped_bars import grouped_bars
from benchmarks.record import RECORDS, load_record
from jaxkv.bench.plots.charts import Bars
from jaxkv.bench.plots.svg import as_svg_file

SHAPES = {"8b": "llama-3.1-8b", "0.6b": "qwen3-0.6b"}
"""Suffix of a picture's name -> shape."""
VLLM, STYLE, TRANSFORMERS = "vLLM 0.26", "gpt-fast style", "Transformers"
OURS, FLOOR = "jaxkv", "floor"


def decode_chart(shape: str) -> Bars:
    """Returns a bar for each way to compute a decode step, per batch that a peer was measured at."""
    found = {row["batch"]: {VLLM: row["ms_per_step"]} for row in _of_vllm(shape, "decode")}
    for row in _rows(f"decode-peer-{shape}"):
        found.setdefault(row["batch"], {})[STYLE] = row["ms_per_step"]
    for row in _rows(f"engine-{shape}-steady"):
        if row["batch"] in found:
            found[row["batch"]] |= {OURS: row["step_ms"], FLOOR: row["floor_ms"]}
    order = (VLLM, STYLE, OURS, FLOOR)
    groups = {
        f"batch {batch}": {kind: values[kind] for kind in order if kind in values}
        for batch, values in sorted(found.items())
    }
    title = f"A decode step of the shape of {shape}, NVIDIA H200"
    return grouped_bars(title, "milliseconds per step", groups)


def throughput_chart() -> Bars:
    """Returns a bar for each engine that serves 256 requests, per shape; jaxkv's is the one beside vLLM's."""
    groups = {}
    for shape in SHAPES.values():
        [peer] = _of_vllm(shape, "throughput")
        [slow] = _rows(f"engine-{shape}-transformers")
        [alone] = _rows(f"engine-{shape}-throughput")
        floor = 100 * alone["output_tokens_per_second"] / alone["share_of_floor_percent"]
        groups[shape] = {
            TRANSFORMERS: slow["output_tokens_per_second"],
            VLLM: peer["output_tokens_per_second"],
            OURS: peer["jaxkv_output_tokens_per_second"],
            FLOOR: floor,
        }
    title = "256 requests of 100 to 1024 tokens in and out, NVIDIA H200"
    return grouped_bars(title, "output tokens per second", groups)


def charts() -> dict[str, Bars]:
    """Returns file name -> chart."""
    decode = {f"decode-{name}.svg": decode_chart(shape) for name, shape in SHAPES.items()}
    return decode | {"throughput.svg": throughput_chart()}


def _rows(name: str) -> Sequence[Mapping[str, Any]]:
    return load_record(RECORDS / f"{name}.json").rows


def _of_vllm(shape: str, what: str) -> list[Mapping[str, Any]]:
    return [row for row in _rows("peer-vllm") if (row["shape"], row["what"]) == (shape, what)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the pictures are written")
    folder = parser.parse_args(arguments).folder
    for name, chart in charts().items():
        (folder / name).write_text(as_svg_file(chart))


if __name__ == "__main__":
    main()
