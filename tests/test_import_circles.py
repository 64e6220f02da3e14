"""No files of the packages import each other in a circle; imports under TYPE_CHECKING and inside functions count."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jaxkv", "pallas_kernels", "torch_bridge")


def imported(tree, module, modules):
    """Returns the modules that a file imports; of a package, the submodule that it names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively; ruff's TID forbids it"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
    return found & modules - {module}


def circles(graph):
    """Returns the strongly connected parts of more than one file, by Tarjan's algorithm."""
    number, lowest, stack, parts = {}, {}, [], []

    def visit(node):
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in graph[node]:
            if other not in number:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == number[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                parts.append(sorted(part))

    for node in graph:
        if node not in number:
            visit(node)
    return parts


def graph_of(root, packages):
    """Returns for each module the modules that it imports."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for package in packages
        for path in (root / package).rglob("*.py")
    }
    modules = files.keys()
    return {
        module: imported(ast.parse(path.read_text()), module, modules)
        for module, path in files.items()
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_import_each_other_in_a_circle(package):
    assert not circles(graph_of(ROOT, [package]))


def test_a_circle_that_only_type_checkers_see_is_found(tmp_path):
    package = tmp_path / "house"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "above.py").write_text("from house.below import Data\n")
    checked = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house import above\n"
    (package / "below.py").write_text(checked)
    assert circles(graph_of(tmp_path, ["house"])) == [["house.above", "house.below"]]
