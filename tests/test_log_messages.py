"""JAXKV_LOG shows log messages on stderr; without it the packages add no handler."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = ("jaxkv", "pallas_kernels", "torch_bridge")


def stderr_of(program, level):
    environment = {name: value for name, value in os.environ.items() if name != "JAXKV_LOG"}
    if level is not None:
        environment["JAXKV_LOG"] = level
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        text=True,
        env=environment,
        cwd=Path(find_spec("jaxkv").origin).parents[1],
    )
    return run.stderr


@pytest.mark.parametrize("level", ["info", "INFO", "debug"])
def test_messages_of_every_package_appear_once(level):
    program = (
        "import logging, jaxkv; logging.basicConfig(level='INFO');"
        f"[logging.getLogger(name + '.part').info('hello') for name in {PACKAGES}]"
    )
    lines = stderr_of(program, level).splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        f"INFO {package}.part: hello" for package in PACKAGES
    ]


def test_messages_below_the_level_do_not_appear():
    program = "import logging, jaxkv; logging.getLogger('jaxkv.part').info('hello')"
    assert stderr_of(program, "warning") == ""


@pytest.mark.parametrize("level", [None, ""])
def test_without_the_variable_no_handler_is_added(level):
    program = (
        f"import logging, jaxkv; assert not any(logging.getLogger(n).handlers for n in {PACKAGES})"
    )
    assert stderr_of(program, level) == ""


def test_a_level_that_does_not_exist_is_named():
    assert (
        "JAXKV_LOG must be one of debug, info, warning, error, critical, got 'loud'"
        in stderr_of("import jaxkv", "loud")
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_read_the_annotations_of_every_package(package):
    assert (Path(find_spec(package).origin).parent / "py.typed").is_file()
