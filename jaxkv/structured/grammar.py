"""`Grammar`, a compiled grammar, and `TokenConstraint`, its state in the text of one request."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxkv.config.reasoning_tokens import ReasoningTokens
from jaxkv.sampling.token_mask import mask_of, num_words
from jaxkv.structured.form_start import FormStart
from jaxkv.structured.shared_masks import SharedMasks

MOST_FORCED = 64
"""Most forced tokens that a request takes at once, so that a long forced text does not hold up other requests."""


@runtime_checkable
class Matcher(Protocol):
    """The methods of `llguidance.LLMatcher` that are used here."""

    def deep_copy(self) -> "Matcher":
        """Returns a copy, which may share what does not change."""
        ...

    def reset(self) -> bool:
        """Returns to the beginning of the text."""
        ...

    def consume_tokens(self, tokens: list[int], /) -> bool:
        """Appends tokens to the text; returns False if the grammar does not allow them."""
        ...

    def compute_ff_tokens(self) -> list[int]:
        """Returns the tokens that must follow, as far as the grammar leaves no choice."""
        ...

    def is_accepting(self) -> bool:
        """Whether the text is complete."""
        ...

    def is_stopped(self) -> bool:
        """Whether no token but an end id can follow."""
        ...

    def is_error(self) -> bool:
        """Whether a limit was exceeded, or a token was not allowed."""
        ...

    def get_error(self) -> str:
        """Returns the message of that error."""
        ...


FillMasks = Callable[[Sequence[Any], np.ndarray], None]
"""Writes the masks of the tokens that may follow in several matchers to a contiguous uint32 array [matchers, words]."""


class Grammar:
    """A compiled grammar. Requests share it.

    Args:
        matcher: matcher at the beginning of a text; never advanced.
        vocab_size: number of the model's logits.
        end_ids: ids that end a text of the model.
        forbidden: mask of the ids that no request may sample; its length is that of the matcher's masks.
        fill: computes masks.
        shared_masks: makes equal masks one array; requests of several grammars may share it.

    Attributes:
        vocab_size, end_ids, forbidden, fill, shared_masks: the arguments.
        first_mask: mask at the beginning of a text.
    """

    def __init__(
        self,
        matcher: Matcher,
        vocab_size: int,
        end_ids: Sequence[int],
        forbidden: np.ndarray,
        fill: FillMasks,
        shared_masks: SharedMasks,
    ) -> None:
        self._matcher = matcher
        self.vocab_size, self.end_ids = vocab_size, tuple(end_ids)
        self.forbidden, self.fill, self.shared_masks = forbidden, fill, shared_masks
        masks = np.zeros((1, forbidden.size), np.uint32)
        fill([matcher], masks)
        self.first_mask = masks[0]

    def new_matcher(self) -> Matcher:
        """Returns a matcher at the beginning of a text."""
        return self._matcher.deep_copy()


class TokenConstraint:
    """The state of a grammar in the text of one request: the tokens that may follow.

    Every method takes all generated tokens and appends the new ones to the matcher. A request that was interrupted in
    between starts the matcher again, so the state never depends on what failed before.

    Args:
        grammar: the grammar.
        never: ids that may never be sampled.
        before_least: ids that may not be sampled as one of the first `least` tokens.
        least: least number of tokens of the text (`SamplingParams.min_tokens`).
        forces: whether the request takes tokens that the grammar forces without sampling them.
        reasoning: what marks the free text before the structured output; `None` if there is none.

    Attributes:
        grammar: the grammar.
        matcher: the matcher; only `Grammar.fill` uses it from outside.
        mask: mask of the tokens that may follow, uint32 [words of the model's vocabulary]; other requests may hold it.
    """

    def __init__(
        self,
        grammar: Grammar,
        *,
        never: Iterable[int] = (),
        before_least: Iterable[int] = (),
        least: int = 0,
        forces: bool = True,
        reasoning: ReasoningTokens | None = None,
    ) -> None:
        words = grammar.forbidden.size
        self.grammar = grammar
        self.matcher = grammar.new_matcher()
        self._never = ~(mask_of(never, words) | grammar.forbidden)
        self._early = ~mask_of(before_least, words)
        self._least, self._forces = least, forces
        self._words = num_words(grammar.vocab_size)
        self._start = None if reasoning is None else FormStart(reasoning)
        # A text that ends in its reasoning would lack the structured output.
        self._free = ~mask_of(grammar.end_ids, words)
        self._consumed: int | None = 0
        self._masked_at = -1
        # The last forced tokens, and how many tokens were generated before them.
        self._forced, self._forced_at = list[int](), 0
        self.mask = np.zeros(self._words, np.uint32)
        self._take(self._first_mask(reasoning), 0)

    def is_ready(self, generated: int) -> bool:
        """Whether `mask` belongs to the token after the first `generated` tokens."""
        return self._masked_at == generated

    def ends(self, generated: Sequence[int]) -> bool:
        """Returns whether no token can follow these.

        Raises:
            RuntimeError: a limit of llguidance was exceeded, or the grammar does not allow the tokens.
        """
        return self._advance(generated) and self.matcher.is_stopped()

    def stays_free(self, generated: Sequence[int]) -> bool:
        """Whether the reasoning has not ended yet; `mask` is then the one after these tokens.

        Raises:
            ValueError: no token is left.
        """
        if self._start is None or self._start.find(generated) is not None:
            return False
        if not self._take(self._waiting_mask(self._start, generated), len(generated)):
            raise _no_token_left(generated)
        return True

    def forced(self, generated: Sequence[int]) -> list[int]:
        """Returns the tokens that must follow these, as far as they are known; the mask allows each of them alone."""
        if not (self._forces and self._advance(generated)):
            return []
        # llguidance tokenises all of the forced text at each call, so what is left of it is kept.
        taken = list(generated[self._forced_at :])
        tokens = self._forced[len(taken) :]
        if not tokens or taken != self._forced[: len(taken)]:
            tokens = self.matcher.compute_ff_tokens()[:MOST_FORCED]
        self._forced, self._forced_at = tokens, len(generated)
        for index, token in enumerate(tokens):
            kept = self._kept(len(generated) + index)
            if not kept[token >> 5] >> (token & 31) & 1:
                return tokens[:index]
        return tokens

    def settle(self, computed: np.ndarray, generated: Sequence[int]) -> bool:
        """Takes the mask that `Grammar.fill` computed after these tokens; returns whether the text ends instead.

        Args:
            computed: the mask.
            generated: the generated tokens.

        Raises:
            RuntimeError: a limit of llguidance was exceeded.
            ValueError: no token is left, and the text is not complete.
        """
        self._refuse_error()
        if self._take(computed, len(generated)):
            return False
        if self.matcher.is_accepting():
            return True
        raise _no_token_left(generated)

    def _waiting_mask(self, start: FormStart, generated: Sequence[int]) -> np.ndarray:
        """Returns the mask while the reasoning goes on, before `_kept`."""
        return (
            mask_of(start.tokens.ends, self._free.size) if start.must_end(generated) else self._free
        )

    def _first_mask(self, reasoning: ReasoningTokens | None) -> np.ndarray:
        """Returns the mask of the first token, before `_kept`."""
        if reasoning is None:
            return self.grammar.first_mask
        if not reasoning.begins:
            return self._free
        return self.grammar.first_mask | mask_of(reasoning.begins, self._free.size)

    def _take(self, computed: np.ndarray, generated: int) -> bool:
        """Sets `mask` to the allowed ones of the computed tokens; returns False if there are none."""
        allowed = computed & self._kept(generated)
        if not allowed.any():
            return False
        self.mask = self.grammar.shared_masks.share(allowed[: self._words])
        self._masked_at = generated
        return True

    def _kept(self, generated: int) -> np.ndarray:
        """Returns the mask of the tokens that the request allows after `generated` tokens, without the grammar."""
        return self._never & self._early if generated < self._least else self._never

    def _begin(self, generated: Sequence[int]) -> int | None:
        """Returns the index of the structured output's first token; `None` while the reasoning goes on."""
        return 0 if self._start is None else self._start.find(generated)

    def _advance(self, generated: Sequence[int]) -> bool:
        """Appends structured output that the matcher has not seen; returns False if it has not begun."""
        begin = self._begin(generated)
        if begin is None:
            return False
        if self._consumed is None:
            self.matcher.reset()
            self._consumed = 0
        if self._consumed == len(generated):
            return True
        new = list(generated[max(begin, self._consumed) :])
        # An interrupt in between leaves `None`, and the next call begins anew.
        self._consumed = None
        self.matcher.consume_tokens(new)
        self._refuse_error()
        self._consumed = len(generated)
        return True

    def _refuse_error(self) -> None:
        if self.matcher.is_error():
            error = " ".join(self.matcher.get_error().replace("<non-verbose/>", "").split())
            raise RuntimeError(f"the grammar of structured_outputs failed: {error[:300]}")


def _no_token_left(generated: Sequence[int]) -> ValueError:
    return ValueError(
        f"the grammar, logit_bias, bad_words and min_tokens of the request leave no token after "
        f"{len(generated)} tokens; allow more tokens"
    )
