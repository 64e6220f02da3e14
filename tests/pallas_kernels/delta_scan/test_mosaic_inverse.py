"""What a thread of `delta_systems` computes, with numbers in place of MLIR; only a GPU runs the instructions."""

from types import SimpleNamespace

import numpy as np

from pallas_kernels.delta_scan import mosaic_inverse
from pallas_kernels.delta_scan.mosaic_geometry import SIDE

HALF = SIDE // 2


def test_the_steps_of_a_thread_solve_its_column(monkeypatch):
    """The first half of the columns takes all steps, the second half the last ones. Nothing else is read: NaN."""
    numbers = SimpleNamespace(extract=lambda held, _, place: held[place[0]])
    monkeypatch.setattr(mosaic_inverse, "vector", numbers)
    monkeypatch.setattr(mosaic_inverse, "_math", SimpleNamespace(fma=lambda x, y, z: x * y + z))
    below = np.tril(np.random.default_rng(0).normal(size=(SIDE, SIDE)) * 0.3, -1)
    system = np.where(np.tri(SIDE, dtype=bool), np.nan, -below.T)

    class Column(mosaic_inverse._Column):
        def __init__(self):
            pass

        def read(self, step, row):
            assert row % 4 == 0
            return system[step, row : row + 4]

    found = []
    for column, unit in enumerate(np.eye(SIDE)):
        begun = Column().eliminate(list(unit), range(HALF)) if column < HALF else list(unit)
        found.append(Column().eliminate(begun, range(HALF, SIDE)))
    wanted = np.linalg.inv(np.eye(SIDE) + below)
    np.testing.assert_allclose(np.transpose(found), wanted, rtol=1e-10, atol=1e-12)
