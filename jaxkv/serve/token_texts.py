"""`TokenTexts`: the texts and bytes of single tokens, as replies show them."""

from functools import lru_cache

from jaxkv.text.token_bytes import token_bytes
from jaxkv.text.tokenizer import Tokenizer


class TokenTexts:
    """The texts and bytes of single tokens, of which the last few thousand are kept.

    Args:
        tokenizer: the model's tokenizer; without one, tokens are written as `token_id:ID`.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.of = lru_cache(maxsize=8192)(self._of)

    def text(self, token: int) -> str:
        """Returns the text of a token; bytes of incomplete characters become U+FFFD."""
        return self.of(token)[0]

    def _of(self, token: int) -> tuple[str, list[int] | None]:
        if self._tokenizer is None:
            return f"token_id:{token}", None
        found = token_bytes(self._tokenizer, token)
        return found.decode(errors="replace"), list(found)
