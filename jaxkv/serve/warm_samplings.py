"""`WARM_SAMPLINGS`: the kinds of sampling that `jaxkv serve --warm-up` compiles programs for."""

from collections.abc import Mapping
from types import MappingProxyType

from jaxkv.config.sampling import SamplingParams

WARM_SAMPLINGS: Mapping[str, SamplingParams] = MappingProxyType(
    {
        "greedy": SamplingParams(temperature=0.0),
        "drawn": SamplingParams(temperature=1.0),
        "filtered": SamplingParams(temperature=1.0, top_p=0.9),
    }
)
"""Name -> example of requests that need programs of their own: greedy ones, those that draw, those with filters."""
