"""The generation benchmark: it runs on any device, times every form, and records its floor."""

import math

import jax
import numpy as np
import pytest

from benchmarks import generate
from benchmarks.record import load_record
from jaxkv.models.registry import build_model

FORMS = ["loop", "step, overlapped", "step, in turn"]
SMALL = ["--shape", "tiny", "--context", "16", "--dtype", "float32", "--repeats", "3"]


def is_positive(value):
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    generate.main([*SMALL, "--batch", "1,2", "--new-tokens", "64", "--folder", str(folder)])
    assert len(list(folder.iterdir())) == 2
    return [load_record(folder / f"generate-tiny{part}.json") for part in ("", "-programs")]


@pytest.mark.slow
def test_every_form_is_timed_at_every_batch_size(records):
    rows = records[0].rows
    assert [(row["batch"], row["form"]) for row in rows] == [(n, f) for n in (1, 2) for f in FORMS]
    for row in rows:
        assert (row["context"], row["new_tokens"], row["repeats"]) == (16, 64, 3)
        timed = {name: value for name, value in row.items() if name != "form"}
        # The loop's time per token is a difference of two runs, which noise can turn negative on a busy CPU.
        noisy = {"ms_per_token", "ratio_to_floor"} if row["form"] == "loop" else set()
        assert all(math.isfinite(timed.pop(name)) for name in noisy)
        assert [name for name, value in timed.items() if not is_positive(value)] == []
        assert row["ratio_to_floor"] == row["ms_per_token"] / row["floor_ms"]
        assert ("enqueue_ms" in row) == (row["form"] != "loop")


@pytest.mark.slow
def test_the_floor_is_the_measured_one_and_the_old_one_stands_beside_it(records):
    rows = records[0].rows
    assert len({row["read_bandwidth_tb_s"] for row in rows}) == 1
    for row in rows:
        old = row["floor_ms"] * row["read_bandwidth_tb_s"] / 4.3
        assert row["floor_at_4300_gb_s_ms"] == pytest.approx(old)


@pytest.mark.slow
def test_every_program_says_what_it_took_and_holds_no_second_cache(records):
    rows = records[1].rows
    kinds = [(row["batch"], row["program"].split("(")[0]) for row in rows]
    assert kinds == [(n, kind) for n in (1, 2) for kind in ("decode", "prefill")]
    for row in rows:
        assert all(is_positive(row[name]) for name in ("compile_seconds", "temp_bytes"))
        assert row["alias_bytes"] == row["cache_bytes"] > 0
        assert row["loaded_from_cache"] in (True, False)


def test_a_decode_step_reads_the_weights_but_one_embedding_and_every_key_and_value():
    """Counted by hand: 2 layers of 2 heads of 16 numbers, twice, 4 bytes each, for 3 x (10 + 4 / 2) tokens."""
    config = generate.SHAPES["tiny"]
    params = build_model(config).init_params(jax.random.key(0), np.float32)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - 256 * 64 * 4
    setting = generate.Setting(batch=3, context=10, new_tokens=4, repeats=1)
    counted = generate.decode_bytes(config, params, setting, 4)
    assert counted == weights + 3 * 12 * (2 * 2 * 16 * 2 * 4)


def test_one_new_token_is_refused_for_there_is_no_step_after_it(capsys):
    with pytest.raises(SystemExit):
        generate.main([*SMALL, "--new-tokens", "1"])
    message = capsys.readouterr().err
    assert "--new-tokens must be at least 2" in message
    assert "got 1" in message
