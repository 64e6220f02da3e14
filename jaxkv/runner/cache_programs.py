"""Programs that update the cache between steps: copies of pages and states, and admission to the sampling group.

Admission clears an entry of the sampling group for a new sequence. Each program has its own small arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxkv.cache.page_allocator import PageCopy
from jaxkv.cache.spec import CacheLayout
from jaxkv.cache.state import Cache, copy_units
from jaxkv.models.protocol import Model, Params
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.program_specs import Runner, lower_update
from jaxkv.runner.rows import Row
from jaxkv.sampling.processors import NO_PROCESSORS, LogitsProcessors
from jaxkv.sampling.sample import admit

COPIES = 16
"""Copies per group in one run of the program."""


@dataclass(frozen=True)
class CopySpec(ProgramSpec[Runner]):
    """The program that copies pages and states, in all groups at once.

    Attributes:
        copies: copies per group.
    """

    copies: int = COPIES

    @property
    def kind(self) -> str:
        """Always "copy"."""
        return "copy"

    @property
    def name(self) -> str:
        """Kind, and copies per group."""
        return f"copy_{self.copies}"

    def lowering(self, runner: Runner) -> Lowering:
        """Returns `cache, () = run(params, cache, ids)`, which donates the cache."""
        ids = pack_copies(runner.layout, runner.counts, ())
        return lower_update(runner, run_copies(runner.layout), (ids,))


@dataclass(frozen=True)
class AdmitSpec(ProgramSpec[Runner]):
    """A program that initializes entries of the sampling group.

    Attributes:
        rows: most sequences.
        width: most tokens of a prompt.
        returning: sequences may have generated tokens already, at most `width`.
    """

    rows: int
    width: int
    returning: bool = False

    @property
    def kind(self) -> str:
        """Either "readmit" for sequences that may have generated tokens, or "admit"."""
        return "readmit" if self.returning else "admit"

    @property
    def name(self) -> str:
        """Kind, sequences and tokens."""
        return f"{self.kind}_{self.rows}x{self.width}"

    def serves(self, needed: ProgramSpec) -> bool:
        """Returns whether it is as large in rows and width, and equal in `returning`."""
        return (
            isinstance(needed, AdmitSpec)
            and self.returning == needed.returning
            and self.rows >= needed.rows
            and self.width >= needed.width
        )

    def costs_like(self, needed: ProgramSpec) -> bool:
        """Returns True: each of these programs only writes a few entries."""
        return isinstance(needed, AdmitSpec)

    @property
    def order_of_cost(self) -> tuple[int, ...]:
        """Fewer sequences, then fewer tokens."""
        return self.rows, self.width

    def lowering(self, runner: Runner) -> Lowering:
        """Returns `cache, () = run(params, cache, *arrays)`, which donates the cache."""
        admission = Admission(runner.layout, runner.counts, runner.model)
        return lower_update(runner, admission.run, admission.blank(self))


def copy_batches(copies: Sequence[PageCopy]) -> list[list[PageCopy]]:
    """Splits copies into batches for one run of the program each, in order."""
    batches: list[list[PageCopy]] = [[]]
    for copy in copies:
        if sum(copy.group == other.group for other in batches[-1]) == COPIES:
            batches.append([])
        batches[-1].append(copy)
    return batches if copies else []


def pack_copies(
    layout: CacheLayout, counts: Mapping[str, int], copies: Sequence[PageCopy]
) -> np.ndarray:
    """Returns sources and targets as int32 [groups, 2, copies]; padding has targets out of range, never written."""
    ids = np.zeros((len(layout.groups), 2, COPIES), np.int32)
    for group, (sources, targets) in zip(layout.groups, ids, strict=True):
        mine = [copy for copy in copies if copy.group == group.name]
        targets[...] = counts[group.name] + np.arange(COPIES, dtype=np.int32)
        sources[: len(mine)] = [copy.source for copy in mine]
        targets[: len(mine)] = [copy.target for copy in mine]
    return ids


def run_copies(
    layout: CacheLayout,
) -> Callable[[Params, Cache, Int[Array, "groups 2 copies"]], tuple[Cache, tuple[()]]]:
    """Returns the function of the copy program. Donate its cache where it is compiled."""

    def run(
        params: Params, cache: Cache, ids: Int[Array, "groups 2 copies"]
    ) -> tuple[Cache, tuple[()]]:
        del params
        for group, (sources, targets) in zip(layout.groups, ids, strict=True):
            cache = copy_units(cache, layout, group.name, sources, targets)
        return cache, ()

    return run


class Admission:
    """Packs and runs admissions: each initializes the entries of some sequences in the sampling group.

    Args:
        layout: the cache's groups.
        counts: group name -> pages or states of that group.
        model: the model; the sampling group is the layer after its last.
        processors: the registered logits processors; only `pack` needs them.
    """

    def __init__(
        self,
        layout: CacheLayout,
        counts: Mapping[str, int],
        model: Model,
        processors: LogitsProcessors = NO_PROCESSORS,
    ) -> None:
        self._processors = processors
        self._entries = counts["sampling"]
        self._layer = num_layers = model.num_layers
        self._vocab = model.vocab_size
        widths = {
            array.role: array.shape[0]
            for group in layout.in_place_groups
            if num_layers in group.layers
            for array in group.spec.arrays
            if array.shape
        }
        self._bias_width = widths.get("bias_ids", 0)
        self._num_words = widths.get("processor_words", 0)

    def blank(self, spec: AdmitSpec) -> tuple[np.ndarray, ...]:
        """Returns the arrays of an admission without sequences.

        They are state ids, prompts, outputs, bias ids, bias values and the words of logits processors. All ids are out
        of range. The outputs of an "admit" program have width 0.
        """
        rows = spec.rows
        output_width = spec.width if spec.returning else 0
        state_ids = self._entries + np.arange(rows, dtype=np.int32)
        prompts = np.full((rows, spec.width), self._vocab, np.int32)
        outputs = np.full((rows, output_width), self._vocab, np.int32)
        bias_ids = np.full((rows, self._bias_width), self._vocab, np.int32)
        bias_values = np.zeros((rows, self._bias_width), np.float32)
        words = np.zeros((rows, self._num_words), np.int32)
        return state_ids, prompts, outputs, bias_ids, bias_values, words

    def pack(
        self,
        spec: AdmitSpec,
        rows: Sequence[Row],
        generated: Sequence[Sequence[int]],
        entries: Sequence[int],
    ) -> tuple[np.ndarray, ...]:
        """Returns the arrays of an admission.

        Args:
            spec: the program.
            rows: the sequences; their `tokens` are whole prompts.
            generated: per row, its generated tokens; empty if no row has any.
            entries: per row, its entry in the sampling group.

        Raises:
            ValueError: a row has more logit biases than the cache has room for.
        """
        arrays = self.blank(spec)
        state_ids, prompts, outputs, bias_ids, bias_values, words = arrays
        state_ids[: len(entries)] = entries
        for index, row in enumerate(rows):
            prompts[index, : len(row.tokens)] = row.tokens
            bias = row.params.logit_bias
            if len(bias) > self._bias_width:
                raise ValueError(
                    f"logit_bias has {len(bias)} entries, but the cache has room for {self._bias_width}; give fewer"
                )
            bias_ids[index, : len(bias)] = list(bias.keys())
            bias_values[index, : len(bias)] = list(bias.values())
            if self._num_words:
                words[index] = self._processors.words(row.params.logits_processors, len(row.tokens))
        for index, tokens in enumerate(generated):
            outputs[index, : len(tokens)] = tokens
        return arrays

    def run(
        self, params: Params, cache: Cache, state_ids: Array, prompts: Array, *others: Array
    ) -> tuple[Cache, tuple[()]]:
        """Runs on the device. Empty arrays are not passed: outputs come third only if their width is not 0."""
        del params
        rest = list(others)
        words = rest.pop() if self._num_words else None
        bias_values, bias_ids = (rest.pop(), rest.pop()) if self._bias_width else (None, None)
        outputs = rest[0] if rest else jnp.zeros((state_ids.shape[0], 0), jnp.int32)
        state = admit(
            cache.layer(self._layer),
            state_ids,
            prompts,
            outputs,
            bias_ids,
            bias_values,
            words,
            jnp.sum(prompts < self._vocab, axis=1, dtype=jnp.int32),
        )
        return cache.with_layer(self._layer, state), ()
