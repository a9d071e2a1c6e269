"""Hugging Face `generate` as a side of benchmarks/sampler.py, with its dynamic or its static cache.

Needs torch and transformers. No end token, so that nothing but drawing a token happens to the logits.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin take the cores from everybody else
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import answering
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

transformers.logging.set_verbosity_error()


def model(work: dict):
  shape, dtype = work["model"], getattr(torch, work["dtype"])
  if "path" in shape:
    return AutoModelForCausalLM.from_pretrained(shape["path"], dtype=dtype).eval()
  torch.manual_seed(0)
  config = Qwen3Config(
    vocab_size=shape["vocab_size"], hidden_size=shape["width"], intermediate_size=shape["mlp_width"],
    num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"], num_key_value_heads=shape["kv_heads"],
    head_dim=shape["head_dim"], tie_word_embeddings=True, max_position_embeddings=4096, bos_token_id=None,
    eos_token_id=None, pad_token_id=0,
  )  # fmt: skip
  return Qwen3ForCausalLM(config).to(dtype).eval()


def main() -> None:
  work = answering.work()
  torch.set_num_threads(os.cpu_count())
  network = model(work)
  network.generation_config.eos_token_id = None

  @torch.no_grad()
  def generate(cache: str, most: int | None = None) -> None:
    for prompts, new in answering.batches(work):
      ids, new = torch.tensor(prompts), min(new, most or new)
      out = network.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0,
        top_p=1.0, pad_token_id=0, cache_implementation=cache,
      )  # fmt: skip
      assert out.shape == (len(prompts), ids.shape[1] + new)

  if work["warm"]:
    for cache in ("dynamic", "static"):
      generate(cache, most=4)
  ways = {cache: lambda cache=cache: generate(cache) for cache in ("dynamic", "static")}
  answering.answer(ways, torch=torch.__version__, transformers=transformers.__version__)


if __name__ == "__main__":
  main()
