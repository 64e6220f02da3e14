"""`Grammars`: compiles the grammars of one model's requests, and keeps those that were used last."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np

from jaxkv.config.structured_outputs import StructuredOutputs
from jaxkv.sampling.token_mask import mask_of, num_words
from jaxkv.structured.grammar import Grammar
from jaxkv.structured.shared_masks import SharedMasks
from jaxkv.structured.trial import GrammarTrial
from jaxkv.structured.trial_process import build_matcher, build_vocabulary, error_of
from jaxkv.structured.vocabulary import vocabulary_of
from jaxkv.text.tokenizer import Tokenizer

MOST_KEPT = 64
"""Grammars that are kept, refused ones included; they are few because one may take a hundred megabytes."""


class Grammars:
    """Compiles grammars for the vocabulary of one model. Thread-safe; a call may take seconds, but not the GIL.

    Args:
        tokenizer: the model's tokenizer; `None` if it has none, and then every grammar is refused.
        end_ids: ids that end a text of the model.
        vocab_size: number of the model's logits.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, end_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids, self._vocab_size = tuple(end_ids), vocab_size
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputs, Grammar | str] = OrderedDict()
        self._trial: GrammarTrial | None = None
        self._vocabulary: Any = None
        self._forbidden = np.empty(0, np.uint32)
        self._shared_masks = SharedMasks()

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """Returns the compiled grammar.

        Raises:
            ValueError: it is not valid, or exceeds a limit; the model has no tokenizer that llguidance can read; or
                llguidance is not installed.
        """
        # Where the structured output begins is the request's own; its grammar is the same.
        outputs = replace(outputs, reasoning=None)
        with self._lock:
            found = self._kept.get(outputs)
            if found is not None:
                self._kept.move_to_end(outputs)
            trial = self._prepared() if found is None else None
        if found is None:
            assert trial is not None
            found = self._compile(trial, outputs)
            with self._lock:
                self._kept[outputs] = found
                if len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def close(self) -> None:
        """Ends the worker process and drops all grammars; a later `compile` starts again."""
        with self._lock:
            self._kept.clear()
            if self._trial is not None:
                self._trial.close()

    def _compile(self, trial: GrammarTrial, outputs: StructuredOutputs) -> Grammar | str:
        """Returns the grammar, or the message that refuses it."""
        kind, source = _source(outputs)
        try:
            trial.check(kind, source)
        except ValueError as error:
            return str(error)
        matcher = build_matcher(self._vocabulary, kind, source)
        assert not matcher.is_error(), f"the trial compiled this grammar: {error_of(matcher)}"
        return Grammar(
            matcher,
            self._vocab_size,
            self._end_ids,
            self._forbidden,
            fill_masks,
            self._shared_masks,
        )

    def _prepared(self) -> GrammarTrial:
        """Returns the trial process; reads the vocabulary at the first call."""
        if self._trial is not None:
            return self._trial
        if find_spec("llguidance") is None:
            raise ValueError(
                'structured_outputs need the package llguidance; install it with `pip install "jaxkv[serve]"`'
            )
        if self._tokenizer is None:
            raise ValueError(
                "structured_outputs need a tokenizer, which this model directory lacks"
            )
        vocabulary = vocabulary_of(self._tokenizer, self._end_ids, self._vocab_size)
        arguments = {
            "text": vocabulary.text,
            "vocab_size": vocabulary.vocab_size,
            "end_ids": list(vocabulary.end_ids),
        }
        trial = GrammarTrial(arguments)
        # The worker reads it first, because a tokenizer that llguidance cannot read may end the process.
        trial.start()
        self._vocabulary = build_vocabulary(**arguments)
        words, invented = num_words(vocabulary.vocab_size), vocabulary.invented_end
        self._forbidden = mask_of(range(self._vocab_size, 32 * words), words)
        self._forbidden |= mask_of(() if invented is None else (invented,), words)
        self._trial = trial
        return trial


_FEW = 16
"""Up to so many masks are computed one after the other: one takes some 15 us, and waking threads takes longer."""


def fill_masks(matchers: Sequence[Any], masks: np.ndarray) -> None:
    """Computes the masks of several matchers of llguidance without the GIL, many in threads; see `FillMasks`."""
    begin, size = masks.ctypes.data, masks.strides[0]
    if len(matchers) <= _FEW:
        for index, matcher in enumerate(matchers):
            matcher.unsafe_compute_mask_ptr(begin + index * size, size)
        return
    numbered = [(matcher, index) for index, matcher in enumerate(matchers)]
    _executor().unsafe_compute_mask_ptr(numbered, begin, size, len(matchers))


@cache
def _executor() -> Any:  # noqa: ANN401 - llguidance is optional
    """Returns the threads that compute masks; they are started once for the process."""
    import llguidance

    return llguidance.LLExecutor()


def _source(outputs: StructuredOutputs) -> tuple[str, str]:
    """Returns the kind and the source of a grammar as `trial_process.build_matcher` takes them."""
    if outputs.choice is not None:
        # One regular expression, because thousands of alternatives of a rule would exceed the parser's limit.
        return "regex", "|".join(map(_escaped, outputs.choice))
    if outputs.json_object:
        return "json", '{"type":"object"}'
    source = outputs.json or outputs.regex or outputs.grammar
    assert isinstance(source, str), "checked on construction"
    return outputs.kind, source


def _escaped(text: str) -> str:
    """Returns a regular expression of one text."""
    return "".join(one if one.isalnum() else rf"\x{{{ord(one):x}}}" for one in text)
