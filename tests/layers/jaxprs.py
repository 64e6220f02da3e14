"""Lists the equations of traced functions."""

import jax
from jax.extend.core import jaxprs_in_params


def equations(function, *arguments, whole=()):
    """Returns every equation of the traced function, those of nested functions included.

    What is inside the primitives named by `whole`, such as kernels, is left out.
    """
    found, stack = [], [jax.make_jaxpr(function)(*arguments).jaxpr]
    while stack:
        for equation in stack.pop().eqns:
            found.append(equation)
            if str(equation.primitive) not in whole:
                stack.extend(jaxprs_in_params(equation.params))
    return found
