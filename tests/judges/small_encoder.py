"""A folder with a random BERT encoder of two layers and a tokenizer of bytes' worth of pieces, which pads."""

import json

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import models, normalizers, pre_tokenizers, processors

SIZES = {
  "model_type": "bert", "hidden_act": "gelu", "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4,
  "num_hidden_layers": 2, "max_position_embeddings": 64, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
}  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*=<>/.,:"


def small_folder(path, seed=0):
  """(folder, weights)."""
  pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{c}" for c in LETTERS)]
  vocab = {piece: i for i, piece in enumerate(pieces)}
  tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=200))
  tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
  tokenizer.post_processor = processors.TemplateProcessing(
    "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
  )
  tokenizer.enable_padding(length=32)
  tokenizer.save(str(path / "tokenizer.json"))
  config = {**SIZES, "vocab_size": len(pieces)}
  (path / "config.json").write_text(json.dumps(config))
  weights = random_weights(config, np.random.default_rng(seed))
  save_file(weights, str(path / "model.safetensors"))
  return path, weights


def random_weights(c, rng):
  d, f = c["hidden_size"], c["intermediate_size"]
  shapes = {
    "embeddings.word_embeddings.weight": (c["vocab_size"], d), "embeddings.token_type_embeddings.weight": (2, d),
    "embeddings.position_embeddings.weight": (c["max_position_embeddings"], d),
  }  # fmt: skip
  linear = {f"attention.self.{n}": (d, d) for n in ("query", "key", "value")}
  linear |= {"attention.output.dense": (d, d), "intermediate.dense": (f, d), "output.dense": (d, f)}
  norms = ["embeddings.LayerNorm"]
  for i in range(c["num_hidden_layers"]):
    for name, shape in linear.items():
      shapes |= {f"encoder.layer.{i}.{name}.weight": shape, f"encoder.layer.{i}.{name}.bias": shape[:1]}
    norms += [f"encoder.layer.{i}.{name}.LayerNorm" for name in ("attention.output", "output")]
  made = {name: rng.normal(size=shape).astype(np.float32) * 0.5 for name, shape in shapes.items()}
  for name in norms:
    made |= {f"{name}.weight": rng.uniform(0.5, 1.5, d).astype(np.float32), f"{name}.bias": np.zeros(d, np.float32)}
  return made
