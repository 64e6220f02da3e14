"""`ProgramSpec`: the key of a compiled program, with a method that returns what to compile."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

from jaxkv.programs.lowering import Lowering

Size = int | bool | None | tuple[int, ...]


@dataclass(frozen=True)
class ProgramSpec[Target](ABC):
    """What one program is compiled for: its key in the manifest. Specs sort by kind, then by size.

    The kinds are in `jaxkv.runner.program_specs`, `jaxkv.runner.sample_spec`, `jaxkv.runner.cache_programs`,
    `jaxkv.runner.weights_checksum` and `jaxkv.offload.programs`.
    """

    @property
    @abstractmethod
    def kind(self) -> str:
        """Kind of the program.

        One of "decode", "prefill", "verify", "sample", "score", "admit", "readmit", "copy", "swap_out", "swap_in" and
        "checksum".
        """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the program in XLA, in profiles and in the compilation cache."""

    @abstractmethod
    def lowering(self, target: Target, /) -> Lowering:
        """Returns what to compile.

        Args:
            target: the object with the model, parameters and cache to compile for; its class depends on the kind.
        """

    def sizes(self) -> dict[str, Size]:
        """Returns all fields of the spec by name, sizes and features."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def serves(self, needed: "ProgramSpec") -> bool:
        """Returns whether this program can run in place of the `needed` one."""
        return self == needed

    def costs_like(self, needed: "ProgramSpec") -> bool:
        """Returns whether this program, which `serves` the needed one, takes about as long as that would."""
        return self == needed

    @property
    def order_of_cost(self) -> tuple[int, ...]:
        """Sort key among programs that serve the same step; the cheapest is least."""
        return ()

    def __str__(self) -> str:
        shown = {
            name: size
            for name, size in self.sizes().items()
            if size is not None and size is not False
        }
        listed = (f"{name}={_size_text(size)}" for name, size in shown.items())
        return f"{self.kind}({', '.join(listed)})"

    def __lt__(self, other: "ProgramSpec") -> bool:
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple:
        sizes = tuple(
            (size is not None, 0 if size is None else size) for size in self.sizes().values()
        )
        return self.kind, sizes


def _size_text(size: Size) -> str:
    return "/".join(map(str, size)) if isinstance(size, tuple) else str(size)
