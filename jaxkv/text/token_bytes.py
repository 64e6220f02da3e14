"""The bytes that a token stands for; a token need not be a whole character."""

from jaxkv.text.byte_alphabet import bytes_of_alphabet
from jaxkv.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """Returns the bytes of one token inside a text; special tokens stand for their names.

    Args:
        tokenizer: the model's tokenizer.
        token: an id in [0, `tokenizer.num_ids`); one that only the model's logits have stands for no bytes.
    """
    piece = tokenizer.piece(token)
    if piece is None:
        return b""
    if tokenizer.is_byte(token):
        return bytes([int(piece[1:-1], 16)])
    # At its beginning a text may lose a space, so the token is decoded behind itself.
    first = tokenizer.decode([token], skip_special_tokens=False)
    both = tokenizer.decode([token, token], skip_special_tokens=False)
    text = both.removeprefix(first)
    known = bytes_of_alphabet()
    if _REPLACEMENT in both and all(each in known for each in piece):
        return bytes(known[each] for each in piece)
    return text.encode()
