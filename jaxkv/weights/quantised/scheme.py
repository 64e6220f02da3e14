"""`Scheme`: how the weights of a checkpoint are quantised, as its `quantization_config` tells it."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Reader = Literal[
    "bitsandbytes", "eight_bit", "packed_floats", "packed_rows", "awq", "gptq", "mxfp4"
]
"""A format of tensors, which the module of that name in `jaxkv.weights.quantised` reads."""

_MOST_REPEATS = 6
_REPEAT = re.compile(r"(?<!\\)[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")


@dataclass(frozen=True)
class Scheme:
    """The format of a checkpoint. Which tensors are quantised, and in what groups, the tensors themselves decide.

    Attributes:
        name: the format, for messages.
        readers: the forms of tensors that may occur.
        code: name in `pallas_kernels.formats.few_bits.CODES` of most weights, or of an encoding that is widened.
        group: columns that share a scale, of most weights; `None` for one scale per row.
        block: rows and columns of a block with one scale; `None` for no blocks.
        ignored: names of modules that are not quantised, as `expression_of` takes them.
        experts_alone: whether experts alone are quantised.
        zero_is_one_less: whether stored zero points are one less than the zero points (GPTQ's first version).
        symmetric: whether all zero points are said to be in the middle; a file that has others is refused.
        rounds_rows: whether activations are meant to be rounded to float8_e4m3fn too, with a scale per token or one for
            the matrix; see `FewBits`.
        other_groups: columns that share a scale, of other weights.
    """

    name: str
    readers: tuple[Reader, ...]
    code: str
    group: int | None = None
    block: tuple[int, int] | None = None
    ignored: tuple[str, ...] = ()
    experts_alone: bool = False
    zero_is_one_less: bool = False
    symmetric: bool = False
    rounds_rows: bool = False
    other_groups: tuple[int, ...] = ()

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """The columns that share a scale in the file, of all sizes that its config names."""
        return (*([] if self.group is None else [self.group]), *self.other_groups)

    def ignores(self, weight: str) -> bool:
        """Whether a weight is expected to be stored as it is, by its name in the checkpoint.

        It serves to plan memory: a name that is wrong about it changes no number.
        """
        module = weight.removesuffix(".weight")
        if self.experts_alone and ".experts." not in weight:
            return True
        plain, expressions = self._ignored
        parts = module.split(".")
        # Lists may have hundreds of names, and models tens of thousands of modules.
        around = (
            ".".join(parts[first:last])
            for first in range(len(parts))
            for last in range(first + 1, len(parts) + 1)
        )
        return any(name in plain for name in around) or any(
            expression.match(module) for expression in expressions
        )

    @cached_property
    def _ignored(self) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
        """The entries of `ignored` that are names, and the others as expressions."""
        plain = frozenset(entry for entry in self.ignored if not _has_form(entry))
        others = (expression_of(entry) for entry in self.ignored if entry not in plain)
        return plain, tuple(one for one in others if one is not None)


def _has_form(entry: str) -> bool:
    return entry.startswith("re:") or "*" in entry


def expression_of(entry: str) -> re.Pattern[str] | None:
    """Returns what matches the modules that an entry of an `ignore` list means; `None` if it means nothing.

    An entry is a module's name, the name of a module around it, or a regular expression after "re:". Expressions come
    from an untrusted file, so one that could take long to match means nothing.
    """
    if entry.startswith("re:"):
        expression = entry.removeprefix("re:")
        slow = len(_REPEAT.findall(expression)) > _MOST_REPEATS
        if slow or _REPEATED_GROUP.search(expression) or len(expression) > 200:
            return None
        try:
            return re.compile(expression)
        except re.error:
            return None
    pieces = [re.escape(piece) for piece in entry.split("*")]
    if len(pieces) > _MOST_REPEATS:
        return None
    return re.compile(rf"(.*\.)?{'.*'.join(pieces)}(\..*)?\Z")
