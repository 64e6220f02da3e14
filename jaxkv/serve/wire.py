"""The messages between the HTTP process and the engine process, and their framing on a Unix socket.

A frame is a length of four bytes, little-endian, and one message in MessagePack. Both ends belong to one release, so
there is no version; msgspec checks the type of every field. Nothing is pickled.
"""

import select
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

MAX_FRAME_BYTES = 256 * 2**20
"""Longest frame that is read; a longer one means that the stream is damaged."""

_LENGTH_BYTES = 4


class WireDamaged(RuntimeError):
    """The other process sent bytes that are no message."""


# From the HTTP process to the engine.


class Hosts(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `jax.distributed.initialize`.

    Attributes:
        coordinator_address: host and port that process 0 listens on.
        num_processes: number of processes of the engine.
        process_id: number of this one; process 0 serves, and the others follow.
    """

    coordinator_address: str
    num_processes: int
    process_id: int


class Start(msgspec.Struct, tag="start", frozen=True, kw_only=True):
    """The first message: what the engine process is to load.

    Attributes:
        model, revision, dtype, max_model_len, implementation, ignore_config_keys, load_format, quantization,
            tensor_parallel_size: arguments of `jaxkv.LLM`.
        cache: fields of `CacheConfig` that differ from their defaults.
        engine: fields of `EngineConfig` that differ from their defaults.
        logits_processors: name -> "module:function" of each logits processor.
        lora: fields of `LoraConfig`; `None` for no adapters.
        lora_modules: name -> folder of each adapter.
        warm_up: (requests at once, tokens of a prompt, names of samplings) for which programs are compiled before
            `Ready`; see `jaxkv.serve.warm_samplings`.
        warm_up_in_background: most of these are compiled after `Ready`, see `jaxkv.LLM.warm_up`.
        programs: folder of compiled programs to load, see `jaxkv.LLM`; `None` for none.
        hang_seconds: a step that takes longer ends the engine process; time in compilation does not count.
        busy_seconds: see `jaxkv.serve.inbox.Inbox`.
        hosts: how this process joins the others of its engine; `None` for an engine of one process.
        sampling_defaults: `Ready.sampling_defaults` are those of the model's generation_config.json.
    """

    model: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    implementation: str | None = None
    ignore_config_keys: tuple[str, ...] = ()
    load_format: str = "auto"
    quantization: str | None = None
    tensor_parallel_size: int = 1
    cache: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    logits_processors: dict[str, str] = {}
    lora: dict[str, Any] | None = None
    lora_modules: dict[str, str] = {}
    warm_up: tuple[tuple[int, int, tuple[str, ...]], ...] = ()
    warm_up_in_background: bool = False
    programs: str | None = None
    hang_seconds: float = 30.0
    busy_seconds: float = 0.0
    hosts: Hosts | None = None
    sampling_defaults: bool = False


class Submit(msgspec.Struct, tag="submit", frozen=True, kw_only=True):
    """Begins all samples of one prompt.

    Attributes:
        call: number of the call, chosen by the HTTP process and never used again.
        ids: token ids of the prompt.
        sampling: see `jaxkv.config.plain_sampling`.
        priority: lower numbers are served first.
        salt: only requests of the same salt share cached pages.
    """

    call: int
    ids: list[int]
    sampling: dict[str, Any]
    priority: int = 0
    salt: bytes | None = None


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Ends one sample of a call, or all of them; a call or sample that has ended is left alone.

    Attributes:
        call: number of the call.
        sample: index of the sample; `None` for all.
    """

    call: int
    sample: int | None = None


class AskStats(msgspec.Struct, tag="ask", frozen=True):
    """Asks for `StatsReply`.

    Attributes:
        query: number that the reply repeats.
        pages: also report what `jaxkv.monitoring.inspection.draw` returns.
    """

    query: int
    pages: bool = False


ToEngine = Start | Submit | Abort | AskStats


# From the engine to the HTTP process.


class Ready(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """The engine has loaded its model and takes calls.

    Attributes:
        directory: the model directory, where the HTTP process finds the tokenizer and the chat template.
        max_model_len: longest prompt plus output, in tokens.
        vocab_size: number of the model's token ids.
        max_sequences: most sequences that run at once.
        eos_ids: ids that end a text.
        model_type: `model_type` of config.json.
        page_size, cache_tokens: see `jaxkv.replicas.router.block_sizes`.
        sampling_defaults: fields of `SamplingParams` for requests that do not give them.
    """

    directory: str
    max_model_len: int
    vocab_size: int
    max_sequences: int
    eos_ids: tuple[int, ...]
    model_type: str
    page_size: int = 64
    cache_tokens: int = 2**20
    sampling_defaults: dict[str, int | float] = {}


GENERATION_FAILED, NUMERICAL_ERROR = "generation_failed", "numerical_error"
"""What clients are told of a sample's error; the second one is that of logits that are not finite."""


class Ended(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """How a sample ended.

    Attributes:
        reason: "stop", "length", "abort" or "error", as in `jaxkv.engine.request.SampleOutput`.
        error: the message if the reason is "error".
        cached_tokens: prompt tokens that the prefix cache held.
        preemptions: how often the sample lost its pages.
        queue_seconds: from its arrival to its first step, or to its end without one.
        code: what clients are told if the reason is "error".
    """

    reason: str
    error: str | None
    cached_tokens: int
    preemptions: int
    queue_seconds: float
    code: str = GENERATION_FAILED


class Tokens(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """New tokens of one sample.

    Attributes:
        call: number of the call.
        sample: index of the sample.
        ids: the new token ids; may be empty on the last message.
        logprobs: one dict per id, token id -> natural log-probability; `None` if the request asked for none.
        ended: set on the last message of a sample.
    """

    call: int
    sample: int
    ids: list[int]
    logprobs: list[dict[int, float]] | None = None
    ended: Ended | None = None


class StepDone(msgspec.Struct, tag="step", frozen=True):
    """All new tokens since the frame before: one frame for each step of the engine.

    Attributes:
        tokens: one entry per sample with new tokens or an end.
    """

    tokens: list[Tokens]


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A call was not begun.

    Attributes:
        call: number of the call.
        message: what is wrong, for the user; the engine goes on.
        kind: "request" if the request can never be served, otherwise "engine".
    """

    call: int
    message: str
    kind: str = "request"


class PromptScored(msgspec.Struct, tag="scored", frozen=True):
    """The log-probabilities of a prompt that asked for them; sent once, before its first tokens.

    Attributes:
        call: number of the call.
        logprobs: per token of the prompt, token id -> natural log-probability; `None` for the first token.
    """

    call: int
    logprobs: list[dict[int, float] | None]


class StatsReply(msgspec.Struct, tag="stats", frozen=True):
    """The answer to `AskStats`.

    Attributes:
        query: its number.
        stats: the fields of `jaxkv.monitoring.stats.Stats` as plain values, and those of
            `jaxkv.monitoring.inspection.Picture` if pages were asked for.
    """

    query: int
    stats: dict[str, Any]


class Alive(msgspec.Struct, tag="alive", frozen=True):
    """A sign of life, which a thread sends each second, also while a step or a compilation lasts.

    Attributes:
        compiling: name of the program that is compiled; empty if there is none.
    """

    compiling: str = ""


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine process ends.

    Attributes:
        message: one line for the log.
        code: exit code of the server, see `jaxkv.serve.exit_codes`.
    """

    message: str
    code: int


FromEngine = Ready | StepDone | PromptScored | Refused | StatsReply | Alive | Failed


_ENCODER = msgspec.msgpack.Encoder()
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """Returns a message as one frame."""
    packed = bytearray(_LENGTH_BYTES)
    _ENCODER.encode_into(message, packed, _LENGTH_BYTES)
    packed[:_LENGTH_BYTES] = (len(packed) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
    return bytes(packed)


class Frames[M]:
    """Cuts a stream of bytes into messages.

    Args:
        decode: returns the message of one frame's body.
    """

    def __init__(self, decode: Callable[[bytes | bytearray | memoryview], M]) -> None:
        self._decode = decode
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Returns the messages that `data` completes.

        Raises:
            WireDamaged: the stream holds no messages.
        """
        self._bytes += data
        found, at = [], 0
        while len(self._bytes) >= at + _LENGTH_BYTES:
            body = at + _LENGTH_BYTES
            end = body + int.from_bytes(self._bytes[at:body], "little")
            if end - body > MAX_FRAME_BYTES:
                raise WireDamaged(f"a frame of {end - body} bytes, at most {MAX_FRAME_BYTES} come")
            if len(self._bytes) < end:
                break
            try:
                found.append(self._decode(bytes(self._bytes[body:end])))
            except msgspec.MsgspecError as error:
                raise WireDamaged(f"a frame is no message: {error}") from error
            at = end
        del self._bytes[:at]
        return found


def frames_to_engine() -> Frames[ToEngine]:
    """Returns the reader of the engine's end."""
    return Frames(_TO_ENGINE.decode)


def frames_from_engine() -> Frames[FromEngine]:
    """Returns the reader of the HTTP process's end."""
    return Frames(_FROM_ENGINE.decode)


class FrameWriter:
    """Writes frames to a non-blocking socket and keeps what the other end has not taken yet.

    So the engine never waits for an HTTP process that is busy for a moment.

    Args:
        end: the socket; it becomes non-blocking for writes only (`MSG_DONTWAIT`).
        most: most bytes that are kept.
    """

    def __init__(self, end: socket.socket, most: int = MAX_FRAME_BYTES) -> None:
        self._end = end
        self._most = most
        self._kept = bytearray()

    @property
    def num_kept(self) -> int:
        """Bytes that are not sent yet."""
        return len(self._kept)

    def write(self, message: ToEngine | FromEngine) -> None:
        """Sends a message, or keeps it for the next call.

        Raises:
            OSError: the other end is closed.
            WireDamaged: the other end has not read for so long that too much is kept.
        """
        self._kept += frame(message)
        self.flush()
        if len(self._kept) > self._most:
            raise WireDamaged(f"{len(self._kept)} bytes wait for a process that does not read")

    def flush(self, *, seconds: float = 0.0) -> None:
        """Sends what is kept, as much as the other end takes.

        Args:
            seconds: how long to wait for the other end if it takes nothing more now.

        Raises:
            OSError: the other end is closed.
        """
        latest = time.monotonic() + seconds
        while self._kept:
            try:
                sent = self._end.send(self._kept, socket.MSG_DONTWAIT)
            except BlockingIOError:
                left = latest - time.monotonic()
                if left <= 0:
                    return
                self._wait(left)
            else:
                del self._kept[:sent]

    def _wait(self, seconds: float) -> None:
        """Waits until the other end takes more, at most for a time."""
        poll = select.poll()
        poll.register(self._end, select.POLLOUT)
        poll.poll(1000 * seconds)
