"""Tunix's own sampler as a side of benchmarks/sampler.py. Needs google-tunix; prompts of one length.

As its GRPO learner calls it: log-probs wanted, top_p = 1, the end token out of reach.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import importlib.metadata

import answering
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen3 import model as qwen3


class Words:
  """Token i is the word "ti"; 0 pads, 1 begins, 2 ends."""

  def encode(self, text: str, **options) -> list[int]:
    return [int(word[1:]) for word in text.split()]

  def decode(self, ids, **options) -> str:
    return " ".join(f"t{int(i)}" for i in ids)

  def pad_id(self) -> int:
    return 0

  def bos_id(self) -> int:
    return 1

  def eos_id(self) -> int:
    return 2


def model(shape: dict):
  """Weights drawn by NumPy, which compiles nothing, in every array: some are zero as Tunix makes them."""
  config = qwen3.ModelConfig(
    num_layers=shape["layers"], vocab_size=shape["vocab_size"], embed_dim=shape["width"],
    hidden_dim=shape["mlp_width"], num_heads=shape["heads"], head_dim=shape["head_dim"],
    num_kv_heads=shape["kv_heads"], rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
  )  # fmt: skip
  graph, state = nnx.split(nnx.eval_shape(lambda: qwen3.Qwen3(config, rngs=nnx.Rngs(0))))
  rng = np.random.default_rng(0)

  def drawn(x):
    return jnp.ones(x.shape, x.dtype) if x.ndim == 1 else jnp.asarray(rng.normal(0, 0.02, x.shape), x.dtype)

  return nnx.merge(graph, jax.tree.map(drawn, state))


def main() -> None:
  work, words = answering.work(), Words()
  shape, batches = work["model"], answering.batches(work)
  longest = max(len(prompts[0]) + new for prompts, new in batches)
  sampler = tunix_sampler.Sampler(
    model(shape), words, tunix_sampler.CacheConfig(longest + 1, shape["layers"], shape["kv_heads"], shape["head_dim"])
  )

  def sample() -> None:
    for prompts, new in batches:
      length = len(prompts[0])
      texts = [words.decode(prompt[1:]) for prompt in prompts]  # the sampler puts a begin token in front
      out = sampler(
        texts, max_generation_steps=new, max_prompt_length=length, temperature=1.0, top_p=1.0,
        eos_tokens=[shape["vocab_size"] + 7], return_logprobs=True, seed=0,
      )  # fmt: skip
      assert [len(tokens) for tokens in out.tokens] == [new] * len(prompts)

  if work["warm"]:
    sample()
  answering.answer({"sampler": sample}, tunix=importlib.metadata.version("google-tunix"), jax=jax.__version__)


if __name__ == "__main__":
  main()
