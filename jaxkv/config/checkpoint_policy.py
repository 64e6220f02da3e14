"""After which tokens of a prompt states of recurrent layers are kept, as frozen data.

Sources of the places: Megatron-LM #3225 (divergence, last aligned, penultimate) and vLLM #45238.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckpointPolicy:
    """Where a prompt leaves a checkpoint behind. Each takes a state of every recurrent group, if there is room.

    Attributes:
        divergence: where the prompt stops agreeing with any earlier one, rounded down to the grid: what several
            prompts share, others will begin with, too.
        last_aligned: the prompt's last place on the grid, for prompts that go on from here.
        penultimate: the place before, for a prompt that ends on the grid and came before: no repeat can begin at its
            end, since its last token is always computed.
        end_of_prompt: the prompt's end, on the grid or not, for the next turn of a conversation. There is none if the
            last token is computed alone, in a decode step: after a hit up to there, or for the second of `n` samples.
        end_of_generation: what a sequence had computed when it ended, for the next turn; costs no state of its own.
            There is none if the text ended just at the end of a page while another step was under way.
        wait_for_equals: a prompt that begins like one that is being computed waits for its checkpoint.
        grid: tokens between the places of the grid, a multiple of the model's chunk; `None` is the chunk itself.
    """

    divergence: bool = True
    last_aligned: bool = True
    penultimate: bool = True
    end_of_prompt: bool = True
    end_of_generation: bool = True
    wait_for_equals: bool = True
    grid: int | None = None

    def __repr__(self) -> str:
        """Names what is not as by default."""
        changed = [one for one in fields(self) if getattr(self, one.name) != one.default]
        told = (f"{one.name}={getattr(self, one.name)!r}" for one in changed)
        return f"CheckpointPolicy({', '.join(told)})"

    def grid_for(self, chunk_size: int) -> int:
        """Returns the tokens between places.

        Raises:
            ValueError: scans do not stop there.
        """
        grid = chunk_size if self.grid is None else self.grid
        if grid < 1 or grid % chunk_size:
            raise ValueError(
                f"the grid of checkpoints must be a multiple of the model's chunk of {chunk_size} tokens, got {grid}"
            )
        return grid

    def places(self, num_tokens: int, agreed: int, chunk_size: int) -> tuple[int, ...]:
        """Returns after how many tokens a prompt leaves a checkpoint, ascending.

        Args:
            num_tokens: of the prompt.
            agreed: tokens that an earlier prompt began with, too.
            chunk_size: the model's.
        """
        grid = self.grid_for(chunk_size)
        places = set()
        if self.divergence and agreed < num_tokens:
            places.add(agreed // grid * grid)
        if self.last_aligned:
            places.add(num_tokens // grid * grid)
        if self.penultimate and agreed >= num_tokens:
            places.add((num_tokens - 1) // grid * grid)
        if self.end_of_prompt:
            places.add(num_tokens)
        return tuple(sorted(places - {0}))
