"""`LoadedAdapter`: an adapter that requests may name, and the salt that its cached prefixes have. Imports no JAX."""

import secrets
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxkv.cache.kept_pages.keys import hash_parts
from jaxkv.runner.weight_version import WeightVersion

_SECRET_BYTES = 32


class AdapterVersion(NamedTuple):
    """The adapter that generated a text.

    Attributes:
        name: its name.
        version: which of the adapters that were loaded under this name.
    """

    name: str
    version: WeightVersion


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """One adapter on the device. Loading it again makes another object.

    Attributes:
        version: its name and version.
        slot: 1 + its index in the stack of adapters.
        secret: random bytes of this load, so that no salt of a user, of another adapter or of an earlier load is equal.
    """

    version: AdapterVersion
    slot: int
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(_SECRET_BYTES), repr=False)

    def salted(self, salt: str | bytes | None) -> bytes:
        """Returns the salt of the adapter's requests that have the salt `salt` among themselves."""
        return hash_parts("adapter", self.secret, salt)
