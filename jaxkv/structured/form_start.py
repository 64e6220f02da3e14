"""`FormStart`: finds where the structured output begins in a generated text that begins with reasoning."""

from collections.abc import Sequence

from jaxkv.config.reasoning_tokens import ReasoningTokens


class FormStart:
    """Searches the generated tokens of one request. Each call continues where the last one ended.

    Args:
        tokens: what marks the reasoning.

    Attributes:
        tokens: see above.
    """

    def __init__(self, tokens: ReasoningTokens) -> None:
        self.tokens = tokens
        self._seen = 0
        self._found: int | None = None

    def find(self, generated: Sequence[int]) -> int | None:
        """Returns the index of the structured output's first token, or `None` if the reasoning has not ended yet.

        Args:
            generated: all generated tokens; those of the last call and perhaps more.
        """
        while self._found is None and self._seen < len(generated):
            # Assigned in an order that lets an interrupted call be repeated.
            self._found = self._found_at(generated, self._seen)
            self._seen += 1
        return self._found

    def must_end(self, generated: Sequence[int]) -> bool:
        """Whether the next token must end the reasoning, since its header is complete."""
        return bool(self.tokens.header) and self._is_header(generated, len(generated))

    def _found_at(self, generated: Sequence[int], index: int) -> int | None:
        token, tokens = generated[index], self.tokens
        if index == 0 and tokens.begins:
            return None if token in tokens.begins else 0
        return index + 1 if token in tokens.ends and self._is_header(generated, index) else None

    def _is_header(self, generated: Sequence[int], end: int) -> bool:
        header = self.tokens.header
        return tuple(generated[max(0, end - len(header)) : end]) == header
