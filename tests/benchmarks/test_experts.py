"""The benchmark of experts draws weights of every form, and times no wrong result."""

import jax
import numpy as np
import pytest

from benchmarks import experts
from benchmarks.few_bits_products import FORMS
from benchmarks.timing import Effort
from jaxkv.layers.mixture import mixture_of_experts
from pallas_kernels.formats.few_bits import FewBits

QUICK = Effort(rounds=1, trials=1, seconds=0.0)


@pytest.mark.parametrize("form", [None, *FORMS])
def test_products_of_drawn_experts_have_magnitudes_around_one(form):
    weight = experts.draw_experts(jax.random.key(0), (2, 32, 256), form)
    wide = np.asarray(weight.widened() if isinstance(weight, FewBits) else weight, np.float64)
    assert wide.shape == (2, 32, 256)
    assert 0.1 < np.sqrt(np.mean(np.sum(wide**2, axis=-1))) < 10


# Experts in every form are drawn in the test above, and timed alike.
@pytest.mark.parametrize("name", ["tiny", pytest.param("tiny-mxfp4", marks=pytest.mark.slow)])
def test_a_layer_is_timed_in_the_way_that_runs_here(name):
    row = experts.measure(name, 2, QUICK)
    assert row["us_plain"] > 0
    assert row["us_grouped"] is row["us_gathered"] is None
    assert 2 <= row["experts_asked"] <= 4


@pytest.mark.parametrize("way", ["gathered", "grouped"])
def test_a_wrong_result_is_an_error(monkeypatch, way):
    def wrong(params, x, *, grouped, gathered="xla", **options):
        is_wrong = (grouped if way == "grouped" else gathered) == "mosaic_gpu"
        return mixture_of_experts(params, x, **options) * (2.0 if is_wrong else 1.0)

    monkeypatch.setattr(experts, "mixture_of_experts", wrong)
    with pytest.raises(RuntimeError, match=f"the results of tiny, {way}, differ by"):
        experts.measure("tiny", 2, QUICK)
