"""The characters that stand for bytes in GPT-2's byte-level vocabularies."""

import functools


@functools.cache
def byte_alphabet() -> tuple[str, ...]:
    """Returns the character that stands for each byte."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in plain else next(others)) for byte in range(256))


@functools.cache
def bytes_of_alphabet() -> dict[str, int]:
    """Returns the byte that each character stands for."""
    return {character: byte for byte, character in enumerate(byte_alphabet())}
