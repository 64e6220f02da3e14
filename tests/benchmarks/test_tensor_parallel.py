"""The benchmark of several devices runs each number of them and records its measurements."""

import pytest

from benchmarks import tensor_parallel
from benchmarks.record import load_record
from tests.devices import needs_devices

pytestmark = needs_devices(2)


@pytest.mark.slow
def test_a_record_has_every_number_of_devices_of_every_batch(tmp_path):
    sizes = ["--shape", "tiny", "--batch", "1,2", "--context", "16", "--new-tokens", "3"]
    options = ["--devices", "1,2", "--repeats", "1", "--folder", str(tmp_path)]
    tensor_parallel.main([*sizes, *options])
    rows = load_record(tmp_path / "tensor-parallel-tiny.json").rows
    assert [(row["batch"], row["devices"]) for row in rows] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    for alone, both in zip(rows[:2], rows[2:], strict=True):
        assert both["speedup"] == pytest.approx(alone["ms_per_token"] / both["ms_per_token"])
        assert both["us_per_sum"] > 0
