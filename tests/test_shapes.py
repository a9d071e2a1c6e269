import jax
import numpy as np
import pytest

from jaxagent.shapes import check_shapes


@pytest.mark.parametrize(
  "arguments, said",
  [
    (dict(a=((3, 4), "N T"), b=((3, 5), "N T")), r"b must have shape \[N T\] with N=3, T=4, got \(3, 5\)"),
    (dict(a=((3, 4), "N T"), b=((4,), "N")), r"b must have shape \[N\] with N=3, got \(4,\)"),
    (dict(a=((3,), "N T")), r"a must have shape \[N T\], got \(3,\)"),
    (dict(a=((2, 3, 4), "*B T"), b=((3, 4), "*B T")), r"b must have shape \[\*B T\]"),
    (dict(a=((), "*B T")), r"a must have shape \[\*B T\], got \(\)"),
  ],
)
def test_names_the_argument_that_disagrees(arguments, said):
  with pytest.raises(ValueError, match=said):
    check_shapes(**{k: (np.zeros(shape), axes) for k, (shape, axes) in arguments.items()})


def test_accepts_what_agrees_missing_arguments_and_tracers():
  check_shapes(a=(np.zeros((2, 3, 4)), "*B T"), b=(np.zeros((2, 3)), "*B"), c=(None, "N"), d=(1.0, "*X"))
  jax.jit(lambda x: check_shapes(x=(x, "N T"), y=(x[0], "T")))(np.zeros((2, 3)))
