"""The names of what an array of the cache may hold, and their order within a layer."""

from collections.abc import Mapping
from types import MappingProxyType

_ROLES = {
    "key": 0,
    "value": 1,
    "key_scale": 2,
    "value_scale": 3,
    "indexer": 4,
    "conv": 5,
    "ssm": 6,
    "delta": 7,
    "last_token": 8,
    "output_counts": 9,
    "prompt_seen": 10,
    "bias_ids": 11,
    "bias_values": 12,
    "hidden": 13,
}
ROLE_ORDER: Mapping[str, int] = MappingProxyType(_ROLES)
"""Role -> priority. Within a layer, arrays are ordered by it."""


def register_role(name: str, priority: int) -> None:
    """Makes a role known. Saying the same thing twice is fine; contradicting an earlier word is not.

    Raises:
        ValueError: the name has another priority, or another role has this priority.
    """
    if _ROLES.get(name) == priority:
        return
    if name in _ROLES or priority in _ROLES.values():
        raise ValueError(
            f"role {name!r} cannot get priority {priority}: names and priorities are unique, "
            f"and these are taken: {_ROLES}"
        )
    _ROLES[name] = priority


def check_role(name: str) -> None:
    """Raises `ValueError` naming the known roles if this is none of them."""
    if name not in _ROLES:
        raise ValueError(
            f"unknown role {name!r}; known are {', '.join(_ROLES)} (see register_role)"
        )
