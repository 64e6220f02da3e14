"""How the engine serves, as frozen data that is checked once."""

from dataclasses import dataclass

from jaxkv.config import as_int


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How requests are served.

    Attributes:
        token_budget: most tokens of a step; a step that prompts share with rows that generate takes as long as this.
        prefix_cache: keep the pages of what was computed, for requests that begin alike.
        pinned_shapes: run every step in the one largest shape. Slow; results are then equal bit for bit whatever
            the neighbours, the chunks, preemptions and prefix hits.
        overlap: send a step before the one before it is read.
        most_rebuilds, rebuild_seconds: give up at more lost caches than this in so many seconds.
    """

    token_budget: int = 2048
    prefix_cache: bool = True
    pinned_shapes: bool = False
    overlap: bool = True
    most_rebuilds: int = 3
    rebuild_seconds: float = 300.0

    def __post_init__(self) -> None:
        """Refuses numbers that cannot be served."""
        as_int("token_budget", self.token_budget, 1, 2**20)
        as_int("most_rebuilds", self.most_rebuilds, 0, 2**31 - 1)
        if not self.rebuild_seconds > 0:
            raise ValueError(f"rebuild_seconds must be above 0, got {self.rebuild_seconds}")
