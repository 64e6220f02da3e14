"""The conversation of `jaxkv chat`: messages from a terminal or a pipe, and the model's answers."""

import sys
import termios
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from jaxkv.config.sampling import SamplingParams
from jaxkv.options import with_command_options
from jaxkv.terminal import Screen

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from jaxkv.engine.request import Piece
    from jaxkv.llm import LLM

HELP = """\
/reset  begins a new conversation
/help   shows this
/exit   ends, as Ctrl-D does
Enter sends a message, Alt-Enter begins another line of it, and a pasted text is one message. Ctrl-C ends an answer."""


class Conversation:
    """The messages so far, and a model that answers the next one.

    Args:
        llm: the model; it must have a chat template.
        sampling: sampling parameters of the answers.
        screen: prints answers and notes.

    Attributes:
        messages: dicts with "role" and "content", in their order.
    """

    def __init__(self, llm: "LLM", sampling: SamplingParams, screen: Screen) -> None:
        self.messages: list[dict[str, str]] = []
        self._llm = llm
        self._sampling = sampling
        self._screen = screen

    def run(self, typed: Iterator[str]) -> None:
        """Answers messages and follows commands until the messages end or one is "/exit".

        Raises:
            RuntimeError: the model's logits were not finite.
        """
        for message in typed:
            word = message.strip()
            if word == "/exit":
                return
            if word == "/reset":
                self.messages.clear()
                self._screen.note("jaxkv: a new conversation begins")
            elif word == "/help":
                self._screen.note(HELP)
            elif word.startswith("/") and word[1:].isalpha():
                self._screen.note(f"jaxkv: there is no command {word}; /help lists the commands")
            elif word:
                self._answer(message)

    def _answer(self, message: str) -> None:
        """Answers one message and adds both to `messages`.

        A message that is refused, or whose answer is interrupted before any text, is not added.
        """
        question = {"role": "user", "content": message}
        text = ""
        try:
            pieces = self._start_stream([*self.messages, question])
            if pieces is None:
                return
            with closing(pieces):
                for piece in pieces:
                    # Before the write, so that `messages` has all printed text even after an interrupt.
                    text += piece.text
                    self._screen.write(piece.text)
                    if piece.finish_reason is not None:
                        self._note_end(piece)
        except KeyboardInterrupt:
            self._screen.end_line()
            self._screen.note(
                "[interrupted]" if text else "[interrupted; the message is forgotten]"
            )
            if not text:
                return
        self.messages += [question, {"role": "assistant", "content": text}]

    def _start_stream(self, messages: list[dict[str, str]]) -> "Generator[Piece] | None":
        try:
            return self._llm.stream(self._llm.chat_prompt(messages), self._sampling)
        except ValueError as error:
            hint = "; /reset begins a new conversation" if self.messages else ""
            text = with_command_options(error)
            self._screen.note(f"jaxkv: {text}{hint} (this message is forgotten)")
            return None

    def _note_end(self, piece: "Piece") -> None:
        """Ends the line of an answer, and prints a note if the answer was cut."""
        self._screen.end_line()
        if piece.finish_reason == "error":
            raise RuntimeError("the model's logits were not finite; the text ends here")
        if piece.finish_reason != "length":
            return
        used = piece.usage.prompt_tokens + piece.usage.output_tokens if piece.usage else 0
        if used >= self._llm.max_model_len:
            self._screen.note(
                f"[cut: the conversation fills the context of {used:,} tokens; /reset begins a new one]"
            )
        else:
            most = self._sampling.max_tokens
            self._screen.note(f"[cut after {most:,} tokens; --max-tokens N allows more]")


@contextmanager
def open_messages() -> Iterator[Iterator[str]]:
    """Yields the user's messages: edited on a terminal, where a paste is one message, or one for each line of a pipe.

    While the terminal is open, keys that are pressed between prompts are kept for the next prompt.
    """
    if not sys.stdin.isatty() or not (sys.stdout.isatty() or sys.stderr.isatty()):
        yield (line.rstrip("\n") for line in sys.stdin)
        return
    session = _session()
    before = termios.tcgetattr(sys.stdin)
    # Without canonical mode the kernel cuts no line at 4095 bytes, and without echo it shows no keys inside answers.
    # Enter stays a carriage return, as the editor reads it.
    changed = list(before)
    changed[0] &= ~termios.ICRNL
    changed[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, changed)
    try:
        yield _edited(session)
    finally:
        session.output.disable_bracketed_paste()
        session.output.flush()
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _edited(session: "PromptSession[str]") -> Iterator[str]:
    """Yields messages from the editor until Ctrl-D.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed at an empty prompt.
    """
    while True:
        try:
            message = session.prompt()
        except EOFError:
            return
        # The editor switches bracketed paste off, without which a paste during the answer is a message per line.
        session.output.enable_bracketed_paste()
        session.output.flush()
        yield message


def _session() -> "PromptSession[str]":
    """Returns a line editor: Enter sends, Alt-Enter begins a line, and Ctrl-C clears a message that is not empty."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def clear_or_end(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        prompt_continuation="  ",
        key_bindings=keys,
        output=create_output(always_prefer_tty=True),
    )
    session.output.enable_bracketed_paste()
    session.output.flush()
    return session
