"""Many cases of one test: a few of them always, all of them in the slow tests."""

import itertools

import pytest


def thinned(names: str, *axes, every: int):
  """Parametrize over the product of `axes`; all cases but each `every`-th are slow.

  With an `every` that has no divisor in common with the lengths of the inner axes, the few hold all their values.
  """
  cases = itertools.product(*axes)
  return pytest.mark.parametrize(
    names, [pytest.param(*case, marks=[pytest.mark.slow] if i % every else []) for i, case in enumerate(cases)]
  )
