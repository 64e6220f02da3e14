"""Lists the equations of traced functions."""

import jax
from jax.extend.core import jaxprs_in_params


def equations(function, *arguments):
    """Returns every equation of the traced function, those of nested functions included."""
    found, stack = [], [jax.make_jaxpr(function)(*arguments).jaxpr]
    while stack:
        for equation in stack.pop().eqns:
            found.append(equation)
            stack.extend(jaxprs_in_params(equation.params))
    return found
