"""The model runner: parameters, the cache on the device, and the compiled programs that update it."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import CacheLayout
from jaxkv.cache.state import Cache
from jaxkv.errors import STEP_FAILURES, ProgramRefused
from jaxkv.layers.adapted import LowRank
from jaxkv.models.decoder import Decoder
from jaxkv.models.implementation import choose_implementation
from jaxkv.models.protocol import Model, Params
from jaxkv.models.registry import rules_for
from jaxkv.models.tensor_parallel import TensorParallel, has_mailboxes, mesh_of
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.manifest import Program, Programs
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.adapter_stacks import AdapterStacks
from jaxkv.runner.hosts import Follower, Leader, in_order, mirrored
from jaxkv.runner.packed_layout import PackedLayout
from jaxkv.runner.param_types import ParamTypes
from jaxkv.runner.program_specs import ScoreSpec, StepSpec, without_empty
from jaxkv.runner.sample_spec import SampleSpec, find_hidden_type, sampling_arrays
from jaxkv.runner.small_blocks import small_blocks
from jaxkv.runner.weight_version import WeightVersion
from jaxkv.sampling.processors import NO_PROCESSORS, LogitsProcessors
from jaxkv.weights.named_arrays import NamedPrograms, NamedWeights


class ModelRunner:
    """Runs programs over one cache. It takes packed arrays; `SequenceRunner` handles sequences and pages.

    Args:
        model: the model.
        params: its parameters, on the device.
        layout: the cache's groups.
        counts: group name -> pages or states of that group.
        programs: the compiled programs; several runners of the same processors may share them.
        processors: the registered logits processors; the layout must have room for their words.
        owns_params: nobody else uses the parameters' arrays, so an update may overwrite them.
        adapters: the adapters that rows may name; `None` for none.
        hosts: the other processes, whose devices divide the model with this one's; `None` for one process.

    Attributes:
        adapters: the adapters that rows may name.
        hosts: the other processes.
        implementation: the implementation of the ops of all layers, and why no faster one is used.
        owner: owns the cache.
        packed_layout: layout of the packed arrays of steps.
        params: the current parameters.
        weight_version: the version of `params`; 0 for those that it was made with.

    Raises:
        Unsupported: the model requires an implementation that cannot run here, or the cache is fp8 and XLA would have
            to update it.
    """

    def __init__(
        self,
        model: Model,
        params: Params,
        layout: CacheLayout,
        counts: Mapping[str, int],
        programs: Programs,
        processors: LogitsProcessors = NO_PROCESSORS,
        *,
        owns_params: bool = False,
        adapters: AdapterStacks | None = None,
        hosts: Leader | Follower | None = None,
    ) -> None:
        self.implementation = choose_implementation(model, params, layout, counts)
        self.model = model.running(self.implementation.name)
        # Steps may copy weights while an earlier kernel still runs (`pallas_kernels.argument_weights`).
        self.params = jax.block_until_ready(params)
        self.weight_version: WeightVersion = 0
        self._owns_params = owns_params
        self._param_types = ParamTypes(params)
        self._named_programs: dict[Hashable, NamedPrograms] = {}
        self.layout = layout
        self.programs = programs
        self.processors = processors
        self.adapters = adapters
        self.hosts = hosts
        mailboxes = has_mailboxes(self.model)
        self.owner = CacheOwner(layout, counts, device=mesh_of(model), mailboxes=mailboxes)
        devices = self.cache.arrays[0].sharding.addressable_devices
        # A model without layers, which takes given logits, has no large programs.
        self._small_blocks = [*map(small_blocks, devices)] if model.num_layers else []
        self.packed_layout = PackedLayout(layout, counts, model.vocab_size, processors)
        # Compiled programs. Threads that check requests read it too, so it is replaced and not changed.
        self._known: Mapping[ProgramSpec, Program] = {}
        self._adding = threading.Lock()
        # Those that were compiled in the background since the last look.
        self._arrived: deque[Program] = deque()
        self._refused: dict[ProgramSpec, Exception] = {}
        # What the last `forward_only` program returned, for the program that samples.
        self._hidden: Array | None = None
        if isinstance(hosts, Leader):
            self.owner.announce = self.change_cache

    @property
    def dtype(self) -> str:
        """Name of the dtype of most parameters."""
        return self._param_types.dtype

    @property
    def param_types(self) -> Params:
        """The parameters' tree with `jax.ShapeDtypeStruct`s as leaves, also while they are dropped."""
        return self._param_types.tree

    @property
    def stacks(self) -> Mapping[str, LowRank]:
        """Dotted path of a parameter -> the adapters' factors; empty without adapters."""
        return {} if self.adapters is None else self.adapters.arrays

    @property
    def counts(self) -> Mapping[str, int]:
        """Group name -> pages or states of that group."""
        return self.owner.counts

    @cached_property
    def hidden_type(self) -> jax.ShapeDtypeStruct:
        """Type of one row's hidden state, [1, hidden_size]."""
        return find_hidden_type(self)

    @property
    def cache(self) -> Cache:
        """The current cache; the next program that updates it donates its arrays."""
        return self.owner.handle().cache

    def update_params(
        self, params: Params | Iterable[tuple[str, Any]], version: WeightVersion
    ) -> None:
        """Runs every later program with new parameters, once they are computed; no step is compiled.

        Programs in flight keep the old ones.

        Args:
            params: arrays of the same structure, shapes, dtypes and shardings, which are used as they are and must live
                until the next update. Or (name, array) pairs under a checkpoint's names, of which one program makes the
                parameters, in the memory of the old ones if these were made by this package.
            version: their version.

        Raises:
            ValueError: they do not fit, see `ParamTypes.accept` and `NamedWeights`; the old ones stay.
            ProgramRefused: strict mode, and arrays of these names, shapes and dtypes were not given in the warm-up.
        """
        self.refuse_hosts("update_weights and load_lora")
        if isinstance(params, Mapping) or not isinstance(params, Iterable):
            if isinstance(self.model, TensorParallel):
                self.model.refuse_undivided(params)
            self.params = jax.block_until_ready(self._param_types.accept(params))
            self._owns_params = False
        else:
            self.params = self._params_of_named(params)
            self._owns_params = True
        self.weight_version = version

    def _params_of_named(self, arrays: Iterable[tuple[str, Any]]) -> Params:
        several = self.model if isinstance(self.model, TensorParallel) else None
        decoder = self.model if several is None else several.whole
        if not isinstance(decoder, Decoder):
            raise ValueError(
                f"a {type(decoder).__name__} has no checkpoint names; give a tree such as LLM.params"
            )
        self.refuse_named_weights()
        named = NamedWeights(
            arrays,
            decoder,
            rules_for(decoder.config),
            self._param_types.tree,
            self._param_types.dtype,
            divide=None if several is None else several.divide,
        )
        if named.signature not in self._named_programs:
            if self.programs.is_closed:
                raise ProgramRefused(
                    "weights under these names, shapes and dtypes need a program that was not compiled before serving "
                    "began; update the weights once before the warm-up, or turn strict mode off"
                )
            self._named_programs[named.signature] = named.compile()
        is_free = self._owns_params and not self._param_types.deleted(self.params)
        return named.params(
            self._named_programs[named.signature], donated=self.params if is_free else None
        )

    def refuse_named_weights(self) -> None:
        """Raises `ValueError` if the weights are in 8 or 4 bits, which arrays under checkpoint names cannot replace."""
        if self._param_types.in_few_bits:
            raise ValueError(
                "this model's weights are in 8 or 4 bits, which plain weights of a checkpoint or a merged adapter "
                "cannot replace; give update_weights a tree such as LLM.params, name adapters with add_lora, or load "
                "the model without quantization"
            )

    def refuse_hosts(self, what: str) -> None:
        """Raises `ValueError` if other processes compute the model with this one, for what cannot be done there."""
        if self.hosts is not None:
            raise ValueError(
                f"{what}: supported in one process only, and {jax.process_count()} compute this model; start them "
                "again, or use one host"
            )

    def drop_params(self) -> None:
        """Drops the parameters; their memory is free once nothing else refers to them."""
        self.refuse_hosts("sleep(level=2), after which update_weights must give weights")
        self.params, self._owns_params = None, False

    def refuse_without_params(self) -> None:
        """Raises `RuntimeError` after `drop_params`, until `update_params`."""
        if self.params is None:
            raise RuntimeError(
                "the weights were given back by sleep(level=2); give new ones to update_weights first"
            )

    def close(self) -> None:
        """Frees the cache and drops the parameters and programs; no program can run afterwards."""
        self.owner.announce = None
        self.owner.close()
        if self.hosts is not None:
            self.hosts.close()
        self.params, self.adapters, self._hidden = (), None, None
        self._small_blocks.clear()
        # The tracebacks of these errors refer to the parameters.
        self._refused.clear()
        self._named_programs.clear()
        self.programs.clear()
        self._arrived.clear()
        self._known = {}

    def fit[S: ProgramSpec](self, spec: S) -> S:
        """Returns the program to run instead of `spec`: itself if it is compiled, or a compiled one that serves.

        Of several it returns the cheapest. Only programs that cost about the same qualify, unless strict, or while
        `spec` is compiled in the background. If none does, it returns `spec`, which is compiled at its first run.
        """
        compiled = self._compiled_specs()
        if spec in compiled:
            return spec
        able = [known for known in compiled if known.serves(spec)]
        if not (self.programs.strict or self.programs.is_pending(spec)):
            able = [known for known in able if known.costs_like(spec)]
        found = min(able, key=lambda known: known.order_of_cost, default=spec)
        assert isinstance(found, type(spec)), "a program serves only for others of its kind"
        return found

    def has(self, spec: ProgramSpec) -> bool:
        """Returns whether a program is compiled, by this runner or in the background."""
        return spec in self._compiled_specs()

    def may_run(self, spec: ProgramSpec) -> bool:
        """Returns whether a program is compiled, or may be compiled now and is not in the background."""
        return self.has(spec) or not (self.programs.is_closed or self.programs.is_pending(spec))

    def _compiled_specs(self) -> Collection[ProgramSpec]:
        """Returns the specs of all compiled programs, with those that have arrived from the background."""
        if self._arrived:
            with self._adding:
                arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
                self._known = {**self._known, **{program.spec: program for program in arrived}}
        return self._known

    def refusal(self, spec: StepSpec) -> Exception | None:
        """Returns the error of the last attempt to get a program; `None` if it succeeded or there was none."""
        return self._refused.get(spec) if self._refused else None

    def run(self, spec: ProgramSpec, arrays: Sequence[np.ndarray | jax.Array]) -> Any:  # noqa: ANN401 - the program's own output
        """Dispatches a program of parameters, cache and host arrays that updates the cache; returns its output.

        A program that samples takes the hidden states of the last `forward_only` program too.

        Raises:
            ProgramRefused: the program is not compiled and must not be; the cache is unchanged.
            CachePoisoned: the program failed after the cache was donated.
            RuntimeError: the owner of the parameters has deleted them; the cache is unchanged.
        """
        if self.hosts is not None:
            # Before any process runs it.
            self.program(spec)
        return self.run_told(spec, list(arrays))

    @mirrored
    def run_told(self, spec: ProgramSpec, arrays: list[np.ndarray | jax.Array]) -> Any:  # noqa: ANN401
        """Does what `run` does with a program that is compiled."""
        program, given = self.program(spec), without_empty(arrays)
        params = spec.params_of(self) if isinstance(spec, StepSpec | ScoreSpec) else self.params

        def update(cache: Cache) -> tuple[Cache, Any]:
            if not isinstance(spec, SampleSpec):
                return program(params, cache, *given)
            choices = sampling_arrays(self.layout, cache)
            choices, out = program(params, choices, self._hidden, *given)
            # Freed before the next step allocates, which then gets its memory at the same addresses: XLA sets every
            # node of a CUDA graph anew whose addresses have moved.
            self._hidden = None
            return cache.with_layer(self.model.num_layers, choices), out

        try:
            out = self.owner.run(update)
        except RuntimeError as error:
            if deleted := self._param_types.deleted(self.params):
                raise RuntimeError(
                    f"{len(deleted)} parameters of the model were deleted, {deleted[0]} for one: their owner has "
                    "donated or freed them. Give the arrays that replaced them to LLM.update_weights"
                ) from error
            raise
        if self.hosts is not None:
            in_order(out)
        if isinstance(spec, StepSpec) and spec.forward_only:
            self._hidden = out
        return out

    def run_read_only(self, spec: ProgramSpec, *arrays: np.ndarray) -> Any:  # noqa: ANN401 - the program's own output
        """Dispatches a program without parameters that only reads the cache."""
        self.refuse_hosts(spec.name)
        return self.program(spec)(self.owner.handle().cache, *arrays)

    def update(self, spec: ProgramSpec, *arguments: Any) -> Any:  # noqa: ANN401 - the program's own types
        """Dispatches a program without parameters that updates the cache.

        Raises:
            CachePoisoned: the program failed after the cache was donated.
        """
        self.refuse_hosts(spec.name)
        program = self.program(spec)
        return self.owner.run(lambda cache: program(cache, *arguments))

    @mirrored
    def change_cache(self, change: str) -> None:
        """Lets the followers "rebuild" or "close" their slices of the cache, as the owner here is about to do."""
        if isinstance(self.hosts, Follower):
            {"rebuild": self.owner.rebuild, "close": self.owner.close}[change]()

    def read(self, out: Any) -> Any:  # noqa: ANN401 - a pytree of device arrays, as NumPy
        """Waits for a step's output and returns it as NumPy arrays.

        Raises:
            JaxRuntimeError: the step failed on the device, out of memory for example; the cache is lost.
        """
        try:
            with self.hosts.waiting() if isinstance(self.hosts, Leader) else nullcontext():
                return jax.device_get(out)
        except jax.errors.JaxRuntimeError as error:
            self.owner.poison(f"a step failed while it ran: {error}", cause=error)
            if isinstance(self.hosts, Leader):
                raise self.hosts.give_up(error) from error
            raise

    def program(self, spec: ProgramSpec) -> Program:
        """Returns the compiled form of a program.

        Raises:
            ProgramRefused: see `Programs.get`.
        """
        return self._known.get(spec) or self.compiled(spec)

    @mirrored
    def compiled(self, spec: ProgramSpec) -> Program:
        """Returns the compiled form of a program that this runner has not used; see `program`."""
        try:
            program = self.programs.get(spec, lambda: self._lowering(spec))
        except STEP_FAILURES as error:
            self._refused[spec] = error
            raise
        with self._adding:
            self._known = {**self._known, spec: program}
        self._refused.pop(spec, None)
        return program

    def compile_all(
        self, needed: Sequence[ProgramSpec], *, progress: bool = False
    ) -> list[Program]:
        """Compiles many programs in parallel and returns them.

        Args:
            needed: their specs.
            progress: show a progress bar on stderr.
        """
        return self.all_compiled(list(needed), progress=progress)

    def compile_in_background(
        self,
        needed: Sequence[ProgramSpec],
        on_compiled: Callable[[Program], None] = lambda _: None,
        *,
        optional: bool = False,
    ) -> None:
        """Compiles programs in a thread while others run; see `Programs.compile_in_background`.

        Args:
            needed: their specs.
            on_compiled: called with each of them, in another thread.
            optional: all goes on without them.
        """
        self.refuse_hosts("compilation in the background")
        # The thread must not keep this runner, whose parameters would stay in memory.
        arrived = self._arrived

        def arrive(program: Program) -> None:
            arrived.append(program)
            on_compiled(program)

        lowerings = {spec: self._lowering(spec).without_arrays() for spec in needed}
        self.programs.compile_in_background(lowerings, arrive, optional=optional)

    @mirrored
    def all_compiled(self, needed: list[ProgramSpec], *, progress: bool = False) -> list[Program]:
        """Does what `compile_all` does; followers do it without a bar."""
        builds = {spec: partial(self._lowering, spec) for spec in needed}
        self.programs.get_all(builds, progress=progress)
        return [self.program(spec) for spec in builds]

    def _lowering(self, spec: ProgramSpec) -> Lowering:
        return replace(spec.lowering(self), has_equal_rows=self.model.batch_invariant)
