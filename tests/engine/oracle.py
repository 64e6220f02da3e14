"""The expected tokens of requests, from `jaxkv.generate`: one executable over static rows, without engine or pages."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.generation import ERROR, LENGTH, STOP, generate

REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error"}


@dataclass(frozen=True)
class Finished:
    """What one request produced: ids, why it ended, and per token the log-probabilities it asked for."""

    token_ids: tuple[int, ...]
    reason: str
    logprobs: tuple[dict[int, float], ...] | None


def generated(model, params, requests, *, rows):
    """Returns the answer to each request; all batches are padded to one length and `rows`, so few programs serve."""
    answers = []
    for first in range(0, len(requests), rows):
        batch = list(requests[first : first + rows])
        filled = batch + batch[-1:] * (rows - len(batch))
        prompts = np.zeros((rows, model.max_positions), np.int32)
        for row, request in enumerate(filled):
            prompts[row, : len(request.prompt)] = request.prompt
        wishes = [
            replace(one.params, n=1, seed=one.seed, stop_token_ids=one.stop_ids, ignore_eos=True)
            for one in filled
        ]
        lens = jnp.asarray([len(one.prompt) for one in filled], jnp.int32)
        out = generate(params, model, prompts, prompt_lens=lens, sampling=wishes)
        out = jax.device_get(out)
        answers += [_finished(out, row, request) for row, request in enumerate(batch)]
    return answers


def _finished(out, row, request):
    ids = tuple(out.tokens[row, : out.lengths[row]].tolist())
    top, told = request.params.logprobs, None
    if top is not None:
        told = tuple(
            dict(zip(likely[:top].tolist(), values[:top].tolist(), strict=True)) | {token: chosen}
            for token, chosen, likely, values in zip(
                ids,
                out.logprobs[row].tolist(),
                out.top_ids[row],
                out.top_logprobs[row],
                strict=False,
            )
        )
    return Finished(ids, REASONS[int(out.reasons[row])], told)
