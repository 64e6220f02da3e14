"""`ReplicaGroup`: the replicas of one model: their start and end, the choice of one, and what all of them do."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from jaxkv.config.plain_sampling import pack_sampling
from jaxkv.config.sampling import SamplingParams
from jaxkv.errors import ReplicaLost
from jaxkv.replicas.devices import replica_environments
from jaxkv.replicas.messages import Facts
from jaxkv.replicas.replica import Replica
from jaxkv.replicas.router import Router
from jaxkv.text.prompts import TokenizedPrompt

_LOG = logging.getLogger(__name__)

FULL = 2
"""A replica gets no further prompt of a batch while it has so many times the sequences that it runs at once."""

_PLAIN = None, None
"""`Job.scope` of a prompt without salt and adapter."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One prompt with its parameters, for any replica.

    Attributes:
        prompt: its tokens, text and salt.
        sampling: its parameters, with a seed, so that every replica gives the same tokens.
        priority: a lower number is served first.
    """

    prompt: TokenizedPrompt
    sampling: SamplingParams
    priority: int = 0

    @property
    def scope(self) -> tuple[object, ...]:
        """What else prompts must have in common to share pages."""
        return self.prompt.salt, self.sampling.lora

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of the operations "generate" and "stream"."""
        return {
            "prompt": as_prompt(self.prompt),
            "sampling": pack_sampling(self.sampling),
            "priority": self.priority,
        }


def as_prompt(prompt: TokenizedPrompt) -> dict[str, Any]:
    """Returns a tokenized prompt in the form that `LLM.generate` takes."""
    return {
        "prompt": prompt.text,
        "prompt_token_ids": list(prompt.ids),
        "cache_salt": prompt.salt,
    }


class ReplicaGroup:
    """Replicas of one model. Any thread may use it.

    Args:
        count: number of replicas.
        options: arguments of the `LLM` of each.

    Attributes:
        replicas: the replicas, lost ones too.
        facts: what each has told of its model.

    Raises:
        Exception: the error that kept a replica from loading the model; all are ended then.
    """

    def __init__(self, count: int, options: Mapping[str, Any]) -> None:
        places = replica_environments(count, options["tensor_parallel_size"])
        self.replicas: list[Replica] = []
        self._lock = threading.Lock()
        self._changing = threading.Lock()
        self._reported: set[int] = set()
        with self._ended_by_errors():
            for number, place in enumerate(places):
                self.replicas.append(Replica(number, count, options, place))
            facts = [replica.loaded.result() for replica in self.replicas]
            self.facts: Facts = facts[0]
        self._router = Router(count, block=self.facts.block, cache_tokens=self.facts.cache_tokens)

    @property
    def live(self) -> list[Replica]:
        """The replicas that are not lost; a lost one is logged once.

        Raises:
            ReplicaLost: all are lost.
        """
        for number, replica in enumerate(self.replicas):
            if replica.failure is not None and number not in self._reported:
                self._reported.add(number)
                _LOG.error("%s", replica.failure)
        found = [replica for replica in self.replicas if replica.failure is None]
        if not found:
            assert self.replicas[-1].failure is not None, "it is not live"
            raise self.replicas[-1].failure
        return found

    def begin(
        self,
        operation: str,
        job: Job,
        *,
        pieces: Callable[[list[Any]], None] | None = None,
        most: int | None = None,
    ) -> "Future[Any] | None":
        """Begins a job on the replica that the router chooses; returns its result to come.

        Args:
            operation: "generate" or "stream".
            job: the job.
            pieces: see `Replica.call`.
            most: leave replicas alone that have so many open samples; if all have, `None` is returned. `None` for no
                such limit.

        Raises:
            ReplicaLost: no replica is left.
        """
        while True:
            with self._lock:
                live = self.live
                loads = [self._load(replica, most) for replica in self.replicas]
                if not any(load is not None for load in loads):
                    if most is not None and live:
                        return None
                    continue
                chosen = self.replicas[self._router.choose(job.prompt.ids, loads, job.scope)]
                try:
                    return chosen.call(
                        operation, job.arguments(), samples=job.sampling.n, pieces=pieces
                    )
                except ReplicaLost:
                    continue  # It was lost since its load was read.

    def all(self, operation: str, **arguments: Any) -> "dict[Replica, Future[Any]]":  # noqa: ANN401
        """Begins an operation on every replica that works; returns their results to come.

        Raises:
            ReplicaLost: no replica is left.
        """
        results: dict[Replica, Future[Any]] = {}
        self._begin_all(self.live, results, operation, arguments)
        return results

    def change(
        self,
        operation: str,
        made: Callable[[Any], None] | None = None,
        **arguments: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Makes a change on every replica that works; returns its result.

        One at a time: two that arrived in different orders would leave the replicas in different states.

        Args:
            operation: its operation.
            made: called with the result before the next change begins.
            arguments: of the operation.

        Raises:
            ReplicaLost: no replica is left.
            Exception: see `settle`.
        """
        with self._changing:
            live, results = self.live, dict[Replica, Future[Any]]()
            try:
                self._begin_all(live, results, operation, arguments)
            except BaseException:
                for replica in live if results else ():
                    if replica not in results:
                        _LOG.error("%s is ended, since a change did not reach it", replica.name)
                        replica.close()
                raise
            result = self.settle(results)
            if made is not None:
                made(result)
            return result

    def settle(self, results: "Mapping[Replica, Future[Any]]") -> Any:  # noqa: ANN401
        """Waits for a change of all replicas; returns its result, which is the same everywhere.

        If some have made it and others not, the others are ended: they would answer from another state.

        Args:
            results: of `all`.

        Raises:
            Exception: the error of a replica, if no other has made the change; then nothing was changed.
        """
        errors = {replica: result.exception() for replica, result in results.items()}
        made = [replica for replica, error in errors.items() if error is None]
        for replica, error in errors.items():
            if error is None:
                continue
            if not made:
                raise error
            if replica.failure is None:
                _LOG.error("%s is ended, since a change failed there: %r", replica.name, error)
                replica.close()
        return results[made[0]].result()

    def note(self, replica: Replica, ids: Sequence[int]) -> None:
        """Records that a replica holds a prefix that came from a file, which has none of a salt or an adapter."""
        with self._lock:
            self._router.note(self.replicas.index(replica), ids, _PLAIN)

    def forget(self) -> None:
        """Forgets what all replicas hold, since their caches were emptied."""
        with self._lock:
            self._router.forget()

    def close(self) -> None:
        """Ends all replicas."""
        for replica in self.replicas:
            replica.close()

    def _begin_all(
        self,
        live: "Sequence[Replica]",
        results: "dict[Replica, Future[Any]]",
        operation: str,
        arguments: Mapping[str, Any],
    ) -> None:
        """Begins an operation on replicas; notes the results to come. One that was lost meanwhile is left out."""
        for replica in live:
            with suppress(ReplicaLost):
                results[replica] = replica.call(operation, arguments)
        if not results:
            raise live[-1].failure or ReplicaLost("no replica is left")

    def _load(self, replica: Replica, most: int | None) -> int | None:
        if replica.failure is not None or (most is not None and replica.num_open >= most):
            return None
        return replica.num_open

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        """Ends the replicas that were begun if the block raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise
