"""An engine process without a model, for tests of the server. `Start.model` names what it does; see `main`."""

import os
import select
import signal
import socket
import sys
import time

from jaxkv.serve import exit_codes
from jaxkv.serve.wire import (
    Abort,
    Ended,
    Failed,
    Start,
    StepDone,
    Submit,
    Tokens,
    frame,
    frames_to_engine,
)
from tests.serve.fake_engine import FACTS

LAST = Ended("length", None, 0, 0, 0.0)


def main():
    """Serves; each call gets a token every few milliseconds."""
    end = socket.socket(fileno=int(sys.argv[1]))
    frames, started, left = frames_to_engine(), None, {}
    while True:
        if select.select([end], [], [], 0.002 if left else None)[0]:
            data = end.recv(2**16)
            if not data:
                return exit_codes.OK
            for message in frames.feed(data):
                match message:
                    case Start():
                        started = message
                        begin(end, started.model)
                    case Submit(call=call):
                        left[call] = message.sampling.get("max_tokens", 16)
                        fail(end, started.model)
                    case Abort(call):
                        left.pop(call, None)
        if left:
            step = [
                Tokens(call, 0, [7], None, LAST if n == 1 else None) for call, n in left.items()
            ]
            left = {call: n - 1 for call, n in left.items() if n > 1}
            end.sendall(frame(StepDone(step)))


def begin(end, what):
    """Loads, or not."""
    if what == "refuses":
        end.sendall(frame(Failed("there is no such model", exit_codes.REFUSED)))
        sys.exit(exit_codes.REFUSED)
    if what == "crashes":
        sys.exit(exit_codes.FAILED)
    if what == "loads for ever":
        while end.recv(2**16):
            pass
        sys.exit(exit_codes.OK)
    if what == "has no tokenizer to read":
        end.sendall(frame(FACTS.__replace__(directory="/no/such/directory")))
        return
    end.sendall(frame(FACTS))


def fail(end, what):
    """Ends at the first call, if it is to."""
    if what == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hangs":
        end.sendall(frame(Failed("a step has taken too long", exit_codes.HUNG)))
        sys.exit(exit_codes.HUNG)
    if what == "loses its memory without a word":
        sys.exit(exit_codes.OUT_OF_MEMORY)
    if what == "does not listen":
        while True:
            time.sleep(60)


if __name__ == "__main__":
    sys.exit(main())
