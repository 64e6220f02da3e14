"""Random requests for a simulated device, their expected tokens, and random faults."""

from collections import namedtuple
from functools import wraps

import jax
import numpy as np

from jaxkv import default_model
from jaxkv.config.sampling import SamplingParams
from jaxkv.config.structured_outputs import StructuredOutputs
from jaxkv.engine.request import Request
from jaxkv.errors import CachePoisoned
from jaxkv.text.text_stream import TextStream
from jaxkv.text.tokenizer import load_tokenizer
from tests.engine.simulated_grammar import allowed_after, grammar_of
from tests.engine.simulated_text import VOCAB, chains_of, choose, is_finite, link, weigh

LONGEST = 64
TOKENIZER = load_tokenizer(default_model.path())
WISHES = (
    ({},),
    ({"logprobs": 2},),
    ({}, {"temperature": 0.7}),
    (
        {},
        {"presence_penalty": 0.5, "temperature": 0.7, "logprobs": 0},
        {"logit_bias": {3: 1.0, 17: -4.0}},
    ),
    ({}, {"min_tokens": 5}),
    ({"min_tokens": 3, "presence_penalty": 0.5}, {}),
)
"""What the requests of one engine ask for; each takes one."""

GRAMMAR = {"structured_outputs": StructuredOutputs(regex="made by simulated_grammar")}
WISHES_WITH_GRAMMARS = (
    (GRAMMAR,),
    (GRAMMAR, {}),
    (GRAMMAR | {"temperature": 0.7}, {"temperature": 0.7, "logprobs": 0}),
    (GRAMMAR | {"logprobs": 2}, {}),
    (GRAMMAR | {"min_tokens": 5}, GRAMMAR),
    (GRAMMAR | {"presence_penalty": 0.5}, GRAMMAR | {"logit_bias": {3: 1.0, 17: float("-inf")}}),
)

Answer = namedtuple("Answer", ("token_ids", "reason", "logprobs"))


def groups_of_requests(draw, count, wishes=WISHES):
    """Returns so many lists of samples of one prompt; many prompts begin alike, and all fit into `LONGEST`."""
    stems = [[draw.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    wishes = draw.choice(wishes)
    return [_samples(draw, stems, wishes) for _ in range(count)]


def _samples(draw, stems, wishes):
    prompt = draw.choice(stems)[: draw.choice((0, 3, 8, 9, 16, 17, 30, 32, 40))]
    prompt += [draw.randrange(VOCAB) for _ in range(draw.choice((0, 1, 1, 2, 5, 10, 20)))]
    prompt = prompt[: LONGEST - 2] or [1]
    most = draw.randint(1, min(LONGEST + 1 - len(prompt), draw.choice((3, 10, 40))))
    wish = {"temperature": 0.0, "max_tokens": most} | draw.choice(wishes)
    if "min_tokens" in wish:
        wish["min_tokens"] = min(wish["min_tokens"], most)
    if draw.random() < 0.25:
        wish["stop"] = tuple(draw.sample(["a", "e", "t", "th", "in", " s", "q"], 2))
    stops = tuple(draw.sample(range(VOCAB), draw.choice((0, 0, 1, 3, 6))))
    seed, priority = draw.getrandbits(60), draw.choice((0, 0, 0, 1, -1))
    salt = draw.choice((None, None, None, "x"))
    grammar = grammar_of(draw.getrandbits(20)) if "structured_outputs" in wish else None
    return [
        Request(
            prompt=tuple(prompt),
            params=SamplingParams(**wish),
            seed=seed + number,
            stop_ids=stops,
            priority=priority,
            salt=salt,
            grammar=grammar,
        )
        for number in range(draw.choice((1, 1, 1, 2, 3, 6)))
    ]


def answer(request, broken_every=0):
    """Returns what a request gets if nothing goes wrong: it computes alone, and remembers nothing but a chain."""
    params, tokens, logprobs = request.params, [], []
    chain = chains_of(0, request.prompt)[-1]
    text = TextStream(TOKENIZER, request.prompt, params) if params.stop else None
    while is_finite(chain, broken_every) or _is_forced(request, tokens):
        forbidden = {*request.stop_ids} if len(tokens) < params.min_tokens else set()
        if request.grammar is not None:
            banned = [token for token, bias in params.logit_bias.items() if bias == -np.inf]
            allowed = _allowed(request, tokens)
            forbidden |= {*range(VOCAB)} - allowed | {*banned}
            if not allowed - forbidden:
                return Answer(tuple(tokens), "stop", logprobs)
        token, logprob = choose(_mixed(request, chain, tokens), forbidden)
        tokens.append(token)
        logprobs.append((token, logprob))
        chain = link(chain, token)
        reason = _why_over(request, tokens, text)
        if reason:
            return Answer(tuple(tokens), reason, logprobs)
    return Answer(tuple(tokens), "error", logprobs)


def _is_forced(request, tokens):
    """Whether the next token is taken without the model, so that its logits are not looked at."""
    params = request.params
    one_by_one = params.logprobs is not None or params.presence_penalty or params.logit_bias
    if request.grammar is None or one_by_one or not tokens:
        return False
    early = request.stop_ids if len(tokens) < params.min_tokens else ()
    allowed = _allowed(request, tokens)
    return len(allowed) == 1 and not allowed & {*early}


def _allowed(request, tokens):
    return {*allowed_after(request.grammar.new_matcher().key, tokens)}


def _mixed(request, chain, tokens):
    params = request.params
    seed = (request.seed, request.seed >> 32) if params.temperature > 0 else None
    counts = None
    if params.presence_penalty:
        counts = (
            np.bincount(tokens or [0], minlength=VOCAB) * bool(tokens),
            np.bincount(request.prompt, minlength=VOCAB) > 0,
        )
    return weigh(chain, seed=seed, counts=counts, biases=params.logit_bias.items())


def _why_over(request, tokens, text):
    params = request.params
    may_stop = len(tokens) >= params.min_tokens
    reason = "length" if len(tokens) == params.max_tokens else None
    reason = "stop" if tokens[-1] in request.stop_ids else reason
    if request.grammar is not None and not _allowed(request, tokens):
        reason = "stop"
    if text is None:
        return reason
    _, met = text.push(tokens[-1], may_stop=may_stop)
    if reason and not met:
        _, met = text.finish(may_stop=may_stop)
    return "stop" if met else reason


class Faults:
    """Lets the device of an engine fail now and then, before a step, after it, or when it is read.

    Args:
        engine: whose.
        draw: decides when.
        rate: how often a step fails.
    """

    def __init__(self, engine, draw, rate):
        self._draw, self._rate, self._owner = draw, rate, engine.runner.owner
        sequence_runner = engine.sequence_runner
        sequence_runner.runner.read = self._before(
            sequence_runner.runner.read, (1.0, self._lose_at_read)
        )
        sequence_runner.step = self._before(
            self._after(sequence_runner.step),
            (1.0, _raiser(MemoryError)),
            (0.2, _raiser(RuntimeError)),
            (0.5, _raiser(KeyboardInterrupt)),
        )
        sequence_runner.forward = self._before(
            self._after(sequence_runner.forward),
            (1.0, _raiser(MemoryError)),
            (0.2, _raiser(RuntimeError)),
        )
        sequence_runner.sample = self._before(
            self._after(sequence_runner.sample),
            (1.0, _raiser(MemoryError)),
            (0.2, _raiser(RuntimeError)),
            (0.5, _raiser(KeyboardInterrupt)),
        )
        sequence_runner.runner.update = self._before(
            sequence_runner.runner.update, (3.0, _raiser(RuntimeError))
        )
        sequence_runner.runner.run_read_only = self._before(
            sequence_runner.runner.run_read_only, (3.0, _raiser(RuntimeError))
        )
        sequence_runner.copy = self._before(sequence_runner.copy, (1.0, _raiser(MemoryError)))
        sequence_runner.admit = self._before(sequence_runner.admit, (1.0, _raiser(MemoryError)))

    def end(self):
        self._rate = 0

    def _hits(self, often):
        return self._rate > 0 and self._draw.random() < self._rate * often

    def _before(self, function, *faults):
        @wraps(function)
        def failing(*arguments):
            for often, fail in faults:
                if self._hits(often):
                    fail()
            return function(*arguments)

        return failing

    def _after(self, step):
        def failing(*arguments):
            out = step(*arguments)
            if self._hits(0.3):
                raise KeyboardInterrupt("injected")
            if self._hits(0.3):
                self._owner.poison("injected")
                raise CachePoisoned("injected")
            return out

        return failing

    def _lose_at_read(self):
        kind = self._draw.choice(("RESOURCE_EXHAUSTED", "INTERNAL"))
        error = jax.errors.JaxRuntimeError(f"{kind}: injected")
        self._owner.poison("injected", cause=error)
        raise error


def _raiser(kind):
    def fail():
        raise kind("injected")

    return fail
