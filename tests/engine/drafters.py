"""Drafters that know the answers and are right with a given probability, and a pace that knows no clock."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.engine.simulated import WrongUse


class Guesser:
    """Drafts up to a random number of tokens; each is right with a probability, and any other is junk.

    Args:
        draw: decides everything.
        rightness: probability of each token to be right.
        answer_of: returns the tokens that a request gets.
        vocab_size: junk is drawn below it.
    """

    def __init__(self, draw, rightness, answer_of, vocab_size):
        self._draw, self._rightness, self._vocab_size = draw, rightness, vocab_size
        self._answer_of, self._answers = answer_of, {}

    def draft(self, sequences, most):
        return [self._guess(one, count) for one, count in zip(sequences, most, strict=True)]

    def answer(self, request):
        """Returns the tokens that a request gets."""
        if id(request) not in self._answers:
            # The request is kept too, so that its id stays its own.
            self._answers[id(request)] = request, self._answer_of(request)
        return self._answers[id(request)][1]

    def guess(self, request, generated, count):
        """Returns guesses of the `count` tokens that follow the first `generated` ones."""
        draw, rest = self._draw, self.answer(request)[generated:]
        return [
            rest[at]
            if at < len(rest) and draw.random() < self._rightness
            else draw.randrange(self._vocab_size)
            for at in range(count)
        ]

    def _guess(self, sequence, most):
        draw = self._draw
        count = draw.choice((0, most, most, draw.randint(0, most)))
        return self.guess(sequence.request, sequence.generated, count)


class DeviceGuesser:
    """A `Guesser` on the simulated device: it knows the request of an entry, and checks the text that the device keeps.

    Args:
        guesser: knows the answers.
        engine: whose requests.
    """

    def __init__(self, guesser, engine):
        self._guesser, self._engine = guesser, engine

    def draft(self, entry, text, most):
        """Returns `most` guesses of what follows the text of an entry of the sampling group."""
        allocator = self._engine.sequence_runner.allocator
        for one in self._engine.scheduler.running:
            if allocator.held(one.number).states["sampling"].write == entry:
                request = one.request
                generated = len(text) - len(request.prompt)
                told = [*request.prompt, *self._guesser.answer(request)][: len(text)]
                # After its last token a row goes on until the host has read that. A row with a grammar takes no drafts,
                # and the device does not see the tokens that its grammar forces.
                if told != text[: len(told)] and request.grammar is None:
                    raise WrongUse(f"entry {entry} keeps another text: {text}, but it is {told}")
                return self._guesser.guess(request, generated, most)
        return [0] * most


class KnownTexts:
    """Drafts on a real device from known texts; each token is right with a probability, and else the id after it.

    Args:
        texts: prompts with the tokens that follow each.
        rightness: probability of each token to be right.
        vocab_size: number of token ids.
    """

    def __init__(self, texts, rightness, vocab_size):
        width = max(map(len, texts))
        self._texts = np.asarray([[*one, *[0] * (width - len(one))] for one in texts], np.int32)
        self._rightness, self._vocab_size = rightness, vocab_size

    def draft(self, texts, lengths, most):
        known = jnp.asarray(self._texts)
        width = min(known.shape[1], texts.shape[1])
        within = jnp.arange(width, dtype=jnp.int32)[None] < lengths[:, None]
        equal = (texts[:, None, :width] == known[None, :, :width]) & within[:, None]
        alike = jnp.cumprod(equal.astype(jnp.int32), axis=2).sum(axis=2)
        index = jnp.argmax(alike, axis=1).astype(jnp.int32)
        places = lengths[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
        rest = known.at[index[:, None], places].get(mode="fill", fill_value=0)
        key = jax.random.key(0)
        chance = jax.random.uniform(key, known.shape, jnp.float32)
        chance = chance.at[index[:, None], places].get(mode="fill", fill_value=0)
        wrong = (rest + 1) % self._vocab_size
        return jnp.where(chance < self._rightness, rest, wrong)


class AnyPace:
    """Stands in for `Pace`: drafts in steps drawn at random, with a probability, and any number of them."""

    pauses, is_paused = 0, False

    def __init__(self, draw, probability):
        self._draw, self._probability = draw, probability

    def choose(self, rows, most):
        if not most or self._draw.random() >= self._probability:
            return 0
        return self._draw.choice((most, self._draw.randint(1, most)))

    def note(self, drafted, accepted):
        pass

    def read(self, rows, length, drafts):
        pass

    def interrupt(self):
        pass
