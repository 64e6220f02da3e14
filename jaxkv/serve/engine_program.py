"""The program of the engine process: `python -m jaxkv.serve.engine_program FD`, started by `jaxkv serve`.

It reads commands from a socket, steps the engine, and writes one frame per step. It ends when the socket does. Two
threads: the main thread reads between two steps and waits for the socket when there is no work, and the watchdog
reports that the process is alive. A call with a grammar is prepared in a thread of its own, and programs are compiled
in another one if they come in the background.
"""

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from types import MappingProxyType

import jax

from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.lora import LoraConfig
from jaxkv.config.plain_sampling import unpack_sampling
from jaxkv.engine.command_loop import CommandLoop, StepTimer
from jaxkv.engine.first_runs import run_steps
from jaxkv.engine.recovery import is_fatal, is_loss
from jaxkv.engine.request import Request
from jaxkv.errors import (
    STEP_FAILURES,
    CachePoisoned,
    HostLost,
    OutOfPages,
    OutOfStates,
    ProgramRefused,
)
from jaxkv.llm import LLM
from jaxkv.models.hf_config.generation_json import load_sampling_defaults
from jaxkv.monitoring.inspection import draw
from jaxkv.options import processor_functions
from jaxkv.replicas.router import block_sizes
from jaxkv.runner.hosts import Leader
from jaxkv.serve import exit_codes
from jaxkv.serve.inbox import Inbox
from jaxkv.serve.served_sample import ServedSample, take_news
from jaxkv.serve.warm_samplings import warm_up_served
from jaxkv.serve.wire import (
    Abort,
    Alive,
    AskStats,
    Failed,
    FrameWriter,
    FromEngine,
    PromptScored,
    Ready,
    Refused,
    Start,
    StatsReply,
    StepDone,
    Submit,
    ToEngine,
    WireDamaged,
)
from jaxkv.weights.directory import read_config_json

_LOG = logging.getLogger(__name__)

_ALIVE_SECONDS = 1.0
_END_SECONDS = 10.0
"""How long a step may go on after the HTTP process has gone."""

_LAST_WORDS_SECONDS = 5.0
_LOADING_POLL_SECONDS = 0.5
_SWITCH_SECONDS = 0.0002
"""How long the main thread waits for the interpreter while another thread prepares a grammar. Python's own 5 ms would
be added to each step meanwhile, several times."""


class _Sender:
    """Writes messages of several threads to the socket.

    Args:
        end: the socket.
        lost: called once the other end does not read any more; later messages are dropped.
    """

    def __init__(self, end: socket.socket, lost: Callable[[], None]) -> None:
        self._writer = FrameWriter(end)
        self._lost = lost
        self._lock = threading.Lock()
        self._is_lost = False

    @property
    def has_kept(self) -> bool:
        """Whether bytes wait until the other end takes them."""
        return not self._is_lost and self._writer.num_kept > 0

    def send(self, message: FromEngine, *, seconds: float = 0.0) -> None:
        """Sends a message, or keeps it; waits at most `seconds` for the other end to take it."""
        self._write(message, seconds)

    def flush(self) -> None:
        """Sends what was kept, as much as the other end takes now."""
        self._write(None, 0.0)

    def _write(self, message: FromEngine | None, seconds: float) -> None:
        with self._lock:
            if self._is_lost:
                return
            try:
                if message is not None:
                    self._writer.write(message)
                self._writer.flush(seconds=seconds)
            except (OSError, RuntimeError) as error:
                _LOG.error("the HTTP process does not read: %s", error)
                self._is_lost = True
        if self._is_lost:
            self._lost()


class EngineServer:
    """Serves the calls of one HTTP process with one `LLM`.

    Args:
        llm: the model.
        inbox: the socket, of which `Start` was read.
        hang_seconds: a step that takes longer ends the process.
        sampling_defaults: see `Ready`.
    """

    def __init__(
        self,
        llm: LLM,
        inbox: Inbox,
        hang_seconds: float,
        sampling_defaults: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        llm.lock.lend()
        self._llm = llm
        self._engine = llm.engine
        self._inbox = inbox
        self._hang_seconds = hang_seconds
        self._sampling_defaults = sampling_defaults
        self._loop = CommandLoop(llm.engine, llm.lock, self._deliver, self)
        self._sender = _Sender(inbox.end, self._loop.end)
        self._calls: dict[int, list[ServedSample]] = {}

    def run(self) -> None:
        """Serves until the socket is closed.

        Raises:
            Exception: the engine has failed.
        """
        self._sender.send(self._facts())
        if self._engine.runner.programs.pending:
            threading.Thread(target=self._await_programs, name="jaxkv-await", daemon=True).start()
        threading.Thread(target=self._watch, name="jaxkv-watchdog", daemon=True).start()
        if isinstance(hosts := self._engine.runner.hosts, Leader):
            # Also while no request runs.
            hosts.on_lost = self._fail
        self._loop.run()

    def _await_programs(self) -> None:
        """Excludes what the programs of the background have left from garbage collection, once all are compiled."""
        # The thread that compiles logs what fails.
        with suppress(Exception):
            self._llm.finish_warm_up()
        # As in `main`, but without a collection, for which requests would wait.
        self._loop.put(gc.freeze)

    def _fail(self, error: BaseException) -> None:
        """Ends the loop by an error; any thread may."""

        def fail() -> None:
            raise error

        self._loop.put(fail)

    def say_failed(self, error: BaseException) -> int:
        """Tells the HTTP process why the engine has failed; returns the exit code."""
        code = exit_code_of(error)
        text = " ".join(str(error).split())[:1000]
        failed = Failed(f"{type(error).__name__}: {text}", code)
        self._sender.send(failed, seconds=_LAST_WORDS_SECONDS)
        return code

    def _facts(self) -> Ready:
        llm = self._llm
        page_size, cache_tokens = block_sizes(llm.layout, llm.budget.counts)
        model_type = read_config_json(llm.directory).get("model_type", "")
        return Ready(
            directory=str(llm.directory),
            max_model_len=llm.max_model_len,
            vocab_size=llm.model.vocab_size,
            max_sequences=self._engine.sequence_runner.max_rows,
            eos_ids=llm.eos_ids,
            model_type=model_type if isinstance(model_type, str) else "",
            page_size=page_size,
            cache_tokens=cache_tokens,
            sampling_defaults=dict(self._sampling_defaults),
        )

    # The main thread; as the inlet of its loop, it reads the socket.

    def receive(self, *, wait: bool) -> None:
        """Handles all messages that have arrived; see `jaxkv.engine.command_loop.Inlet`."""
        try:
            if wait:
                self._inbox.wait(writable=self._sender.has_kept)
            if self._sender.has_kept:
                self._sender.flush()
            arrived = self._inbox.take()
        except (OSError, WireDamaged) as error:
            _LOG.error("the connection to the HTTP process is damaged: %s", error)
            self._loop.end()
            return
        for message in arrived:
            self._take(message)
        if self._inbox.is_closed:
            self._loop.end()

    def wake(self) -> None:
        """Ends a `receive` that waits."""
        self._inbox.wake()

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit(call=call) if "structured_outputs" in message.sampling:
                # Other messages must not wait for a grammar, which may take seconds to compile.
                self._hold(call)
                threading.Thread(
                    target=self._prepare_held, args=(message,), name="jaxkv-grammar", daemon=True
                ).start()
            case Submit():
                self._submit(message)
            case Abort(call, sample):
                self._abort(call, sample)
            case AskStats(query, pages):
                self._answer(query, pages=pages)
            case Start():
                raise RuntimeError("a second Start came")

    def _submit(self, message: Submit) -> None:
        """Begins a call, or refuses it."""
        if (requests := self._prepared(message)) is not None:
            self._accept(message.call, requests)

    def _prepare_held(self, message: Submit) -> None:
        """Prepares a call whose place is held, in a thread of its own, and passes it to the main thread."""
        call, requests = message.call, self._prepared(message)
        if requests is None:
            self._loop.put(lambda: self._remove_held(call))
        else:
            self._loop.put(lambda: self._accept_held(call, requests))

    def _prepared(self, message: Submit) -> list[Request] | None:
        """Returns the requests of a call; refuses it and returns `None` if they cannot be served."""
        try:
            return self._llm.requests(
                message.ids,
                unpack_sampling(message.sampling),
                priority=message.priority,
                salt=message.salt,
            )
        except (ValueError, ProgramRefused) as error:
            self._sender.send(Refused(message.call, str(error)))
        except STEP_FAILURES as error:
            _LOG.exception("a call could not be prepared")
            self._sender.send(Refused(message.call, type(error).__name__, "engine"))
        return None

    def _hold(self, call: int) -> None:
        """Holds the place of a call that is still prepared: without samples, so that an abort finds the call."""
        self._calls[call] = []

    def _remove_held(self, call: int) -> None:
        """Forgets a call that was refused after `_hold`."""
        self._calls.pop(call, None)

    def _accept_held(self, call: int, requests: list[Request]) -> None:
        """Accepts a call unless it was aborted since `_hold`."""
        if self._calls.pop(call, None) is not None:
            self._accept(call, requests)

    def _accept(self, call: int, requests: list[Request]) -> None:
        try:
            samples = self._engine.add(requests, as_text=False)
        except (OutOfPages, OutOfStates):
            self._accept_later(call, requests)
        except ValueError as error:
            self._sender.send(Refused(call, str(error)))
        except STEP_FAILURES as error:
            _LOG.exception("a call could not be begun")
            self._sender.send(Refused(call, type(error).__name__, "engine"))
        else:
            self._calls[call] = [ServedSample(each) for each in samples]
            if (scores := samples[0].prompt_logprobs) is not None:
                self._sender.send(PromptScored(call, scores))

    def _accept_later(self, call: int, requests: list[Request]) -> None:
        """Tries a call again after the next step, since others hold the pages that its `prompt_logprobs` need."""
        if not self._engine.has_work:
            self._sender.send(Refused(call, "too few free pages", "engine"))
            return
        self._hold(call)
        self._loop.put_later(lambda: self._accept_held(call, requests))

    def _abort(self, call: int, sample: int | None) -> None:
        samples = self._calls.get(call, [])
        for index, each in enumerate(samples):
            if sample is None or index == sample:
                self._engine.abort(each.state)
                each.is_over = True
        if all(each.is_over for each in samples):
            self._calls.pop(call, None)

    def _answer(self, query: int, *, pages: bool) -> None:
        stats = asdict(self._llm.stats())
        if pages:
            stats |= asdict(draw(self._engine))
        stats["fallbacks"] = [[*key, count] for key, count in stats["fallbacks"].items()]
        self._sender.send(StatsReply(query, stats))

    def _deliver(self) -> None:
        """Sends the new tokens of all calls in one frame."""
        if news := take_news(self._calls):
            self._sender.send(StepDone(news))

    # The watchdog's thread.

    def _watch(self) -> None:
        timer = StepTimer(_ALIVE_SECONDS, time.monotonic())
        while True:
            if self._inbox.peer_is_gone(_ALIVE_SECONDS):
                # The main thread ends this process after its step. One that does not end must not keep it.
                time.sleep(_END_SECONDS)
                os._exit(exit_codes.FAILED)
            taken = timer.seconds(self._loop.step_began, time.monotonic())
            self._sender.send(Alive(self._loop.compiling))
            if taken > self._hang_seconds:
                self._end_hung(taken)

    def _end_hung(self, taken: float) -> None:
        faulthandler.dump_traceback(all_threads=True)
        text = f"a step has taken {taken:.0f} s, at most {self._hang_seconds:.0f} s are allowed"
        self._sender.send(Failed(text, exit_codes.HUNG), seconds=_LAST_WORDS_SECONDS)
        os._exit(exit_codes.HUNG)


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code for an error that ended the engine."""
    if is_fatal(error):
        return exit_codes.DEVICE_BROKEN
    return exit_codes.OUT_OF_MEMORY if is_loss(error) else exit_codes.FAILED


def _first_message(inbox: Inbox) -> Start:
    """Waits for the message that says what to load."""
    message = inbox.first()
    if message is None:
        sys.exit(exit_codes.FAILED)
    if not isinstance(message, Start):
        raise RuntimeError(f"the first message must be Start, got {type(message).__name__}")
    return message


def _end_with(inbox: Inbox) -> Callable[[], None]:
    """Ends this process if the other end is closed while the model loads; returns what ends this watch."""
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            if inbox.peer_is_gone(_LOADING_POLL_SECONDS):
                os._exit(exit_codes.FAILED)

    threading.Thread(target=watch, name="jaxkv-loading", daemon=True).start()
    return over.set


def _load(start: Start) -> LLM:
    if start.hosts is not None:
        jax.distributed.initialize(
            start.hosts.coordinator_address, start.hosts.num_processes, start.hosts.process_id
        )
    llm = LLM(
        start.model,
        revision=start.revision,
        dtype=start.dtype,
        max_model_len=start.max_model_len,
        implementation=start.implementation,
        ignore_config_keys=start.ignore_config_keys,
        load_format=start.load_format,
        quantization=start.quantization,
        tensor_parallel_size=start.tensor_parallel_size,
        cache=CacheConfig(**start.cache),
        engine=EngineConfig(**start.engine),
        logits_processors=processor_functions(start.logits_processors),
        lora=None if start.lora is None else LoraConfig(**start.lora),
        programs=start.programs,
    )
    if _follows(start):
        return llm
    for name, path in start.lora_modules.items():
        llm.add_lora(name, path)
    _warm_up(llm, start)
    return llm


def _follows(start: Start) -> bool:
    """Returns whether this process follows another one, which serves."""
    return start.hosts is not None and start.hosts.process_id > 0


def _follow(llm: LLM, inbox: Inbox) -> int:
    """Follows the process that serves, until it ends; returns the exit code."""
    over = _end_with(inbox)
    try:
        llm.follow()
    except BaseException as error:
        _LOG.exception("the engine has failed")
        ended = Failed(f"{type(error).__name__}: {error}", exit_code_of(error))
    else:
        ended = Failed("process 0 has ended in order", exit_codes.OK)
        jax.distributed.shutdown()
    finally:
        over()
    _Sender(inbox.end, lambda: None).send(ended, seconds=_LAST_WORDS_SECONDS)
    return ended.code


def _warm_up(llm: LLM, start: Start) -> None:
    """Compiles the programs of `Start.warm_up`, and runs each program that is compiled by now."""
    warm_up_served(llm, start.warm_up, background=start.warm_up_in_background)
    if programs := llm.engine.runner.programs.manifest():
        with llm.lock.held():
            run_steps(llm.engine, [program.spec for program in programs])


def main() -> int:
    """Serves the socket whose number is the only argument; returns the exit code."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    # The HTTP process decides when to end. A terminal sends Ctrl-C to both.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    inbox = Inbox(socket.socket(fileno=int(sys.argv[1])))
    start = _first_message(inbox)
    loaded = _end_with(inbox)
    try:
        llm = _load(start)
        defaults = load_sampling_defaults(llm.directory) if start.sampling_defaults else {}
    except (ValueError, OSError, RuntimeError, MemoryError, CachePoisoned, HostLost) as error:
        text = " ".join(str(error).split())
        sender = _Sender(inbox.end, lambda: None)
        sender.send(Failed(text, exit_codes.REFUSED), seconds=_LAST_WORDS_SECONDS)
        return exit_codes.REFUSED
    finally:
        loaded()
    # What is loaded by now stays; the garbage collector need not look at it again between steps.
    gc.collect()
    gc.freeze()
    if _follows(start):
        return _follow(llm, inbox)
    inbox.busy_seconds = start.busy_seconds
    server = EngineServer(llm, inbox, start.hang_seconds, defaults)
    try:
        server.run()
    except BaseException as error:
        _LOG.exception("the engine has failed")
        return server.say_failed(error)
    if (hosts := llm.engine.runner.hosts) is not None:
        hosts.close()
        # All processes leave together; one whose coordinator is gone would be aborted.
        jax.distributed.shutdown()
    inbox.close()
    return exit_codes.OK


if __name__ == "__main__":
    code = main()
    # Not `sys.exit`: daemon threads may be inside JAX, which would crash while Python ends.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
