"""One engine on several hosts: process 0 leads, and what its `ModelRunner` runs, those of the other processes run too.

Every process has the same model and its slices of the parameters and the cache. The leader alone has requests, plans
and books. The narrow waist is the model runner, whose calls take a spec and packed arrays: before the leader runs such
a call, it sends it to each follower over a TCP connection, some kilobytes per step. A collective of JAX would do it
too, but it runs on the devices, in the queue of the steps, and takes arrays whose shapes both ends know already.

A call that fails on one host leaves the others inside a collective that never ends. So a host that fails, or loses the
other end of its connection, ends: with an error where Python can raise one, and otherwise by ending its process.
"""

import atexit
import faulthandler
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxkv.config.cache import CacheConfig
from jaxkv.config.lora import LoraConfig
from jaxkv.errors import HostLost, ProgramRefused
from jaxkv.links.channel import KEY_BYTES, Channel, Listener, connect, host_name
from jaxkv.links.values import Values
from jaxkv.runner.cache_programs import AdmitSpec, CopySpec
from jaxkv.runner.program_specs import ScoreSpec, StepSpec
from jaxkv.runner.sample_spec import SampleSpec
from jaxkv.sampling.features import Features
from jaxkv.step.text_drafter import NgramLookup
from jaxkv.wording import listed

_LOG = logging.getLogger(__name__)

MEET_SECONDS = 300.0
"""How long processes wait for one another at the start; the slowest one may still be downloading the model."""

GRACE_SECONDS = 5.0
"""How long a process may stay inside a call after it has lost another one, before it is ended."""

_POLL_SECONDS = 0.5
_WORD_SECONDS = 1.0
_LEADER_LOST = "process 0 has ended without a word; an engine needs all of its processes"

SPECS = (StepSpec, SampleSpec, ScoreSpec, CopySpec, AdmitSpec, Features, NgramLookup)
"""Specs that followers are told of, and what these hold."""

VALUES = Values(SPECS)
"""Writes and reads what followers are told."""


def mirrored[**P, T](method: Callable[P, T]) -> Callable[P, T]:
    """Lets the followers of a runner repeat the calls of one of its methods; its arguments can be sent to them.

    Args:
        method: a method of an object with the attribute `hosts`, which is `None` on one host.
    """

    @wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> T:
        runner: Any = arguments[0]
        if not isinstance(runner.hosts, Leader):
            return method(*arguments, **options)
        with runner.hosts.told(method.__name__, arguments[1:]):
            return method(*arguments, **options)

    return call


class Leader:
    """The leader's connections to all followers.

    Args:
        channels: one for each follower, in any order.

    Attributes:
        on_lost: called with the error in a thread of the leader when a follower has ended; `None` for nothing.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = channels
        self._names = ["a process"] * len(channels)
        self.on_lost: Callable[[HostLost], None] | None = None
        self._lost = ""
        self._is_closed = False
        self._watch = _Watch()
        # A script that ends without closing its `LLM` has ended in order too.
        atexit.register(self.close)

    def agree(self, options: str, free: int) -> int:
        """Returns the least of the numbers of all processes, and lets them have it.

        Args:
            options: what must be the same everywhere.
            free: a number of bytes.

        Raises:
            ValueError: a process has other options.
            HostLost: a process has ended.
        """
        others: list[tuple[str, int]] = []
        for number, channel in enumerate(self._channels):
            message = channel.receive()
            if message is None:
                raise HostLost(f"{self._names[number]} has ended before the model was loaded")
            process, name, given, bytes_there = message
            self._names[number] = f"process {process} ({name})"
            others.append((given, bytes_there))
        differing = [
            name for name, (given, _) in zip(self._names, others, strict=True) if given != options
        ]
        least = min(free, *(there for _, there in others))
        for channel in self._channels:
            channel.send(not differing, least)
        if differing:
            given = next(given for given, _ in others if given != options)
            raise ValueError(
                f"{differing[0]} was started with other options than process 0; give all processes the same. It has "
                f"{given}; process 0 has {options}"
            )
        for number, channel in enumerate(self._channels):
            threading.Thread(
                target=self._listen, args=(number, channel), name="jaxkv-host", daemon=True
            ).start()
        return least

    def told(self, name: str, arguments: Sequence[Any]) -> "_Told":
        """Returns a context in which the leader does what the followers are told to do.

        Args:
            name: a method of the runner.
            arguments: its arguments.

        Raises:
            HostLost: a follower has ended, or the block raised, which leaves the followers in another state.
        """
        return _Told(self, name, arguments)

    def waiting(self) -> "_Watch":
        """Returns a context in which this process waits for its devices, which a lost follower would make endless."""
        return self._watch

    def close(self) -> None:
        """Lets the followers end in order. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        for channel in self._channels:
            # One that has ended already hears nothing.
            with suppress(OSError):
                channel.send("end", [])
            channel.close()

    def send(self, name: str, arguments: Sequence[Any]) -> None:
        """Tells all followers what to do.

        Raises:
            HostLost: one has ended.
            ValueError: an argument cannot be sent; no follower got it.
        """
        if self._lost:
            raise HostLost(self._lost)
        message = VALUES.write([name, list(arguments)])
        for follower, channel in zip(self._names, self._channels, strict=True):
            try:
                channel.send_written(message)
            except OSError as error:
                self._lose(f"{follower} does not take what it is told: {error}")
                raise HostLost(self._lost) from error

    def give_up(self, error: BaseException) -> HostLost:
        """Ends the followers after an error of this process; returns the error to raise."""
        if not self._lost:
            # A follower that fails tells why, and that may come behind the error that it has caused here.
            time.sleep(_WORD_SECONDS)
        _skip_shutdown()
        self._lost = (
            self._lost or f"a call failed on process 0, which ends all processes: {error!r}"
        )
        self._is_closed = True
        for channel in self._channels:
            channel.close()
        return HostLost(self._lost)

    def _listen(self, number: int, channel: Channel) -> None:
        """Waits for the end of a follower, which may tell why."""
        why = ""
        while (message := channel.receive()) is not None:
            [why] = message
        if not self._is_closed:
            told = f": {why}" if why else ", without a word"
            self._lose(
                f"{self._names[number]} has ended{told}; an engine needs all of its processes"
            )

    def _lose(self, why: str) -> None:
        if self._lost:
            return
        self._lost = why
        _skip_shutdown()
        _LOG.error("%s", why)
        if self.on_lost is not None:
            self.on_lost(HostLost(why))
        self._watch.end_if_inside(why)


class _Told:
    """See `Leader.told`; a call inside another one is a part of it, and is not told again."""

    def __init__(self, leader: Leader, name: str, arguments: Sequence[Any]) -> None:
        self._leader, self._name, self._arguments = leader, name, arguments

    def __enter__(self) -> None:
        watch = self._leader.waiting()
        watch.__enter__()
        if watch.depth == 1:
            try:
                self._leader.send(self._name, self._arguments)
            except BaseException:
                watch.__exit__()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        watch = self._leader.waiting()
        watch.__exit__()
        # A program that is refused was not run here, and `ModelRunner` asks for it before it tells of the run.
        if error is None or watch.depth or isinstance(error, ProgramRefused | HostLost):
            return
        raise self._leader.give_up(error) from error


class _Watch:
    """Ends this process if it stays inside a block after another process was lost.

    Attributes:
        depth: blocks that it is inside of.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._entered = 0

    def __enter__(self) -> None:
        self.depth += 1
        self._entered += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    def end_if_inside(self, why: str) -> None:
        """Ends the process if it is still in the same block after `GRACE_SECONDS`. Called in a thread of its own."""
        entered, latest = self._entered, time.monotonic() + GRACE_SECONDS
        while self.depth and self._entered == entered:
            if time.monotonic() > latest:
                end_process(why)
            time.sleep(_POLL_SECONDS)


class Follower:
    """A follower's connection to the leader.

    Args:
        channel: the connection.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def agree(self, options: str, free: int) -> int:
        """Returns the least of the numbers of all processes; see `Leader.agree`."""
        self._channel.send(jax.process_index(), host_name(), options, free)
        message = self._channel.receive()
        if message is None:
            raise HostLost("process 0 has ended before the model was loaded")
        agreed, least = message
        if not agreed:
            raise ValueError(
                "a process was started with other options than process 0, which names them"
            )
        return least

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()

    def follow(self, runner: Any) -> None:  # noqa: ANN401 - a `ModelRunner`, which imports this module
        """Does what the leader tells until it ends in order.

        A step is sent to the device while the one before still runs, as the leader does it; errors of the device are
        seen one step later.

        Args:
            runner: the runner of this process.

        Raises:
            HostLost: the leader has ended without a word. If this process cannot raise it, because it waits for a
                device, it is ended instead.
            Exception: a call has failed here, which the leader is told.
        """
        arrived: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        over, lost = threading.Event(), threading.Event()

        def listen() -> None:
            while (message := self._channel.receive()) is not None:
                arrived.put(message)
                if message[0] == "end":
                    return
            lost.set()
            arrived.put(["end", []])
            _LOG.error("%s", _LEADER_LOST)
            if not over.wait(GRACE_SECONDS):
                end_process(_LEADER_LOST)

        threading.Thread(target=listen, name="jaxkv-leader", daemon=True).start()
        before = None
        try:
            while (message := arrived.get())[0] != "end":
                name, arguments = message
                before = _repeat(runner, name, arguments, before)
        except BaseException as error:
            _skip_shutdown()
            if lost.is_set():
                raise HostLost(_LEADER_LOST) from error
            self._tell(f"{type(error).__name__}: {error}")
            raise
        finally:
            over.set()
            self._channel.close()
        if lost.is_set():
            _skip_shutdown()
            raise HostLost(_LEADER_LOST)

    def _tell(self, why: str) -> None:
        try:
            self._channel.send(why)
        except OSError:
            _LOG.error("process 0 does not hear why this process ends: %s", why)


def _repeat(runner: Any, name: str, arguments: list[Any], before: object) -> object:  # noqa: ANN401
    """Repeats a call of the leader; waits for the step before. Returns what it has sent to the device."""
    try:
        out = getattr(runner, name)(*arguments)
    except ProgramRefused as error:
        _LOG.info("a program is refused here as it is on process 0: %s", error)
        return before
    if name != "run_told":
        return before
    jax.block_until_ready(before)
    return out


def refuse_on_hosts(cache: CacheConfig, lora: LoraConfig | None) -> None:
    """Raises `ValueError` for options that need more than packed arrays to be sent to other hosts."""
    given = [
        ("host_bytes", cache.host_bytes),
        ("routed_experts", cache.routed_experts),
        ("lora", lora),
    ]
    wrong = [name for name, value in given if value]
    if wrong:
        raise ValueError(
            f"{listed(wrong)}: supported in one process only, and {jax.process_count()} compute this model; leave it "
            "out, or use one host"
        )


def meet() -> Leader | Follower:
    """Connects this process with the others of `jax.distributed`.

    Raises:
        HostLost: the others did not come in time.
    """
    from jax._src.distributed import global_state

    listener = Listener() if jax.process_index() == 0 else None
    card = np.zeros(2 + KEY_BYTES, np.uint8)
    if listener is not None:
        card[:] = np.frombuffer(listener.port.to_bytes(2, "little") + listener.key, np.uint8)
    card = np.asarray(multihost_utils.broadcast_one_to_all(card)).astype(np.uint8).tobytes()
    try:
        if listener is not None:
            count = jax.process_count() - 1
            return Leader(listener.accept(count, VALUES, seconds=MEET_SECONDS))
        # The host of the coordinator, which process 0 runs, is one that all processes reach.
        host = str(global_state.coordinator_address).rpartition(":")[0].strip("[]")
        port = int.from_bytes(card[:2], "little")
        return Follower(connect((host, port), card[2:], VALUES, seconds=MEET_SECONDS))
    except OSError as error:
        raise HostLost(f"the processes did not meet: {error}") from error
    finally:
        if listener is not None:
            listener.close()


def in_order[T](out: T) -> T:
    """Returns a program's output; on CPUs when it is computed.

    A GPU runs programs one after the other. A CPU may run two at once, and their sums would meet in another order than
    on the other hosts.
    """
    return jax.block_until_ready(out) if jax.default_backend() == "cpu" else out


def _skip_shutdown() -> None:
    """Lets this process end, when it does, without `jax.distributed`, which would wait minutes for the lost one."""

    def end() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    # What was registered last runs first. By then Python has printed the error that ends it, if there is one.
    atexit.register(end)


def end_process(why: str) -> None:
    """Ends this process, which waits for a device that will never answer, so that no exception can end it."""
    print(f"jaxkv: {why}; this process is ended", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    logging.shutdown()
    os._exit(1)
