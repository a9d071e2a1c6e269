"""Every public array function refuses arrays whose shapes disagree, and ids out of range, and names an argument."""

import importlib
import inspect
import typing

import numpy as np
import pytest

SIZES = dict(N=4, T=6, S=3, S1=4, A=2, D=3, R=2, B=4, L=2, E=3, K=2, P=4, C=3, V=4, F=3, M=4)
STATIC = dict(turns=3, k=2, max_tokens=8, eps=0.5, experts=3, size=2, envs=1, group_size=4, facts=3)
VALUES = dict(samples=5, outcome=1, quota=4, routing=0)
OTHER = {  # take records, keys or numbers under a law of their own: the tests of their modules have them
  "contract_progress", "rates_at", "update_rates", "update_thresholds", "exploring_batch", "uniform_batch",
  "weighted_batch", "propagate", "recency_bonus", "statistics_at", "update_statistics",
}  # fmt: skip


def annotated(parameter):
  """The axes that a parameter is annotated with, `["N T"]`; none for what is no array of the device."""
  annotation = parameter.annotation
  found = [a for a in (annotation, *typing.get_args(annotation)) if hasattr(a, "dim_str")]
  return [] if inspect.isfunction(parameter.default) else [a.dim_str for a in found if a.array_type is not np.ndarray]


def letters(axes):
  return [a for a in axes.replace("*", "").split() if a != "..."]


def example(name, parameter):
  kind, shape = str(parameter.annotation), tuple(SIZES[a] for a in letters(annotated(parameter)[0]))
  dtype = np.float32 if "Float" in kind.split("|")[0] else bool if "Bool" in kind.split("|")[0] else np.int32
  return np.full(shape, VALUES.get(name, 0 if dtype == np.int32 else 0.5), dtype)


def calls():
  for package in ("advantages", "rewards", "losses", "metrics", "scheduling"):
    module = importlib.import_module(f"jaxagent.{package}")
    for name in module.__all__:
      function = getattr(module, name)
      if not inspect.isfunction(function) or name in OTHER:
        continue
      parameters = inspect.signature(function).parameters
      arrays = {k: p for k, p in parameters.items() if annotated(p)}
      if len(arrays) > 1:
        static = {k: STATIC[k] for k, p in parameters.items() if k not in arrays and p.default is p.empty}
        yield pytest.param(function, arrays, static, id=f"{package}.{name}")


CALLS = list(calls())
WITH_IDS = [call for call in CALLS if {"group", "rollout"} & set(call.values[1])]


def refused(function, arguments, names):
  with pytest.raises(ValueError) as error:
    function(**arguments)
  assert any(name in str(error.value) for name in names), f"{error.value} names no argument"


@pytest.mark.parametrize("function, arrays, static", CALLS)
def test_shapes_that_disagree_are_refused(function, arrays, static):
  arguments = {k: example(k, p) for k, p in arrays.items()}
  function(**arguments, **static)
  for name, parameter in arrays.items():
    others = {a for k, p in arrays.items() if k != name for a in letters(annotated(p)[0])}
    for axis, letter in enumerate(letters(annotated(parameter)[0])):
      if letter in others:
        longer = np.concatenate([arguments[name], arguments[name].take([0], axis)], axis)
        refused(function, {**arguments, name: longer, **static}, arrays)
    one_rank = len(annotated(parameter)) == 1 and float not in typing.get_args(parameter.annotation)
    if one_rank and others.intersection(letters(annotated(parameter)[0])):
      refused(function, {**arguments, name: arguments[name][0], **static}, arrays)


@pytest.mark.parametrize("function, arrays, static", WITH_IDS)
def test_groups_and_rollouts_out_of_range_are_refused(function, arrays, static):
  arguments = {k: example(k, p) for k, p in arrays.items()}
  for name in {"group", "rollout"} & set(arrays):
    for wrong in (-1, SIZES["N"]):
      refused(function, {**arguments, name: np.full(SIZES["N"], wrong, np.int32), **static}, [name])
