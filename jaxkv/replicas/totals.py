"""Statistics of several replicas as those of one: counts are added, and texts are those of the first replica."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any


def total(parts: Sequence[Any]) -> Any:  # noqa: ANN401 - of the type of the parts
    """Returns the sum of values of one form.

    Numbers are added, and so are the values of mappings and dataclasses by name, and sequences item by item. A flag is
    set if it is in any part. Of everything else, and of what does not have one form, it is the first part's.

    Args:
        parts: a value of each replica; `None` counts nothing.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    first = known[0]
    if all(isinstance(part, bool) for part in known):
        return any(known)
    if all(isinstance(part, int | float) for part in known):
        return sum(known)
    if is_dataclass(first) and not isinstance(first, type):
        summed = {
            field.name: total([getattr(part, field.name) for part in known])
            for field in fields(first)
        }
        return replace(first, **summed)
    if all(isinstance(part, Mapping) for part in known):
        names = dict.fromkeys(name for part in known for name in part)
        return {name: total([part[name] for part in known if name in part]) for name in names}
    if all(isinstance(part, list | tuple) for part in known):
        same = len({len(part) for part in known}) == 1
        items = [total(each) for each in zip(*known, strict=same)]
        return first if not same else tuple(items) if isinstance(first, tuple) else items
    return first
