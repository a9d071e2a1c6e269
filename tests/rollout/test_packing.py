import dataclasses

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from jaxagent.methods import dapo, grpo, plain, prepare
from jaxagent.rollout.packing import pack, unpack


def packed(seed=0, row_tokens=48, rows=4, **kwargs):
  r = tiny.ragged(seed, ref=True)
  routing = np.random.default_rng(seed).integers(0, 4, (*r.tokens.shape, 2, 3)).astype(np.int16)
  columns = {
    "quality": r.mask * 2.0,
    "score": np.arange(16.0),
    "rewards": np.ones((16, 5)),
    "deep": r.mask[..., None] * 1,
  }
  r = dataclasses.replace(r, routing=routing, columns=columns)
  p = prepare(grpo, r)
  return p, *pack(p, row_tokens=row_tokens, rows=rows, **kwargs)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), row_tokens=st.integers(24, 70), rows=st.integers(1, 6))
def test_every_column_rides_with_its_token(seed, row_tokens, rows):
  p, b, plan = packed(seed, row_tokens, rows)
  r, here = p.rollouts, np.asarray(p.keep).any(1)
  inside = here[:, None] & (np.arange(24) < np.asarray(r.length)[:, None])
  pairs = [
    (getattr(b, k), getattr(r, k)) for k in ("tokens", "position", "logp_rollout", "logp_old", "logp_ref", "routing")
  ]
  pairs += [(b.mask, p.keep), (b.advantage, p.advantage), (b.weight, p.weight), (b.aggregate, p.aggregate)]
  pairs += [(b.columns[k], r.columns[k]) for k in ("quality", "deep")]
  for rows_of, source in pairs:
    source = np.asarray(source)
    where = inside.reshape(inside.shape + (1,) * (source.ndim - 2))
    assert_array_equal(unpack(rows_of, plan), np.where(where, source, 0))
  for rows_of, source in ((b.temperature, r.temperature), (b.columns["score"], r.columns["score"])):
    assert_array_equal(unpack(rows_of, plan), np.where(inside, np.asarray(source)[:, None], 0))
  assert set(b.columns) == {"quality", "score", "deep"}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), row_tokens=st.integers(24, 70))
def test_rows_are_never_split_or_overlaid(seed, row_tokens):
  p, b, plan = packed(seed, row_tokens, 2)
  for row in b.segment.reshape(-1, row_tokens):
    used = row[row >= 0]
    assert_array_equal(row, [*np.sort(used), *[-1] * (row_tokens - len(used))])
    assert set(used) == set(range(len(set(used))))
  assert (b.segment >= 0).sum() == np.asarray(p.rollouts.length)[np.asarray(p.keep).any(1)].sum()
  assert_array_equal((b.segment >= 0).any((1, 2)), np.arange(len(b.segment)) < plan.microbatches)


def test_padding_is_inert():
  _, b, _ = packed()
  empty = b.segment == -1
  assert not b.mask[empty].any() and (b.turn[empty] == -1).all() and (b.temperature[empty] == 1).all()
  assert (b.routing[empty] == -1).all() and not b.aggregate[empty].any() and not b.tokens[empty].any()


def test_turns_are_dense_and_distinct_within_a_row():
  r = tiny.ragged()
  r = dataclasses.replace(r, turn=np.where(r.turn >= 0, r.turn * 3 + 5, -1))  # a later branch of a long rollout
  b, _ = pack(prepare(grpo, r), row_tokens=48, rows=4)
  for row in range(16):
    turn, segment = b.turn.reshape(16, 48)[row], b.segment.reshape(16, 48)[row]
    present = np.unique(turn[turn >= 0])
    assert_array_equal(present, np.arange(len(present)))
    assert all(len(set(segment[turn == k])) == 1 for k in present)
    assert (np.diff(turn[turn >= 0]) >= 0).all()


def test_prefix_end_is_an_index_of_the_row():
  p, b, plan = packed()
  for n in np.flatnonzero(plan.row >= 0):
    row, start = b.prefix_end.reshape(-1, 48)[plan.row[n]], plan.offset[n]
    assert (row[start : start + plan.length[n]] == start + np.asarray(p.rollouts.prefix_length)[n]).all()


def test_first_fit_decreasing_and_its_efficiency():
  r = tiny.ragged(n=8)
  length = np.array([24, 20, 12, 12, 4, 4, 0, 0])
  r = dataclasses.replace(r, length=length, mask=np.arange(24) < np.minimum(length, 5)[:, None], valid=length > 0)
  _, plan = pack(plain(r), row_tokens=24, rows=2)
  assert_array_equal(plan.row, [0, 1, 2, 2, 1, 3, -1, -1])
  assert_array_equal(plan.offset, [0, 0, 0, 12, 20, 0, 0, 0])
  assert plan.microbatches == 2 and plan.shape == (4, 2, 24) and plan.efficiency == 76 / 96


def test_shape_does_not_depend_on_the_lengths():
  assert {packed(seed)[1].tokens.shape for seed in range(5)} == {(4, 4, 48)}


def test_rows_without_kept_tokens_are_left_out():
  r = tiny.ragged()
  _, plan = pack(prepare(dapo, r), row_tokens=24, rows=4)
  assert_array_equal(plan.row >= 0, r.valid & ~r.truncated)


def test_too_long_and_too_few_are_named():
  with pytest.raises(ValueError, match=r"has 2\d tokens but a packed row holds 12; raise training.row_tokens"):
    packed(row_tokens=12)
  with pytest.raises(ValueError, match="fill 2 microbatches of 4 rows but only 1"):
    packed(microbatches=1)
