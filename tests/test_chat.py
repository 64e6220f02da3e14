"""`jaxkv chat`: the messages it keeps, the ends of answers, and typed, pasted and piped messages."""

import hashlib
import io
import json
import os
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path

import pytest

from jaxkv import cli
from jaxkv.cli import main
from jaxkv.config.sampling import SamplingParams
from tests.fake_llm import FakeLLM


def talk(monkeypatch, llm, *said, arguments=()):
    """Runs `chat` with lines that come through a pipe; an exception is raised where it stands."""

    def lines():
        for line in said:
            if not isinstance(line, str):
                raise line
            yield line + "\n"

    class Pipe(io.StringIO):
        def __iter__(self):
            return lines()

    monkeypatch.setattr(cli, "_llm", lambda options, screen: llm)
    monkeypatch.setattr(sys, "stdin", Pipe())
    return main(["chat", *arguments])


def turn(said, answer="yes"):
    return [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]


def test_chat_remembers_the_conversation_until_the_pipe_ends(capsys, monkeypatch):
    llm = FakeLLM()
    assert talk(monkeypatch, llm, "one", "  ", "two") == 0
    assert llm.conversations == [turn("one")[:1], turn("one") + turn("two")[:1]]
    captured = capsys.readouterr()
    assert captured.out == "yes\nyes\n"
    assert captured.err == ""


def test_ctrl_c_between_answers_ends_the_command_with_code_130(monkeypatch):
    llm = FakeLLM()
    assert talk(monkeypatch, llm, "one", KeyboardInterrupt()) == 130
    assert len(llm.conversations) == 1


def test_chat_asks_nothing_of_the_user_of_a_model_that_cannot_chat(capsys, monkeypatch):
    asked = AssertionError("the user was asked")
    assert talk(monkeypatch, FakeLLM(can_chat=False), asked) == 2
    assert capsys.readouterr().err == "jaxkv: the model directory has no chat template\n"


def test_chat_forgets_a_message_that_outgrows_the_context_and_names_reset(capsys, monkeypatch):
    llm = FakeLLM(context=3)
    assert talk(monkeypatch, llm, "one", "two", "three", "four") == 0
    assert llm.conversations == [turn("one")[:1], turn("one") + turn("two")[:1]]
    hint = "/reset begins a new conversation (this message is forgotten)"
    assert capsys.readouterr().err == f"jaxkv: a prompt leaves no room; {hint}\n" * 2


def test_chat_names_the_option_of_the_command_for_a_longer_context(capsys, monkeypatch):
    llm = FakeLLM()

    def stream(prompt, sampling):
        raise ValueError("a prompt leaves no room; shorten it or raise max_model_len")

    llm.stream = stream
    assert talk(monkeypatch, llm, "one") == 0
    assert "shorten it or raise --max-model-len (this message" in capsys.readouterr().err


def test_reset_begins_a_new_conversation_in_which_there_is_room(capsys, monkeypatch):
    llm = FakeLLM(context=3)
    assert talk(monkeypatch, llm, "one", "two", "three", "/reset", "four") == 0
    assert llm.conversations[-1] == turn("four")[:1]
    assert "a new conversation begins" in capsys.readouterr().err


def test_chat_goes_on_with_a_shorter_message_after_one_that_was_too_long(capsys, monkeypatch):
    llm = FakeLLM()
    refuse = llm.chat_prompt

    def chat_prompt(messages):
        if any(message["content"] == "long" for message in messages):
            raise ValueError("too long")
        return refuse(messages)

    llm.chat_prompt = chat_prompt
    assert talk(monkeypatch, llm, "long", "short") == 0
    assert llm.conversations == [turn("short")[:1]]
    # With nothing to forget, a new conversation would not help.
    assert capsys.readouterr().err == "jaxkv: too long (this message is forgotten)\n"


def test_commands_are_not_sent_to_the_model(capsys, monkeypatch):
    llm = FakeLLM()
    said = ["/help", "/nonesuch", "/etc/passwd is a file", "/exit", AssertionError("asked again")]
    assert talk(monkeypatch, llm, *said) == 0
    assert llm.conversations == [turn("/etc/passwd is a file")[:1]]
    told = capsys.readouterr().err
    for word in ("/reset", "/help", "/exit", "there is no command /nonesuch"):
        assert word in told


def test_an_interrupt_ends_the_answer_alone_and_its_text_is_remembered(capsys, monkeypatch):
    llm = FakeLLM(interrupted=1)
    assert talk(monkeypatch, llm, "one", "two") == 0
    assert llm.conversations == [turn("one")[:1], turn("one", "ye") + turn("two")[:1]]
    assert llm.closed == 2
    captured = capsys.readouterr()
    assert captured.out == "ye\nye\n"
    assert captured.err == "[interrupted]\n" * 2


def test_a_message_that_is_interrupted_before_its_answer_is_forgotten(capsys, monkeypatch):
    llm = FakeLLM(interrupted=0)
    assert talk(monkeypatch, llm, "one", "two") == 0
    assert llm.conversations == [turn("one")[:1], turn("two")[:1]]
    assert capsys.readouterr().err == "[interrupted; the message is forgotten]\n" * 2


def test_an_answer_that_was_cut_is_marked_with_the_limit_that_cut_it(capsys, monkeypatch):
    llm = FakeLLM(reason="length")
    assert talk(monkeypatch, llm, "one", arguments=["--max-tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "yes\n"
    assert captured.err == "[cut after 2 tokens; --max-tokens N allows more]\n"
    llm.max_model_len = 3
    assert talk(monkeypatch, llm, "one") == 0
    assert capsys.readouterr().err == (
        "[cut: the conversation fills the context of 3 tokens; /reset begins a new one]\n"
    )


def test_logits_that_are_not_finite_end_the_command_with_code_2(capsys, monkeypatch):
    asked = AssertionError("asked again")
    assert talk(monkeypatch, FakeLLM(reason="error"), "one", asked) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "not finite" in captured.err
    assert captured.out == "yes\n"


def test_generation_config_json_chooses_the_sampling_that_no_flag_chooses(tmp_path, monkeypatch):
    recommended = {"temperature": 0.5, "top_p": 0.75, "top_k": 9, "min_p": 0.25}
    recommended["repetition_penalty"] = 1.5
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended | {"do_sample": True}))
    llm = FakeLLM(directory=tmp_path)
    base = SamplingParams(temperature=0.0, max_tokens=1024)
    assert talk(monkeypatch, llm, "one") == 0
    assert llm.sampling == replace(base, **recommended)
    given = "--temperature 0 --top-k 3 --min-p 0 --repetition-penalty 1"
    assert talk(monkeypatch, llm, "one", arguments=given.split()) == 0
    assert llm.sampling == replace(base, top_p=0.75, top_k=3)
    llm = FakeLLM()
    assert talk(monkeypatch, llm, "one") == 0
    assert llm.sampling == base


CHILD = """
import hashlib, os, signal, sys, termios, time
from fcntl import ioctl
# A shell that runs the tests in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The terminal sends its interrupts to this session.
ioctl(0, termios.TIOCSCTTY, 0)
from jaxkv import cli
from jaxkv.engine.request import Piece
from tests.fake_llm import FakeLLM

class Echo(FakeLLM):
    def stream(self, prompt, sampling):
        said = prompt[-1]["content"]
        if said == "wait":
            yield Piece(text="waiting", token_id=1)
            while not os.path.exists(sys.argv[1]):
                time.sleep(0.01)
        digest = hashlib.sha256(said.encode()).hexdigest()[:8]
        yield Piece(text=f"<{len(said)} {digest}>", token_id=1, finish_reason="stop")

cli._llm = lambda options, screen: Echo()
sys.exit(cli.main(["chat"]))
"""


class Terminal:
    """A pseudo-terminal with a `jaxkv chat` in it whose model answers with a message's length and hash."""

    def __init__(self, flag):
        self.master, self.slave = os.openpty()
        ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.modes = termios.tcgetattr(self.slave)
        root = str(Path(cli.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(flag)],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONPATH": root},
        )
        self.shown, self.read_up_to = "", 0

    def type(self, keys):
        """Presses keys while the screen is read, since both buffers are small."""
        unsent = keys.encode()
        while unsent:
            readable, writable, _ = select.select([self.master], [self.master], [], 60)
            if readable:
                self.shown += os.read(self.master, 65536).decode(errors="replace")
            if writable:
                unsent = unsent[os.write(self.master, unsent[:256]) :]

    def expect(self, text):
        """Waits until the screen shows a text after what was expected last."""
        deadline = time.monotonic() + 60
        while (at := self.shown.find(text, self.read_up_to)) < 0:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} was not shown: {self.shown[self.read_up_to :]!r}"
            if select.select([self.master], [], [], left)[0]:
                self.shown += os.read(self.master, 65536).decode(errors="replace")
        self.read_up_to = at + len(text)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(tmp_path):
    made = Terminal(tmp_path / "flag")
    try:
        made.expect(">")
        yield made
    finally:
        made.close()


def heard(message):
    return f"<{len(message)} {hashlib.sha256(message.encode()).hexdigest()[:8]}>"


def pasted(text):
    return f"\x1b[200~{text}\x1b[201~"


LONG = "".join(f"word{number} " for number in range(1300))
LINES = "one\ntwo\nthree"


def test_a_terminal_takes_long_lines_arrow_keys_and_pastes_of_several_lines(terminal):
    assert len(LONG) > 10_000
    terminal.type(LONG + "\r")
    terminal.expect(heard(LONG))
    terminal.type("ac\x1b[Db\r")
    terminal.expect(heard("abc"))
    terminal.type(pasted(LINES) + "\r")
    terminal.expect(heard(LINES))
    terminal.type("two\x1b\rlines\r")
    terminal.expect(heard("two\nlines"))
    # The arrow up brings an earlier message back.
    terminal.type("\x1b[A\x1b[A\r")
    terminal.expect(heard("two\nlines"))
    # Between prompts Ctrl-C would be an interrupt.
    terminal.expect(">")
    terminal.type("dropped\x03/exit\r")
    assert terminal.process.wait(60) == 0
    assert termios.tcgetattr(terminal.slave) == terminal.modes


def test_keys_that_are_pressed_during_an_answer_wait_for_the_next_prompt(terminal, tmp_path):
    terminal.type("wait\r")
    terminal.expect("waiting")
    terminal.type(pasted(LONG + "\n" + LINES) + "\rtwo\x1b\rlines\r")
    (tmp_path / "flag").touch()
    terminal.expect(heard(LONG + "\n" + LINES))
    terminal.expect(heard("two\nlines"))
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


def test_ctrl_c_in_a_terminal_ends_the_answer_and_at_an_empty_prompt_the_command(terminal):
    terminal.type("wait\r")
    terminal.expect("waiting")
    terminal.type("\x03")
    terminal.expect("[interrupted]")
    terminal.type("still here\r")
    terminal.expect(heard("still here"))
    terminal.expect(">")
    terminal.type("\x03")
    assert terminal.process.wait(60) == 130
    assert termios.tcgetattr(terminal.slave) == terminal.modes
