"""`GrammarTrial`: compiles grammars in a process with limits of time and memory, before they are used."""

import json
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from jaxkv.text.line_worker import LineWorker

MAX_SECONDS = 5
MAX_MEMORY_BYTES = 2 * 2**30
_VOCABULARY_SECONDS = 120
_PROGRAM = Path(__file__).with_name("trial_process.py")


class GrammarTrial:
    """Tries grammars in a worker process, which is started at the first use. Thread-safe.

    A worker that exceeds a limit is killed, and the next use starts another.

    Args:
        vocabulary: the arguments of `trial_process.build_vocabulary`.
    """

    def __init__(self, vocabulary: Mapping[str, object]) -> None:
        self._vocabulary = json.dumps(vocabulary).encode() + b"\n"
        self._lock = threading.Lock()
        self._worker: LineWorker | None = None

    def start(self) -> None:
        """Starts the worker process, which reads the vocabulary.

        Raises:
            ValueError: llguidance cannot read the tokenizer.
        """
        with self._lock:
            self._started()

    def check(self, kind: str, source: str) -> None:
        """Raises `ValueError` if a grammar is not valid, or takes too much time or memory to compile.

        Args:
            kind: see `trial_process.build_matcher`.
            source: see `trial_process.build_matcher`.
        """
        request = json.dumps({"kind": kind, "source": source}).encode() + b"\n"
        with self._lock:
            worker, began = self._started(), time.monotonic()
            answer = worker.ask(request, MAX_SECONDS)
            slow = time.monotonic() - began >= MAX_SECONDS
            if answer is None:
                self._stop()
        if answer is None:
            limit = (
                f"compiling it took more than {MAX_SECONDS} s"
                if slow
                else f"compiling it took more than {MAX_MEMORY_BYTES >> 20} MiB of memory, or too much stack"
            )
            raise ValueError(
                f"the grammar of structured_outputs is too complex: {limit}; make it smaller"
            )
        if "error" in answer:
            raise ValueError(f"the grammar of structured_outputs cannot be used: {answer['error']}")

    def close(self) -> None:
        """Ends the worker process if there is one; a later `check` starts another."""
        with self._lock:
            self._stop()

    def _started(self) -> LineWorker:
        if self._worker is None or not self._worker.is_alive():
            self._stop()
            worker = LineWorker(_PROGRAM, (MAX_MEMORY_BYTES, math.ceil(MAX_SECONDS)))
            if worker.ask(self._vocabulary, _VOCABULARY_SECONDS) is None:
                worker.stop()
                raise ValueError(
                    "llguidance cannot read the model's tokenizer, so structured_outputs cannot be used with it"
                )
            self._worker = worker
        return self._worker

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
        self._worker = None
