"""GGUF files: their tensors under Hugging Face names, their metadata as a config, their vocabulary as a tokenizer."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxagent.models.config import DecoderConfig
from jaxagent.models.loading import Stored
from jaxagent.models.tokenizer import Tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")

_TENSORS = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}
_BLOCK = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
  "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_CONTROL, _USER_DEFINED = 3, 4  # token types

_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
  r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_gguf(
  path: str | Path, *, own_tokenizer: bool = True
) -> tuple[DecoderConfig, dict[str, Stored], tuple[Tokenizer, str | None] | None]:
  """(config, tensors by Hugging Face name, (tokenizer, chat template)); tensors are dequantised to float32 when read.

  Llama files store q and k for interleaved rotary pairs (2i, 2i + 1); they are reordered to half-split pairs here.
  Errors: ValueError for a truncated or foreign file, and for architectures, features and vocabularies not supported.
  """
  reader = _open(Path(path))
  metadata = {name: field for name, field in reader.fields.items()}
  metadata = _Metadata(reader.fields, path)
  config = _config(metadata, {tensor.name: _shape(tensor) for tensor in reader.tensors})
  stored: dict[str, Stored] = {}
  for tensor in reader.tensors:
    stored |= _translate(tensor, config, metadata)
  own = (_tokenizer(metadata), metadata.get("tokenizer.chat_template")) if own_tokenizer else None
  return config, stored, own


class _Metadata:
  """Metadata by key; values are decoded when asked for."""

  def __init__(self, fields: dict[str, Any], path: str | Path):
    self.fields, self.path = fields, path

  def get(self, key: str, default: Any = None) -> Any:
    return self.fields[key].contents() if key in self.fields else default

  def __getitem__(self, key: str) -> Any:
    if key not in self.fields:
      raise ValueError(f"{self.path} lacks the metadata {key}")
    return self.get(key)


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
  """(out, in): the file lists dimensions innermost first."""
  return tuple(int(n) for n in reversed(tensor.shape))


def _open(path: Path) -> gguf.GGUFReader:
  try:
    reader = gguf.GGUFReader(path)
  except FileNotFoundError:
    raise
  except Exception as error:  # the reader trips over whatever it meets in a damaged file
    raise ValueError(f"{path} is not a GGUF file, or is truncated or damaged: {error}") from error
  end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
  if end > path.stat().st_size:
    raise ValueError(f"{path} is truncated: {path.stat().st_size} bytes, its tensors need {end}")
  return reader


def _config(metadata: _Metadata, shapes: dict[str, tuple[int, ...]]) -> DecoderConfig:
  kind = metadata["general.architecture"]
  if kind not in ARCHITECTURES:
    raise ValueError(
      f"architecture {kind} of {metadata.path} is not supported; supported are {', '.join(ARCHITECTURES)}"
    )

  def own(key, default=None):
    return metadata[f"{kind}.{key}"] if default is None else metadata.get(f"{kind}.{key}", default)

  heads, width, moe = own("attention.head_count"), own("embedding_length"), kind == "qwen3moe"
  head_dim = own("attention.key_length", width // heads)
  _check_features(metadata, kind, own, head_dim)
  if "token_embd.weight" not in shapes:
    raise ValueError(f"{metadata.path} lacks token_embd.weight")
  return DecoderConfig(
    vocab_size=shapes["token_embd.weight"][0],
    width=width,
    layers=own("block_count"),
    mlp_width=0 if moe else own("feed_forward_length"),
    heads=heads,
    kv_heads=own("attention.head_count_kv", heads),
    head_dim=head_dim,
    rope_theta=float(own("rope.freq_base", 10000.0)),
    norm_eps=float(own("attention.layer_norm_rms_epsilon")),
    tied="output.weight" not in shapes,
    qkv_bias=kind == "qwen2",
    qk_norm=kind in ("qwen3", "qwen3moe"),
    max_position=own("context_length"),
    experts=own("expert_count") if moe else 0,
    experts_per_token=own("expert_used_count") if moe else 0,
    expert_width=own("expert_feed_forward_length") if moe else 0,
    norm_topk_prob=True,
  )


def _check_features(metadata: _Metadata, kind: str, own: Callable, head_dim: int) -> None:
  scaling, rotated = own("rope.scaling.type", "none"), own("rope.dimension_count", head_dim)
  window, experts = own("attention.sliding_window", 0), own("expert_count", 0)
  lacks = [
    (scaling != "none", f"rope scaling ({scaling})"),
    (rotated != head_dim, f"rotary positions on {rotated} of {head_dim} dimensions"),
    (own("attention.value_length", head_dim) != head_dim, "values of another size than keys"),
    (window, f"sliding window attention ({window})"),
    (kind != "qwen3moe" and experts, f"a mixture of {experts} experts in the {kind} architecture"),
    (isinstance(own("feed_forward_length", 0), list), "layers of different sizes"),
  ]
  for present, name in lacks:
    if present:
      raise ValueError(f"{metadata.path} asks for {name}, which the decoder does not have")


def _translate(tensor: gguf.ReaderTensor, config: DecoderConfig, metadata: _Metadata) -> dict[str, Stored]:
  """The tensor under its Hugging Face name; one that has none keeps its own, and is found unused later."""
  if tensor.name == "rope_freqs.weight":
    raise ValueError(f"{metadata.path} asks for rope scaling ({tensor.name}), which the decoder does not have")
  shape = _shape(tensor)
  block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", tensor.name)
  if block is None:
    name = _TENSORS.get(tensor.name, tensor.name)
    return {name: Stored(shape, lambda: _dequantize(tensor, tensor.data))}
  layer, part, what = block.groups()
  prefix = f"model.layers.{layer}."
  if part in _EXPERTS:
    name = prefix + "mlp.experts.{}." + f"{_EXPERTS[part]}.{what}"
    return {name.format(e): Stored(shape[1:], _expert(tensor, e)) for e in range(shape[0])}
  name = f"{prefix}{_BLOCK[part]}.{what}" if part in _BLOCK else tensor.name
  if metadata["general.architecture"] == "llama" and part in ("attn_q", "attn_k"):
    heads = config.heads if part == "attn_q" else config.kv_heads
    return {name: Stored(shape, lambda: _half_split(_dequantize(tensor, tensor.data), heads))}
  return {name: Stored(shape, lambda: _dequantize(tensor, tensor.data))}


def _expert(tensor: gguf.ReaderTensor, expert: int) -> Callable[[], np.ndarray]:
  return lambda: _dequantize(tensor, tensor.data[expert])


def _dequantize(tensor: gguf.ReaderTensor, data: np.ndarray) -> np.ndarray:
  try:
    return gguf.dequantize(data, tensor.tensor_type)
  except NotImplementedError as error:
    raise ValueError(f"{tensor.name} is stored as {tensor.tensor_type.name}, which cannot be dequantised") from error


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows of each head from pairs (2i, 2i + 1) to pairs (i, i + d / 2)."""
  d = rows.shape[0] // heads
  return rows.reshape(heads, d // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(metadata: _Metadata) -> Tokenizer:
  """Byte-level BPE from the file's own vocabulary and merges; control tokens are the special ones."""
  if "tokenizer.ggml.tokens" not in metadata.fields:
    raise ValueError(f"{metadata.path} has no tokenizer; set model.tokenizer to a folder with tokenizer.json")
  model, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
  if model != "gpt2" or pre not in _PRE_TOKENIZERS:
    raise ValueError(
      f"the tokenizer of {metadata.path} is {model} with pre-tokenizer {pre}; supported are gpt2 with"
      f" {', '.join(_PRE_TOKENIZERS)}. Set model.tokenizer to a folder with tokenizer.json"
    )
  tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
  merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
  vocabulary = {token: i for i, token in enumerate(tokens)}
  inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
  if pre == "qwen2":
    inner.normalizer = normalizers.NFC()
  inner.pre_tokenizer = _PRE_TOKENIZERS[pre]()
  inner.decoder = decoders.ByteLevel()
  for token, kind in zip(tokens, kinds):
    if kind == _CONTROL:
      inner.add_special_tokens([AddedToken(token, normalized=False, special=True)])
    elif kind == _USER_DEFINED:
      inner.add_tokens([AddedToken(token, normalized=False, special=False)])
  names = {"eos_id": "eos_token_id", "pad_id": "padding_token_id", "bos_id": "bos_token_id"}
  return Tokenizer(inner, **{field: metadata.get(f"tokenizer.ggml.{key}") for field, key in names.items()})


def _digits() -> pre_tokenizers.PreTokenizer:
  digits = pre_tokenizers.Digits(individual_digits=True)
  return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
  words = pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated")
  return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS = {
  "smollm": _digits,
  "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
  "qwen2": lambda: _split(""),
  "llama-bpe": lambda: _split("{1,3}"),
}
