"""`CheckpointPolicy`: the lengths at which sequences make checkpoints of their recurrent states.

Sources of these lengths: Megatron-LM #3225 (divergence, last aligned, penultimate) and vLLM #45238.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckpointPolicy:
    """The lengths at which a sequence makes a checkpoint: one state of every recurrent group, if there is room.

    Attributes:
        divergence: the length of the longest prefix shared with an earlier prompt, rounded down to the grid. Later
            prompts are likely to share it too.
        last_aligned: the prompt's last multiple of the grid, for prompts that continue this one.
        penultimate: the multiple of the grid before the prompt's last token, if an earlier prompt begins with this
            one. A repetition of the prompt cannot begin at its end, because its last token is always computed.
        end_of_prompt: the end of the prompt, on the grid or not, for the next turn of a conversation. It is left out
            if the last token is computed alone in a decode step: after a hit up to there, or for the second of `n`
            samples.
        end_of_generation: the tokens that a sequence had computed at its end, for the next turn; this needs no extra
            state. It is left out if the sequence ends exactly at a page end while another step is in flight, or if it
            stops before its limit and later steps of the same or the next launch have changed its states.
        wait_for_equals: delay a request while another sequence computes a checkpoint of the same prefix.
        grid: tokens between two multiples, itself a multiple of the model's chunk size; `None` for the chunk size.
    """

    divergence: bool = True
    last_aligned: bool = True
    penultimate: bool = True
    end_of_prompt: bool = True
    end_of_generation: bool = True
    wait_for_equals: bool = True
    grid: int | None = None

    def __repr__(self) -> str:
        """Returns the constructor call with the fields that differ from their defaults."""
        changed = [one for one in fields(self) if getattr(self, one.name) != one.default]
        arguments = (f"{one.name}={getattr(self, one.name)!r}" for one in changed)
        return f"CheckpointPolicy({', '.join(arguments)})"

    def grid_for(self, chunk_size: int) -> int:
        """Returns the number of tokens between two multiples of the grid.

        Raises:
            ValueError: `grid` is no multiple of `chunk_size`, so scans do not stop there.
        """
        grid = chunk_size if self.grid is None else self.grid
        if grid < 1 or grid % chunk_size:
            raise ValueError(
                f"the grid of checkpoints must be a multiple of the model's chunk of {chunk_size} tokens, got {grid}"
            )
        return grid

    def places(self, num_tokens: int, shared_tokens: int, chunk_size: int) -> tuple[int, ...]:
        """Returns the lengths, in tokens and ascending, at which a prompt makes checkpoints.

        Args:
            num_tokens: tokens of the prompt.
            shared_tokens: length of the longest prefix shared with an earlier prompt.
            chunk_size: chunk size of the model's scans, in tokens.
        """
        grid = self.grid_for(chunk_size)
        places = set()
        if self.divergence and shared_tokens < num_tokens:
            places.add(shared_tokens // grid * grid)
        if self.last_aligned:
            places.add(num_tokens // grid * grid)
        if self.penultimate and shared_tokens >= num_tokens:
            places.add((num_tokens - 1) // grid * grid)
        if self.end_of_prompt:
            places.add(num_tokens)
        return tuple(sorted(places - {0}))
