"""The imports of the bridge."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["torch", "transformers"])
def test_an_import_without_torch_or_transformers_names_the_extra(name):
    # An empty module is enough of torch, which takes seconds to import.
    program = "import sys, types; sys.modules['torch'] = types.ModuleType('torch'); "
    program += f"sys.modules[{name!r}] = None; import torch_bridge"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = found.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: torch_bridge needs")
    assert f"needs {name}, " in last
    assert "pip install 'jaxkv[torch]'" in last
