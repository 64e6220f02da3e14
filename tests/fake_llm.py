"""An `LLM` that computes nothing, for tests of the commands."""

from contextlib import nullcontext
from types import SimpleNamespace

from jaxkv import default_model
from jaxkv.engine.request import Piece, Usage


class FakeLLM:
    """Answers "yes" in two pieces to conversations of up to `context` messages; a message is a token.

    Args:
        reason: the finish_reason of answers.
        can_chat: there is a chat template.
        interrupted: Ctrl-C is pressed after so many pieces of each answer; `None` for never.
        directory: where its generation_config.json would be; that of the small model if not given.
    """

    max_model_len = 100

    def __init__(self, context=100, reason="stop", can_chat=True, interrupted=None, directory=None):
        self.directory = directory or default_model.path()
        self.context, self.reason, self.can_chat = context, reason, can_chat
        self.interrupted = interrupted
        self.conversations, self.sampling, self.closed = [], None, 0
        programs = SimpleNamespace(watched=lambda tell: nullcontext())
        self.engine = SimpleNamespace(runner=SimpleNamespace(programs=programs))

    def chat_prompt(self, messages):
        if not self.can_chat:
            raise ValueError("the model directory has\nno chat template")
        return [dict(message) for message in messages]

    def stream(self, prompt, sampling):
        if len(prompt) > self.context:
            raise ValueError("a prompt leaves\nno room")
        self.conversations.append(prompt)
        self.sampling = sampling
        return self._pieces(len(prompt))

    def _pieces(self, prompt_tokens):
        usage = Usage(prompt_tokens=prompt_tokens, cached_tokens=0, output_tokens=2, preemptions=0)
        last = Piece(text="s", token_id=None, finish_reason=self.reason, usage=usage)
        try:
            for at, piece in enumerate([Piece(text="ye", token_id=1), last]):
                if at == self.interrupted:
                    raise KeyboardInterrupt
                yield piece
        finally:
            self.closed += 1
