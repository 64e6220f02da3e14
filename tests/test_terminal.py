"""Notes, log messages and the status line never interrupt a line of an answer."""

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jaxkv
from jaxkv.terminal import Screen

PRINTS = """
import logging
from jaxkv.terminal import Screen
screen = Screen()
with screen.logged():
    screen.write("an ans")
    logging.getLogger("jaxkv.engine").warning("compiling %s", "decode")
    screen.write("wer")
print("after")
"""


def printed(**streams):
    root = str(Path(jaxkv.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", PRINTS],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": root},
        **streams,
    )
    return run.stdout, run.stderr


def test_a_warning_in_an_answer_begins_a_line_where_one_log_shows_both():
    shown, _ = printed(stderr=subprocess.STDOUT)
    assert shown == "an ans\njaxkv: warning: compiling decode\nwer\nafter\n"


def test_an_answer_in_a_file_of_its_own_is_not_broken_by_a_warning():
    shown, told = printed(stderr=subprocess.PIPE)
    assert shown == "an answer\nafter\n"
    assert told == "jaxkv: warning: compiling decode\n"


def test_python_warnings_are_notes_too_and_afterwards_everything_is_as_before(capsys):
    screen, before = Screen(), (logging.getLogger().handlers[:], warnings.showwarning)
    with screen.logged(), warnings.catch_warnings():
        warnings.simplefilter("always")
        # What `captureWarnings` has installed, which pytest replaces.
        logging.getLogger("py.warnings").warning("odd")
        logging.getLogger("jaxkv").info("not shown")
    assert capsys.readouterr().err == "jaxkv: warning: odd\n"
    assert (logging.getLogger().handlers, warnings.showwarning) == before


def test_a_status_is_shown_on_a_terminal_until_the_next_output(capsys, monkeypatch):
    screen = Screen()
    screen.status("compiling decode")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    screen.status("compiling decode")
    screen.write("text")
    # Inside a line there is no room for a status.
    screen.status("compiling decode")
    screen.end_line()
    screen.end_line()
    captured = capsys.readouterr()
    assert captured.err == "\r\x1b[Kcompiling decode\r\x1b[K"
    assert captured.out == "text\n"


def test_a_log_that_nobody_reads_any_more_ends_nothing(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", closefd=True) as broken, Screen().logged():
        monkeypatch.setattr(sys, "stderr", broken)
        logging.getLogger("jaxkv").warning("still here")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # So that closing it can flush.
