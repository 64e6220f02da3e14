"""Whether a function has the code of one of Transformers' own, which many of its models repeat."""

import types
from typing import Any

import transformers

_FOLDER = transformers.__path__[0]


def is_same(function: object, known: object) -> bool:
    """Whether two functions have the same code, apart from texts such as docstrings, and `known` is Transformers' own.

    What was put in the place of Transformers' own since has its code in another file.
    """
    if not isinstance(function, types.FunctionType) or not isinstance(known, types.FunctionType):
        return False
    if not known.__code__.co_filename.startswith(_FOLDER):
        return False
    return _bytecode(function) == _bytecode(known)


def _bytecode(function: types.FunctionType) -> tuple[Any, ...]:
    code = function.__code__
    numbers = tuple((type(one), one) for one in code.co_consts if not isinstance(one, str))
    arguments = code.co_argcount, code.co_kwonlyargcount, code.co_flags, function.__defaults__
    return code.co_code, numbers, code.co_names, *arguments, function.__closure__
