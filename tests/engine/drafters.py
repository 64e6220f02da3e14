"""A drafter that knows the answers and is right with a given probability, and a pace that knows no clock."""


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

    def _guess(self, sequence, most):
        draw, request = self._draw, sequence.request
        if id(request) not in self._answers:
            # The request is kept too, so that its id stays its own.
            self._answers[id(request)] = request, self._answer_of(request)
        rest = self._answers[id(request)][1][sequence.generated :]
        count = draw.choice((0, most, most, draw.randint(0, most)))
        return [
            rest[at]
            if at < len(rest) and draw.random() < self._rightness
            else draw.randrange(self._vocab_size)
            for at in range(count)
        ]


class AnyPace:
    """Stands in for `Pace`: drafts in steps drawn at random, with a probability."""

    pauses, is_paused = 0, False

    def __init__(self, draw, probability):
        self._draw, self._probability = draw, probability

    def may_draft(self, rows):
        return self._draw.random() < self._probability

    def next_step(self, rows, length):
        return self._draw.random() < self._probability

    def interrupt(self):
        pass
