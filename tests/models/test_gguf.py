import runpy
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from jaxagent.models.chat import Chat
from jaxagent.models.loading import load
from jaxagent.models.tokenizer import byte_characters, byte_tokenizer

MADE = runpy.run_path(str(Path(__file__).parents[1] / "fixtures" / "make_parity.py"))
KINDS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
NAMES = {
  "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
  "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
TOKENS = [*byte_characters(), "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "th", "the"]


def config_of(name):
  return MADE["CONFIGS"][name] | {"vocab_size": len(TOKENS), "hidden_size": 32}


def interleaved(weight, heads):
  """Rows of each head from half-split to neighbouring pairs, as GGUF llama files hold q and k."""
  d = weight.shape[0] // heads
  order = [h * d + i + half * (d // 2) for h in range(heads) for i in range(d // 2) for half in (0, 1)]
  return weight[order]


def gguf_tensors(name):
  config, tensors = config_of(name), {}
  for key, shape in MADE["shapes"](config).items():
    value = MADE["draw"](key, shape)
    if not key.startswith("model.layers."):
      new = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
      tensors[new.get(key, "output.weight")] = value
      continue
    layer, rest = key.removeprefix("model.layers.").split(".", 1)
    part, what = rest.rsplit(".", 1)
    if part.startswith("mlp.experts."):
      expert, part = part.removeprefix("mlp.experts.").split(".")
      stack = tensors.setdefault(f"blk.{layer}.ffn_{part.removesuffix('_proj')}_exps.{what}", [])
      assert len(stack) == int(expert)
      stack.append(value)
      continue
    if name == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
      value = interleaved(value, config["num_attention_heads" if "q_proj" in part else "num_key_value_heads"])
    tensors[f"blk.{layer}.{NAMES[part]}.{what}"] = value
  return {key: np.stack(value) if isinstance(value, list) else value for key, value in tensors.items()}


def write(path, name="llama", *, tensors=None, vocabulary=True, quantised=(), **extra):
  config, kind = config_of(name), KINDS[name]
  writer = gguf.GGUFWriter(str(path), kind)
  numbers = {
    "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
    "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
    "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
    "attention.key_length": config.get("head_dim", 8),
  }  # fmt: skip
  if "num_experts" in config:
    numbers |= {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
    numbers |= {"expert_feed_forward_length": config["moe_intermediate_size"]}
  for key, value in numbers.items():
    writer.add_uint32(f"{kind}.{key}", value)
  writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
  writer.add_float32(f"{kind}.rope.freq_base", config["rope_parameters"]["rope_theta"])
  if vocabulary:
    write_vocabulary(writer, extra.pop("pre", "smollm"))
  for key, value in extra.items():
    add = writer.add_string if isinstance(value, str) else writer.add_uint32
    add(f"{kind}.{key.replace('__', '.')}", value)
  for key, value in (tensors or gguf_tensors(name)).items():
    if key in quantised:
      q8 = gguf.GGMLQuantizationType.Q8_0
      writer.add_tensor(key, gguf.quantize(value, q8), raw_dtype=q8)
    else:
      writer.add_tensor(key, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def write_vocabulary(writer, pre):
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(TOKENS)
  writer.add_token_types([1] * 256 + [3, 3, 3, 4, 1, 1])
  writer.add_token_merges(["t h", "th e"])
  writer.add_eos_token_id(258)
  writer.add_pad_token_id(256)
  writer.add_chat_template(TEMPLATE)


@pytest.mark.parametrize("name", KINDS)
def test_same_parameters_as_the_folder(name, tmp_path):
  from_gguf = load(write(tmp_path / "a.gguf", name))
  MADE["write_checkpoint"](tmp_path / "hf", config_of(name))
  from_folder = load(tmp_path / "hf", tokenizer="bytes")
  jax.tree.map(np.testing.assert_array_equal, from_gguf.params, from_folder.params)
  got, want = vars(from_gguf.config) | {"norm_eps": 0}, vars(from_folder.config) | {"norm_eps": 0}
  assert got == want
  np.testing.assert_allclose(from_gguf.config.norm_eps, from_folder.config.norm_eps, rtol=1e-6)  # stored as float32


def test_quantised_tensors_are_dequantised(tmp_path):
  q, plain = "blk.0.attn_q.weight", load(write(tmp_path / "a.gguf", "qwen3"))
  quantised = load(write(tmp_path / "b.gguf", "qwen3", quantised=(q,)))
  weight, exact = (loaded.params["layers"]["attention"]["q"][0] for loaded in (quantised, plain))
  assert 0 < np.abs(weight - exact).max() <= np.abs(exact).max() / 127
  np.testing.assert_array_equal(quantised.params["layers"]["attention"]["k"], plain.params["layers"]["attention"]["k"])


def test_tokenizer_and_template_of_the_file(tmp_path):
  loaded = load(write(tmp_path / "a.gguf"))
  tokenizer = loaded.tokenizer
  assert tokenizer.encode("the th 12") == [261, 32, 260, 32, 49, 50]
  assert tokenizer.encode("<tool><|im_end|>") == [259, *b"<|im_end|>"]
  assert tokenizer.special == byte_tokenizer().special
  assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (258, 256, None)
  assert tokenizer.decode([258, 261, 0xC3, 0xA9]) == "<|im_end|>theé"
  assert loaded.chat_template == TEMPLATE and Chat(tokenizer, loaded.chat_template).eot == 258


@pytest.mark.parametrize(
  ("pre", "numbers"), [("smollm", "1 2 3 4"), ("qwen2", "1 2 3 4"), ("llama-bpe", "123 4"), ("gpt-2", "1234")]
)
def test_pre_tokenizers_cut_numbers_and_words(pre, numbers, tmp_path):
  inner = load(write(tmp_path / "a.gguf", pre=pre)).tokenizer.inner

  def cut(text):
    return [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str(text)]

  assert cut("1234") == numbers.split()
  assert cut("ab don't  x") == ["ab", "Ġdon", "'t", "Ġ", "Ġx"]
  newlines = ["a", "!", "Ċ", "Ċ", "b"] if pre in ("smollm", "gpt-2") else ["a", "!ĊĊ", "b"]
  assert cut("a!\n\nb") == newlines


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"vocabulary": False}, "has no tokenizer; set model.tokenizer"),
    ({"pre": "mystery"}, "gpt2 with pre-tokenizer mystery; supported are"),
    ({"rope__scaling__type": "linear"}, r"rope scaling \(linear\)"),
    ({"rope__dimension_count": 4}, "rotary positions on 4 of 10"),
    ({"attention__sliding_window": 16}, r"sliding window attention \(16\)"),
    ({"expert_count": 8}, "a mixture of 8 experts in the llama architecture"),
  ],
)
def test_what_is_not_supported_is_named(changes, message, tmp_path):
  with pytest.raises(ValueError, match=message) as error:
    load(write(tmp_path / "a.gguf", **changes))
  assert "\n" not in str(error.value)


def test_without_a_vocabulary_another_tokenizer_serves(tmp_path):
  assert load(write(tmp_path / "a.gguf", vocabulary=False), tokenizer="bytes").tokenizer.vocab_size == 259


@pytest.mark.parametrize(
  ("key", "value", "message"),
  [
    ("rope_freqs.weight", np.ones(5, np.float32), "rope scaling"),
    ("blk.0.attn_sinks.weight", np.ones(4, np.float32), r"blk.0.attn_sinks.weight of shape \(4,\).*does not use"),
    ("blk.1.ffn_up.weight", None, r"lacks model.layers.1.mlp.up_proj.weight of shape \(40, 32\)"),
    ("blk.1.ffn_up.weight", np.ones((40, 31), np.float32), r"has shape \(40, 31\), its config asks for \(40, 32\)"),
    ("token_embd.weight", None, "lacks token_embd.weight"),
  ],
)
def test_tensors_that_do_not_fit(key, value, message, tmp_path):
  tensors = {k: v for k, v in gguf_tensors("llama").items() if k != key} | ({} if value is None else {key: value})
  with pytest.raises(ValueError, match=message):
    load(write(tmp_path / "a.gguf", tensors=tensors))


@pytest.mark.parametrize("keep", [0, 3, 20, 300, 5000, 0.5, 0.99, -1])
def test_truncated_files(keep, tmp_path):
  path = write(tmp_path / "a.gguf")
  whole = path.read_bytes()
  path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
  with pytest.raises(ValueError, match=r"a.gguf is (not a GGUF file, or is )?truncated") as error:
    load(path)
  assert "\n" not in str(error.value)


def test_foreign_files(tmp_path):
  (tmp_path / "a.gguf").write_bytes(b"PK" * 500)
  with pytest.raises(ValueError, match="not a GGUF file"):
    load(tmp_path / "a.gguf")
  writer = gguf.GGUFWriter(str(tmp_path / "b.gguf"), "gemma")
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.close()
  with pytest.raises(ValueError, match=r"architecture gemma of .* is not supported"):
    load(tmp_path / "b.gguf")
