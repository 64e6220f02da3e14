"""`Screen`: generated text on stdout; notes, log messages and a status line on stderr."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class Screen:
    """Prints to stdout and stderr. On one terminal, a line of stderr never continues an unfinished line of stdout."""

    def __init__(self) -> None:
        self._mid_line = False
        self._has_status = False

    def write(self, text: str) -> None:
        """Prints text on stdout at once, without a newline."""
        if text:
            self.status("")
            sys.stdout.write(text)
            sys.stdout.flush()
            self._mid_line = not text.endswith("\n")

    def end_line(self) -> None:
        """Ends the line of stdout if one has begun."""
        if self._mid_line:
            self.write("\n")

    def note(self, text: str) -> None:
        """Prints a line on stderr, after ending an unfinished line of stdout if both go to the same terminal or log."""
        self.status("")
        if self._mid_line and _show_together():
            sys.stderr.write("\n")
            self._mid_line = False
        print(text, file=sys.stderr, flush=True)

    def status(self, text: str) -> None:
        """Shows a status line on a terminal, between lines of text, until the next output; "" removes it."""
        if (text and not self._mid_line and sys.stderr.isatty()) or self._has_status:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._has_status = bool(text)

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Prints warnings and log messages of warning level and above as notes; in the end it ends stdout's line."""
        handler = _NoteHandler(self)
        root = logging.getLogger()
        root.addHandler(handler)
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            root.removeHandler(handler)
            self.status("")
            self.end_line()


class _NoteHandler(logging.Handler):
    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._screen.note(f"jaxkv: {record.levelname.lower()}: {self.format(record).strip()}")
        except OSError:
            # A log without a reader must not end the program that writes it.
            self.handleError(record)


def _show_together() -> bool:
    """Whether stdout and stderr are the same terminal, pipe or file."""
    try:
        return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
    except OSError:  # A stream without a descriptor.
        return False
