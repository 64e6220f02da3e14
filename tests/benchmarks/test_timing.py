"""The timing of ops: refusals, the calls of one launch, and the reported times."""

from itertools import pairwise

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.timing import (
    CEILINGS,
    Chain,
    Effort,
    refuse_profilers,
    time_chain,
    time_launches,
)

QUICK = Effort(trials=3, seconds=0.01)


def add_own(shared, own):
    shared = {"total": shared["total"] + own["value"]}
    return shared, shared["total"][0]


def made_from(sources, jaxpr):
    """Returns the variables of a jaxpr that cannot be computed without one of `sources`."""
    found = set(sources)
    for equation in jaxpr.eqns:
        if any(isinstance(one, jax.extend.core.Var) and one in found for one in equation.invars):
            found.update(equation.outvars)
    return found


class Clock:
    """A clock that stands still between the moments that a test lets pass."""

    def __init__(self):
        self.now = 100.0

    def pass_(self, seconds):
        self.now += seconds

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr("pallas_kernels.workbench.timing.time", made)
    return made


class TestProfilers:
    def test_it_refuses_under_jax_profiler(self, tmp_path):
        with jax.profiler.trace(str(tmp_path)), pytest.raises(RuntimeError, match=r"jax\.profiler"):
            time_launches(lambda: None, calls=1, effort=QUICK)
        refuse_profilers()

    @pytest.mark.parametrize("variable", ["NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH"])
    def test_it_refuses_under_a_profiler_around_the_process(self, monkeypatch, variable):
        monkeypatch.setenv(variable, "1")
        with pytest.raises(RuntimeError, match=variable):
            refuse_profilers()

    @pytest.mark.torch
    def test_it_refuses_under_torch_profiler(self):
        import torch

        with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="torch"):
            refuse_profilers()


class TestChain:
    def test_it_serves_each_call_in_order_and_carries_the_shared_arrays_on(self):
        own = [{"value": jnp.float32(value)} for value in (1, 10)]
        chain = Chain(add_own, {"total": jnp.zeros(3)}, own, rounds=2)
        assert chain.calls == 4
        assert [float(result) for result in chain.launch()] == [12, 22]
        assert [float(result) for result in chain.launch()] == [34, 44]
        np.testing.assert_array_equal(chain.shared["total"], [44, 44, 44])

    def test_another_number_of_rounds_needs_no_other_program(self):
        chain = Chain(add_own, {"total": jnp.zeros(3)}, [{"value": jnp.float32(1)}])
        chain.compile()
        chain.rounds = 5
        assert chain.calls == 5
        assert [float(result) for result in chain.launch()] == [5]

    def test_it_updates_the_shared_arrays_in_place(self):
        pool = {"total": jnp.zeros(2**16)}
        chain = Chain(add_own, pool, [{"value": jnp.float32(1)}] * 3)
        chain.launch()
        assert pool["total"].is_deleted()

    def test_it_makes_every_call_though_they_read_the_same_arrays(self):
        """XLA would compute three equal products once."""

        def square(shared, own):
            return shared, own["x"] @ own["x"]

        x = {"x": jnp.ones((8, 8))}
        chain = Chain(square, {}, [x, x, x], rounds=2)
        lowered = chain._run.lower(jnp.int32(2), {}, chain._own)
        assert lowered.as_text().count("dot_general") == 3
        assert lowered.as_text().count("optimization_barrier") == 3

    def test_its_time_is_that_of_one_call_without_what_a_launch_costs(self, monkeypatch, clock):
        chain = Chain(add_own, {"total": jnp.zeros(3)}, [{"value": jnp.float32(1)}] * 2)

        def launch():
            clock.pass_(0.01 + 0.0005 * chain.calls)
            return 0

        monkeypatch.setattr(chain, "launch", launch)
        timing = time_chain(chain, Effort(trials=3, seconds=0.05))
        assert timing.us == pytest.approx(500)
        assert not timing.host_bound

    def test_it_waits_for_calls_that_only_write(self, monkeypatch):
        """Their launches return nothing; one that is not waited for takes no time, so no number of rounds is enough."""

        def write(shared, own):
            return {"total": shared["total"] + own["value"]}, ()

        waited = []
        monkeypatch.setattr(
            "pallas_kernels.workbench.timing.jax.block_until_ready",
            lambda tree: waited.append(jax.tree.leaves(tree)),
        )
        chain = Chain(write, {"total": jnp.zeros(3)}, [{"value": jnp.float32(1)}] * 2)
        time_chain(chain, Effort(trials=1, seconds=1e-6))
        assert waited
        assert all(len(leaves) == 1 for leaves in waited)

    def test_each_call_waits_for_the_result_of_the_one_before(self):
        """Else calls that share no array would be reordered, or run at once, and their time would be too short."""

        def independent(shared, own):
            return shared, jnp.tanh(own["x"])

        chain = Chain(independent, {}, [{"x": jnp.ones(4)}] * 3)
        program = chain._run.trace(jnp.int32(2), {}, chain._own).jaxpr
        [loop] = [one for one in program.eqns if one.primitive.name == "while"]
        body = loop.params["body_jaxpr"].jaxpr
        calls = [one for one in body.eqns if one.primitive.name == "tanh"]
        assert len(calls) == 3
        for before, call in pairwise(calls):
            assert call.invars[0] in made_from(before.outvars, body)
        # The last call's result is carried to the next round, whose first call waits for it.
        carried = body.invars[loop.params["body_nconsts"] :]
        last = carried[body.outvars.index(calls[-1].outvars[0])]
        assert calls[0].invars[0] in made_from([last], body)

    def test_a_graph_runs_its_nodes_one_after_another(self, monkeypatch):
        """What XLA compiles for a GPU has no barriers left, and a CUDA graph overlaps nodes that it may."""
        asked = {}
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "jit", lambda function, **options: asked.update(options))
        Chain(add_own, {}, [])
        assert asked["compiler_options"]["xla_gpu_command_buffer_scheduling_mode"] == "SERIALIZE"


class TestTiming:
    def test_it_is_the_time_of_one_call(self, clock):
        waited = []

        def launch():
            clock.pass_(0.02)
            return "result"

        timing = time_launches(
            launch, calls=4, effort=Effort(trials=3, seconds=0.02), wait=waited.append
        )
        assert timing.us == pytest.approx(5e3)
        assert timing.spread == pytest.approx(0, abs=1e-9)
        assert timing.calls % 4 == 0
        assert set(waited) == {"result"}

    def test_the_floor_is_the_larger_of_bytes_and_products(self):
        ceilings = CEILINGS["NVIDIA H200"]
        assert ceilings.floor_us(4_300_000, 0, "bfloat16") == pytest.approx(1.0)
        assert ceilings.floor_us(0, 790_000_000, "bfloat16") == pytest.approx(1.0)
        assert ceilings.floor_us(4_300_000, 7_900_000_000, "bfloat16") == pytest.approx(10.0)
        # Products in float32 have no measured ceiling.
        assert ceilings.floor_us(4_300_000, 7_900_000_000, "float32") == pytest.approx(1.0)
