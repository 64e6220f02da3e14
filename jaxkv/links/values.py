"""`Values`: plain values, arrays and named records as bytes, and back. Reading bytes runs no code but the records' own.

The structure is JSON, in which everything that JSON lacks is an object of one entry, such as `{"tuple": [...]}`. Arrays
and bytes follow it as they are.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkv.wording import shown

Buffer = bytes | memoryview


class Values:
    """Writes and reads values.

    Args:
        records: dataclasses and named tuples that values may hold; they are made again by their fields.
    """

    def __init__(self, records: Iterable[type]) -> None:
        self._records = {record.__name__: record for record in records}

    def write(self, value: object) -> list[Buffer]:
        """Returns a value as its structure and the bytes that belong to it.

        Raises:
            ValueError: it holds something that is neither plain, an array nor a record.
        """
        buffers: list[Buffer] = []
        structure = json.dumps(self._plain(value, buffers), separators=(",", ":"))
        return [structure.encode(), *buffers]

    def read(self, buffers: Sequence[Buffer]) -> Any:  # noqa: ANN401 - what was written
        """Returns the value of `write`. Arrays share the memory of the buffers.

        Raises:
            ValueError: the bytes are damaged, or a record is refused by its own checks.
        """
        structure = json.loads(bytes(buffers[0]))
        try:
            return self._made(structure, buffers)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"a message is damaged: {error!r}") from error

    def _plain(self, value: Any, buffers: list[Buffer]) -> Any:  # noqa: ANN401
        if value is None or isinstance(value, bool | int | float | str):
            # NumPy's float64 is a float, and an enum may be an int; JSON knows neither of them.
            return value if type(value) in _JSON else _JSON_OF[_base(value)](value)
        if isinstance(value, np.integer | np.floating | np.bool_):
            return value.item()
        if isinstance(value, list):
            return [self._plain(item, buffers) for item in value]
        if self._records.get(name := type(value).__name__) is type(value):
            return {name: [self._plain(item, buffers) for item in _parts(value)]}
        if isinstance(value, tuple):
            return {"tuple": [self._plain(item, buffers) for item in value]}
        if isinstance(value, Mapping):
            pairs = [item for pair in value.items() for item in pair]
            return {"dict": [self._plain(item, buffers) for item in pairs]}
        if isinstance(value, bytes):
            buffers.append(value)
            return {"bytes": len(buffers)}
        if isinstance(value, np.ndarray):
            flat = np.ascontiguousarray(value)
            buffers.append(memoryview(flat.reshape(-1).view(np.uint8)))
            return {"array": [len(buffers), value.dtype.name, list(value.shape)]}
        raise ValueError(
            f"{shown(value)} of type {type(value).__name__} cannot be sent to another process; give numbers, texts, "
            "lists, dicts or NumPy arrays"
        )

    def _made(self, plain: Any, buffers: Sequence[Buffer]) -> Any:  # noqa: ANN401
        if isinstance(plain, list):
            return [self._made(item, buffers) for item in plain]
        if not isinstance(plain, dict):
            return plain
        [(kind, content)] = plain.items()
        match kind:
            case "tuple":
                return tuple(self._made(item, buffers) for item in content)
            case "dict":
                items = [self._made(item, buffers) for item in content]
                return dict(zip(items[::2], items[1::2], strict=True))
            case "bytes":
                return bytes(buffers[content])
            case "array":
                number, name, shape = content
                dtype = jnp.dtype(name)
                if len(buffers[number]) != math.prod(shape) * dtype.itemsize:
                    raise ValueError(f"an array of {name}{shape} has {len(buffers[number])} bytes")
                return np.frombuffer(buffers[number], dtype).reshape(shape)
        record = self._records[kind]
        parts = [self._made(item, buffers) for item in content]
        if not is_dataclass(record):
            return record(*parts)
        names = [field.name for field in fields(record) if field.init]
        return record(**dict(zip(names, parts, strict=True)))


_JSON = (type(None), bool, int, float, str)
_JSON_OF: dict[type, Any] = {bool: bool, int: int, float: float, str: str}


def _base(value: object) -> type:
    """Returns the type of JSON that a value of a derived type has."""
    return next(kind for kind in _JSON_OF if isinstance(value, kind))


def _parts(record: Any) -> list[Any]:  # noqa: ANN401 - a dataclass or a named tuple
    """Returns the fields of a record in the order in which it is made."""
    if not is_dataclass(record):
        return list(record)
    return [getattr(record, field.name) for field in fields(record) if field.init]
