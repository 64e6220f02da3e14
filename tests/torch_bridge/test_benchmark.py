"""The benchmark of the bridge runs, and its rows name what they measure."""

import pytest

from benchmarks import bridge
from benchmarks.record import load_record

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_each_part_saves_a_record(tmp_path):
    sizes = ["--settings", "2x32", "--layers", "1", "--new-tokens", "3"]
    bridge.main([*sizes, "--record", "bridge", "--folder", str(tmp_path)])
    leases, calls, generation, hybrid, turns = (
        load_record(tmp_path / f"bridge-{part}.json").rows for part in bridge.PARTS
    )
    assert [row["arrays"] for row in leases] == [2, 2, 8, 8, 64, 64, 1, 1, 1]
    names = {"from torch", "from torch, through XLA", "from JAX", "torch SDPA"}
    assert {row["call"] for row in calls} == names
    assert {row["tokens_as_dynamic"] for row in (*generation, *hybrid)} == {1.0}
    assert [row["cache"] for row in hybrid] == [row["cache"] for row in generation]
    # Four of 32 tokens were not in the turn before; the pages of the llama have 16.
    kept = {
        (row["model"], row["kept"]): row.get("tokens_computed") for row in turns[1:3] + turns[6:8]
    }
    assert kept == {("llama", 0): 64, ("llama", 28): 32, ("hybrid", 0): 64, ("hybrid", 28): 8}
    assert len(turns) == 2 * 5
    assert all(row["us"] > 0 for row in leases)


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="no such part"):
        bridge.main(["--part", "everything"])
