"""`PrefixReuse`: owns the prefix index, the state checkpoints and the host tier of one engine."""

from jaxkv.cache.prefix.index import PrefixIndex
from jaxkv.config.engine import EngineConfig
from jaxkv.engine.host_tier.host_cache import open_host, why_no_host
from jaxkv.engine.host_tier.host_prefetch import HostPrefetch
from jaxkv.engine.state_checkpoints import StateCheckpoints, room_for_checkpoints
from jaxkv.runner.sequence_runner import SequenceRunner


class PrefixReuse:
    """The prefixes that one engine keeps for later requests. Methods do nothing for a part that the engine lacks.

    Args:
        sequence_runner: has the cache.
        config: engine options.
        host_bytes: host memory for evicted prefixes, in bytes; 0 for no host tier.

    Attributes:
        index: the prefix index; `None` if the prefix cache is off.
        host: the host tier; `None` if there is none.
        why_no_host: why there is no host tier; empty if there is one.
        state_checkpoints: makes the checkpoints of recurrent states; `None` if there is no room for any.
    """

    def __init__(
        self, sequence_runner: SequenceRunner, config: EngineConfig, host_bytes: int
    ) -> None:
        runner = sequence_runner.runner
        room = room_for_checkpoints(sequence_runner, config)
        self.index: PrefixIndex | None = None
        if config.prefix_cache:
            self.index = PrefixIndex(
                runner.layout,
                sequence_runner.allocator,
                identity=repr(runner.model),
                checkpoints=room,
                policy=config.checkpoints,
            )
        self.host = open_host(runner, self.index, host_bytes)
        self.why_no_host = why_no_host(runner.model, self.index, host_bytes)
        self.state_checkpoints = StateCheckpoints(self.index, sequence_runner) if room else None

    @property
    def prefetch(self) -> HostPrefetch | None:
        """Swap-ins for waiting requests; `None` without a host tier."""
        return None if self.host is None else self.host.prefetch

    def clear(self) -> None:
        """Removes all prefixes, on the device and on the host."""
        if self.host is not None:
            self.host.clear()
        elif self.index is not None:
            self.index.clear()

    def lose_device(self) -> None:
        """Removes what a lost cache held; prefixes on the host stay."""
        if self.host is not None:
            self.host.lose_device()
        elif self.index is not None:
            self.index.clear()

    def forget_unconfirmed(self) -> None:
        """Removes what steps that were dropped would have published."""
        if self.index is not None:
            self.index.forget_unconfirmed()

    def advance_swap_ins(self, *, wait: bool = False) -> bool:
        """Advances the swap-ins in progress; returns False if there are none.

        Args:
            wait: wait for one of them to end.

        Raises:
            CachePoisoned: a transfer failed and lost the cache.
        """
        if self.host is None or not self.host.prefetch.num_in_progress:
            return False
        self.host.advance(wait=wait)
        return True

    def close(self) -> None:
        """Frees the host tier."""
        if self.host is not None:
            self.host.close()
