"""`Rollout`: the samples of several prompts as padded arrays, one row per sample, as trainers take them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Bool, Float, Int

from jaxkv.config.checks import as_int
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.lora.loaded_adapter import AdapterVersion
from jaxkv.engine.request import RequestOutput, SampleOutput
from jaxkv.runner.weight_version import WeightVersion
from jaxkv.step.loop import ERROR, LENGTH, STOP
from jaxkv.text.prompts import one_each

NO_EXPERT = np.iinfo(np.int16).max
"""Padding of `Rollout.routed_experts`: past every expert."""

_REASONS = {"stop": STOP, "length": LENGTH}
_FOR_ALL_OR_NONE = "prompt_logprobs must be given for all prompts of a rollout or for none"


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The samples of several prompts, prompt by prompt; if all have `n`, `reshape(prompts, n, ...)` groups them.

    Prompts are padded on the left and outputs on the right, so `concatenate([prompt_ids, output_ids], axis=1)` has each
    text in one piece. Arrays are NumPy's; `to` puts them on a device.

    Attributes:
        prompt_ids: token ids of the prompts, padded with `pad_id`.
        prompt_mask: which of these are tokens.
        output_ids: generated ids, the stop id included, padded with `pad_id`.
        output_mask: which of these are tokens.
        logprobs: log-probability of each generated token under the distribution that `SamplingParams.logprobs_mode`
            names; 0 for padding.
        prompt_logprobs: the model's log-probability of each token of the prompt; 0 for the first one and for padding.
            `None` unless `SamplingParams.prompt_logprobs` was given.
        weight_versions: version of the parameters that sampled each token, int32 with -1 for padding. If versions are
            names, they are NumPy strings, on no device, with "" for padding.
        routed_experts: experts that the routers chose for each token of the concatenated ids, best first; `NO_EXPERT`
            for padding and for the last token, which no step has computed. `None` without
            `CacheConfig(routed_experts=True)`.
        reasons: why each sample ended, as in `jaxkv.generate`: 1 at a stop id or stop string, 2 at `max_tokens`, 3 by
            an error.
        prompt_index: index of each sample's prompt.
        outputs: one per prompt, with texts, stop reasons, errors, usage and timing.
    """

    prompt_ids: Int[Any, "samples prompt_width"]
    prompt_mask: Bool[Any, "samples prompt_width"]
    output_ids: Int[Any, "samples output_width"]
    output_mask: Bool[Any, "samples output_width"]
    logprobs: Float[Any, "samples output_width"]
    prompt_logprobs: Float[Any, "samples prompt_width"] | None
    weight_versions: Any
    routed_experts: Int[Any, "samples width expert_layers top_k"] | None
    reasons: Int[Any, " samples"]
    prompt_index: Int[Any, " samples"]
    outputs: list[RequestOutput]

    @property
    def texts(self) -> list[str]:
        """The text of each sample."""
        return [sample.text for output in self.outputs for sample in output.outputs]

    @property
    def adapters(self) -> list[AdapterVersion | None]:
        """The adapter of each sample and its version (`SamplingParams.lora`); `None` for the model alone."""
        return [sample.adapter for output in self.outputs for sample in output.outputs]

    def to(self, device: jax.Device | Sharding) -> "Rollout":  # pyright: ignore[reportInvalidTypeForm]
        """Returns the same samples with all arrays but named versions on a device, or over devices by rows."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {
            name: jax.device_put(array, device)
            for name, array in arrays.items()
            if isinstance(array, np.ndarray) and array.dtype.kind != "U"
        }
        return replace(self, **moved)


def rollout_sampling(
    sampling: SamplingParams | Sequence[SamplingParams] | None, prompts: int
) -> list[SamplingParams]:
    """Returns the sampling of each prompt of a rollout, with log-probabilities.

    Raises:
        ValueError: as for `one_each`, or some prompts have `prompt_logprobs` and others not.
    """
    chosen = one_each(sampling, prompts)
    if len({one.prompt_logprobs is None for one in chosen}) > 1:
        raise ValueError(_FOR_ALL_OR_NONE)
    return [one if one.logprobs is not None else replace(one, logprobs=0) for one in chosen]


def rollout_of(
    outputs: Sequence[RequestOutput],
    *,
    prompt_width: int | None = None,
    output_width: int | None = None,
    pad_id: int = 0,
) -> Rollout:
    """Returns outputs that have log-probabilities as one `Rollout`, with arrays of NumPy.

    Args:
        outputs: one per prompt, at least one.
        prompt_width: columns of prompts; the longest prompt if not given.
        output_width: columns of outputs; the longest output if not given.
        pad_id: fills `prompt_ids` and `output_ids`.

    Raises:
        ValueError: a sample has no log-probabilities, or does not fit.
    """
    rows = [(one, sample) for one in outputs for sample in one.outputs]
    prompts = [one.prompt_token_ids for one, _ in rows]
    samples = [sample for _, sample in rows]
    tokens = [sample.token_ids for sample in samples]
    starts = column_count("prompt", list(map(len, prompts)), prompt_width)
    width = column_count("output", list(map(len, tokens)), output_width)
    prompt_mask = _lens(prompts)[:, None] >= np.arange(starts, 0, -1)
    output_mask = _lens(tokens)[:, None] > np.arange(width)
    given = any(one.prompt_logprobs is not None for one in outputs)
    return Rollout(
        prompt_ids=_padded(prompts, prompt_mask, np.int32, pad_id),
        prompt_mask=prompt_mask,
        output_ids=_padded(tokens, output_mask, np.int32, pad_id),
        output_mask=output_mask,
        logprobs=_padded(map(_logprobs, samples), output_mask, np.float32),
        prompt_logprobs=_padded([_prompt_logprobs(one) for one, _ in rows], prompt_mask, np.float32)
        if given
        else None,
        weight_versions=_versions([sample.weight_versions for sample in samples], output_mask),
        routed_experts=_experts(rows, starts, width),
        reasons=np.asarray([_REASONS.get(one.finish_reason, ERROR) for one in samples], np.int32),
        prompt_index=np.repeat(
            np.arange(len(outputs), dtype=np.int32), [len(one.outputs) for one in outputs]
        ),
        outputs=list(outputs),
    )


def column_count(what: str, lengths: Sequence[int], wanted: int | None) -> int:
    """Returns the columns that texts of these lengths get: `wanted`, or the longest if it is `None`.

    Raises:
        ValueError: one is longer than `wanted`.
    """
    longest = max(lengths)
    if wanted is None:
        return longest
    why = f"one {what} has, or may get, {longest} tokens"
    return as_int(f"{what}_width", wanted, longest, 2**31 - 1, why)


def _lens(rows: Sequence[Sequence[Any]]) -> np.ndarray:
    return np.asarray(list(map(len, rows)), np.int64)


def _padded(
    rows: Iterable[Sequence[Any]],
    mask: np.ndarray,
    dtype: Any,  # noqa: ANN401 - what NumPy takes as a dtype
    padding: Any = 0,  # noqa: ANN401 - a value of it
) -> np.ndarray:
    """Returns rows of values as one array: those of each row where its mask is True, and padding elsewhere."""
    array = np.full(mask.shape, padding, dtype)
    array[mask] = np.asarray(list(chain.from_iterable(rows)), dtype)
    return array


def _logprobs(sample: SampleOutput) -> list[float]:
    if sample.logprobs is None:
        raise ValueError(
            "a rollout needs the log-probability of each sampled token; generate with SamplingParams(logprobs=0)"
        )
    return [table[token] for token, table in zip(sample.token_ids, sample.logprobs, strict=True)]


def _prompt_logprobs(output: RequestOutput) -> list[float]:
    if output.prompt_logprobs is None:
        raise ValueError(_FOR_ALL_OR_NONE)
    columns = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [0.0 if table is None else table[token] for token, table in columns]


def _versions(rows: Sequence[Sequence[WeightVersion]], mask: np.ndarray) -> np.ndarray:
    """Returns versions as int32, or as strings if one is a name or no int32; see `_padded`."""
    limits = np.iinfo(np.int32)
    # Few versions sample many tokens.
    known = {one for row in rows for one in row}
    if all(isinstance(one, int) and limits.min <= one <= limits.max for one in known):
        return _padded(rows, mask, np.int32, -1)
    names = [[str(one) for one in row] for row in rows]
    longest = max(len(str(one)) for one in known)
    return _padded(names, mask, np.dtype(f"U{longest}"), "")


def _experts(
    rows: Sequence[tuple[RequestOutput, SampleOutput]], starts: int, width: int
) -> np.ndarray | None:
    found = [sample.routed_experts for _, sample in rows]
    known = next((experts for experts in found if experts is not None), None)
    if known is None:
        return None
    shape = (len(rows), starts + width, *known.shape[1:])
    array = np.full(shape, NO_EXPERT, np.int16)
    for (output, _), experts, row in zip(rows, found, array, strict=True):
        if experts is not None:
            begin = starts - len(output.prompt_token_ids)
            row[begin : begin + len(experts)] = experts
    return array
