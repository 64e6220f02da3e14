"""Switches on the checks of annotated shapes and types, for the tests' conftest and for programs that tests start."""

import dataclasses
import functools
import importlib.util
import inspect
from types import CellType, FunctionType
from typing import Literal, TypeAliasType, get_args, get_origin


def check_shapes(packages=("jaxkv", "pallas_kernels")):
    """Lets beartype, where it is installed, check every function of the packages that is imported from now on."""
    # Imported before the hook: they check what users give them by themselves, and the tests give them nonsense.
    import jaxkv.config.blocks
    import jaxkv.config.engine
    import jaxkv.config.model
    import jaxkv.config.sampling
    import jaxkv.text.prompts  # noqa: F401

    if importlib.util.find_spec("beartype") is not None:
        import jaxtyping

        checker = functools.partial(functools.partial, _checked, jaxtyping.jaxtyped)
        jaxtyping.jaxtyped = checker
        jaxtyping.install_import_hook(list(packages), "beartype.beartype")


def _checked(jaxtyped, checked, *, typechecker):
    """Returns a function or class of ours with the checks of its annotations.

    Functions without arrays are left to beartype alone: jaxtyping binds the arguments of each call to compare sizes,
    which takes longer than most functions do.
    """
    if inspect.isclass(checked):
        init = vars(checked).get("__init__")
        unchecked = not dataclasses.is_dataclass(checked) or _is_exempt(checked)
        if init is not None and not unchecked and not _takes_arrays(init):
            checked.__init__ = _without_sizes(init, typechecker)
            return checked
    elif inspect.isfunction(checked) and not _takes_arrays(checked) and _returns(checked):
        return _without_sizes(checked, typechecker)
    return jaxtyped(checked, typechecker=typechecker)


def _is_exempt(checked):
    """Whether `typing.no_type_check` was applied, which may happen after the decoration."""
    return getattr(checked, "__no_type_check__", False)


def _returns(function):
    """Whether a call returns what the annotation says; beartype refuses generators that an alias annotates."""
    kinds = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return not function.__code__.co_flags & kinds


def _takes_arrays(function):
    return any(_holds_array(hint) for hint in function.__annotations__.values())


def _holds_array(hint, seen=()):
    """Whether an annotation names sizes; one in a string may. `seen` holds the aliases around it, which may recur."""
    from jaxtyping import AbstractArray, PyTree

    if isinstance(hint, TypeAliasType):
        return hint not in seen and _holds_array(hint.__value__, (*seen, hint))
    if get_origin(hint) is Literal:
        return False
    if isinstance(hint, list | tuple):
        return any(_holds_array(part, seen) for part in hint)
    if isinstance(hint, type) and (
        issubclass(hint, AbstractArray) or isinstance(hint, type(PyTree))
    ):
        return True
    return isinstance(hint, str) or _holds_array(get_args(hint), seen)


def _without_sizes(function, typechecker):
    from beartype import BeartypeConf
    from jaxtyping import TypeCheckError, config

    # The type of error that jaxtyping raises, which is a TypeError.
    conf = BeartypeConf(violation_type=TypeCheckError)
    typed = _local(function, conf, typechecker) or typechecker(function, conf=conf)
    if typed is function:
        return function

    @functools.wraps(function)
    def checked(*args, **kwargs):
        if config.jaxtyping_disable or "__no_type_check__" in attributes:
            return function(*args, **kwargs)
        return typed(*args, **kwargs)

    # Not the function, which would refer to itself: what a local one holds would wait for the garbage collector.
    attributes = vars(checked)
    return checked


_WRITTEN = {}
"""What beartype wrote for local functions, by their code and annotations."""


def _local(function, conf, typechecker):
    """Returns a local function with the checks that beartype wrote when it was first made, or `None` for another one.

    A local function is made at each call of the one around it, and writing its checks takes longer than most calls.
    """
    if "<locals>" not in function.__qualname__ or hasattr(function, "__wrapped__"):
        return None
    key = function.__code__, tuple(function.__annotations__.items())
    try:
        typed = _WRITTEN.get(key)
    except TypeError:  # an annotation has no hash
        return None
    if typed is None:
        # What the first one holds must not live as long as its checks.
        empty = tuple(CellType() for _ in function.__closure__ or ()) or None
        bare = FunctionType(function.__code__, function.__globals__, closure=empty)
        bare.__annotations__, bare.__qualname__ = function.__annotations__, function.__qualname__
        typed = _WRITTEN[key] = typechecker(bare, conf=conf)
    named = typed.__kwdefaults__ or {}
    if "__beartype_func" not in named:
        return None
    made = FunctionType(typed.__code__, typed.__globals__, closure=typed.__closure__)
    made.__kwdefaults__ = named | {"__beartype_func": function}
    return made
