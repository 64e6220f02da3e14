"""The requests of samples whose tokens are given, so that the engine computes their log-probabilities as it decodes."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import Request
from jaxkv.engine.request_state import RequestState
from jaxkv.rollout import Rollout
from jaxkv.text.prompts import Ids, prompt_ids

Outputs = Rollout | Sequence[Sequence[Ids]]
"""A `Rollout`, or for each prompt the token ids of each of its samples."""

Sample = tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """The requests that compute the log-probabilities of given samples.

    Attributes:
        requests: for each prompt, the requests of its samples that have tokens; prompts without any are left out.
        samples: the token ids of all samples of each prompt.
        clears_prefixes: whether the prefix cache must be empty when the requests begin.
    """

    requests: list[list[Request]]
    samples: list[list[Sample]]
    clears_prefixes: bool

    def scores(self, states: Sequence[Sequence[RequestState]]) -> list[np.ndarray]:
        """Returns the log-probabilities of all samples, float32 [tokens] each, prompt by prompt.

        Args:
            states: the ended requests, as `requests`.

        Raises:
            RuntimeError: a request has failed.
        """
        ended = iter(states)
        scores = []
        for group in self.samples:
            scores += scores_of(next(ended) if any(group) else [], group)
        return scores


def given_samples(outputs: Outputs, prompts: int, vocab_size: int) -> list[list[Sample]]:
    """Returns the token ids of each prompt's samples; a sample may have none.

    Raises:
        ValueError: there are samples of another number of prompts, a prompt has none, or something is no token id.
    """
    if isinstance(outputs, Rollout):
        groups = [[one.token_ids for one in each.outputs] for each in outputs.outputs]
    elif isinstance(outputs, Sequence) and not isinstance(outputs, str | bytes):
        groups = list(outputs)
    else:
        raise ValueError(
            f"outputs must be a Rollout, or for each prompt a list of its samples' token ids, got "
            f"{type(outputs).__name__}"
        )
    if len(groups) != prompts:
        raise ValueError(f"got samples of {len(groups)} prompts for {prompts} prompts")
    return [_samples_of(group, vocab_size) for group in groups]


def by_adapter(
    options: Mapping[str, object],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    lora: str,
) -> dict[str, object]:
    """Returns the options of `score` with an adapter, which is a field of the sampling; greedy if there is none."""
    is_greedy = sampling is None and not options
    greedy: dict[str, object] = {"temperature": 0.0, "max_tokens": None}
    return {**(greedy if is_greedy else options), "lora": lora}


def given_sampling(
    sampling: Sequence[SamplingParams] | None, samples: Sequence[Sequence[Sample]]
) -> list[SamplingParams]:
    """Returns the sampling of each prompt for as many samples as are given, with log-probabilities.

    Args:
        sampling: one per prompt; `None` for greedy sampling.
        samples: the samples of each prompt.

    Raises:
        ValueError: a sample is longer than `max_tokens`, or the sampling has a grammar.
    """
    longest = [max(map(len, group)) for group in samples]
    if sampling is None:
        sampling = [SamplingParams(temperature=0.0, max_tokens=max(1, most)) for most in longest]
    for params, most in zip(sampling, longest, strict=True):
        if params.max_tokens is not None and most > params.max_tokens:
            raise ValueError(
                f"a sample of {most} tokens is longer than max_tokens={params.max_tokens} of its sampling; give the "
                "SamplingParams that it was generated with"
            )
        if params.structured_outputs is not None:
            raise ValueError(
                "the masks of structured_outputs cannot be replayed; score with SamplingParams without it, and "
                'logprobs_mode "raw" or "temperature", which do not depend on it'
            )
    return [
        # Nothing is drawn, and a seed drawn here would change those of later requests.
        replace(params, n=len(group), seed=0, logprobs=params.logprobs or 0, prompt_logprobs=None)
        for params, group in zip(sampling, samples, strict=True)
    ]


def given_requests(
    requests: Sequence[Request], samples: Sequence[Sample], salt: bytes | None
) -> list[Request]:
    """Returns the requests of one prompt with given tokens, without those of samples that have none.

    Args:
        requests: one per sample.
        samples: the token ids of each.
        salt: their pages are shared only with requests that have this one, see `replay_salt`; `None` for the salts that
            they have.
    """
    return [
        replace(
            request,
            given=sample,
            salt=request.salt if salt is None else salt + _bytes_of(request.salt),
        )
        for request, sample in zip(requests, samples, strict=True)
        if sample
    ]


def replay_salt() -> bytes:
    """Returns a salt that no other request has, so that a replay neither takes nor leaves cached prefixes."""
    return secrets.token_bytes(16)


def scores_of(states: Sequence[RequestState], samples: Sequence[Sample]) -> list[np.ndarray]:
    """Returns the log-probabilities of one prompt's samples, float32 [tokens] each.

    Args:
        states: the ended requests of those samples that have tokens.
        samples: the token ids of all samples.

    Raises:
        RuntimeError: a request has failed.
    """
    ended = iter(states)
    scores = []
    for sample in samples:
        state = next(ended) if sample else None
        if state is not None and (state.reason == "error" or len(state.logprobs) < len(sample)):
            why = state.error or f"it ended after {len(state.logprobs)} of {len(sample)} tokens"
            raise RuntimeError(f"the log-probabilities of a sample could not be computed: {why}")
        tables = [] if state is None else state.logprobs
        scores.append(
            np.asarray([one[token] for one, token in zip(tables, sample, strict=True)], np.float32)
        )
    return scores


def _samples_of(group: object, vocab_size: int) -> list[Sample]:
    if (
        not isinstance(group, Sequence | np.ndarray)
        or isinstance(group, str | bytes)
        or not len(group)
    ):
        raise ValueError(f"each prompt needs a list of one or more samples, got {group!r}")
    return [prompt_ids(ids, None, vocab_size) if len(ids) else () for ids in group]


def _bytes_of(salt: str | bytes | None) -> bytes:
    return salt.encode() if isinstance(salt, str) else salt or b""
