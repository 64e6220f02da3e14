"""The table of all sampling parameters that a step reads.

The packed layout, the row table, `SamplingBatch`, `jaxkv.generate` and the features of a request are derived from
`FIELDS`. A new parameter needs an attribute of `SamplingParams`, a row of this table, and its use in
`jaxkv.sampling.sample`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, runtime_checkable

import numpy as np

from jaxkv.config.sampling import (
    LOGPROBS_MODES,
    MAX_EOS_IDS,
    MAX_LOGPROBS,
    MAX_STOP_IDS,
    SamplingParams,
)
from jaxkv.sampling.features import Features, union

LOGPROB_SIZES = (0, 5, MAX_LOGPROBS)
"""Numbers of most likely tokens that programs report; the host drops those that a request did not ask for."""

STOP_WIDTH = MAX_STOP_IDS + MAX_EOS_IDS
"""Most stop ids of a row: the request's own and the model's EOS ids."""

NO_TOKEN = 2**30
"""Padding of stop ids and given tokens: beyond every vocabulary, so no token equals it; writes to it are dropped."""


@runtime_checkable
class RequestSampling(Protocol):
    """The sampling part of a `Request`, which is all that the table reads."""

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters."""
        ...

    @property
    def seed(self) -> int:
        """64-bit seed of this sample's random numbers."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end the request, the model's EOS ids included."""
        ...

    @property
    def adapter_slot(self) -> int:
        """1 + the index of its adapter in the stack of adapters; 0 for none."""
        ...


@dataclass(frozen=True)
class SamplingField:
    """One parameter as the device reads it: a column with one number, or `width` numbers, per row.

    Attributes:
        name: name of the column in the packed array and in `SamplingBatch`.
        dtype: dtype of the column, `np.int32` or `np.float32`.
        feature: the attribute of `Features` that a program needs to read the column.
        read: returns the number, or up to `width` numbers, of one request.
        off: the value without effect, also used as padding.
        width: numbers per row; 0 for a single number.
    """

    name: str
    dtype: type
    feature: str
    read: Callable[[RequestSampling], int | float | Sequence[int]]
    off: int | float = 0
    width: int = 0

    def shape(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of the column for `rows` rows."""
        return (rows, self.width) if self.width else (rows,)

    def column(self, requests: Sequence[RequestSampling]) -> np.ndarray:
        """Returns the column of several requests.

        Raises:
            ValueError: a request has more values than `width`.
        """
        values = np.full(self.shape(len(requests)), self.off, self.dtype)
        for row, request in enumerate(requests):
            self.write(values, row, request)
        return values

    def write(self, column: np.ndarray, row: int, request: RequestSampling) -> None:
        """Writes one request's value into its row of a column.

        Raises:
            ValueError: the request has more values than `width`.
        """
        value = self.read(request)
        if not self.width:
            column[row] = value
            return
        assert isinstance(value, Sequence)
        if len(value) > self.width:
            what = self.name.replace("_", " ")
            raise ValueError(f"a request has {len(value)} {what}, at most {self.width} fit")
        column[row] = self.off
        column[row, : len(value)] = value


def _attribute(
    name: str, attribute: str, dtype: type, feature: str, off: int | float = 0
) -> SamplingField:
    """Returns the field of a single number that is an attribute of `SamplingParams`."""
    return SamplingField(name, dtype, feature, lambda one: getattr(one.params, attribute), off)


_INT, _FLOAT = np.int32, np.float32

FIELDS = (
    SamplingField("seed_low", _INT, "draws", lambda one: split_seed(one.seed)[0]),
    SamplingField("seed_high", _INT, "draws", lambda one: split_seed(one.seed)[1]),
    _attribute("temperature", "temperature", _FLOAT, "draws"),
    _attribute("top_k", "top_k", _INT, "filters"),
    _attribute("top_p", "top_p", _FLOAT, "filters", off=1.0),
    _attribute("min_p", "min_p", _FLOAT, "filters"),
    _attribute("repetition", "repetition_penalty", _FLOAT, "penalties", off=1.0),
    _attribute("presence", "presence_penalty", _FLOAT, "penalties"),
    _attribute("frequency", "frequency_penalty", _FLOAT, "penalties"),
    SamplingField(
        "processed", _INT, "processors", lambda one: int(bool(one.params.logits_processors))
    ),
    SamplingField(
        "logprobs_mode",
        _INT,
        "logprobs_modes",
        lambda one: LOGPROBS_MODES.index(one.params.logprobs_mode),
    ),
    SamplingField("adapter_slot", _INT, "lora", lambda one: one.adapter_slot),
    SamplingField("stop_ids", _INT, "min_tokens", lambda one: one.stop_ids, NO_TOKEN, STOP_WIDTH),
)


def fields_for(features: Features) -> tuple[SamplingField, ...]:
    """Returns the fields that a program with these features reads, in the table's order."""
    return tuple(field for field in FIELDS if getattr(features, field.feature))


def split_seed(seed: int) -> tuple[int, int]:
    """Returns the low and high halves of a 64-bit seed as int32 values; higher bits are dropped."""
    low, high = np.asarray([seed & 0xFFFFFFFFFFFFFFFF], "<u8").view("<i4").tolist()
    return low, high


def features_of(requests: Iterable[RequestSampling]) -> Features:
    """Returns the smallest features that cover all of these requests."""
    return union([features_for(request.params) for request in requests])


def features_for(params: SamplingParams) -> Features:
    """Returns the features that one request needs."""
    draws = params.temperature > 0
    return _one_object(
        Features(
            draws=draws,
            filters=draws and _uses(params, "filters"),
            penalties=_uses(params, "penalties") or bool(params.logit_bias),
            min_tokens=params.min_tokens > 0,
            grammar=params.structured_outputs is not None,
            processors=bool(params.logits_processors),
            logprobs=None if params.logprobs is None else logprobs_size(params.logprobs),
            logprobs_modes=params.logprobs is not None and _uses(params, "logprobs_modes"),
            lora=params.lora is not None,
        )
    )


def logprobs_size(top: int) -> int:
    """Returns how many most likely tokens a program reports for a request of `top`: few sizes, so few programs."""
    return next(size for size in LOGPROB_SIZES if size >= top)


@dataclass(frozen=True)
class FixedSampling:
    """A `RequestSampling` that belongs to no request."""

    params: SamplingParams
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    adapter_slot: int = 0


def _uses(params: SamplingParams, feature: str) -> bool:
    """Returns whether a request sets one of a feature's fields to a value with an effect."""
    request = FixedSampling(params)
    return any(field.read(request) != field.off for field in FIELDS if field.feature == feature)


@cache
def _one_object(features: Features) -> Features:
    """Returns one object for equal features, so that comparisons over many rows are fast."""
    return features
