import json
import re
import runpy
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxagent.models import loading
from jaxagent.models.chat import chatml
from jaxagent.models.config import DecoderConfig
from jaxagent.models.decoder import decoder_policy
from jaxagent.models.loading import config_from_hf, export, layout, load
from jaxagent.models.tokenizer import byte_tokenizer

MADE = runpy.run_path(str(Path(__file__).parents[1] / "fixtures" / "make_parity.py"))
CONFIGS = {name: config | {"vocab_size": 261} for name, config in MADE["CONFIGS"].items()}
SHAPE = {"vocab_size": 261, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_width": 24, "tied": False}
MOE = {"mlp_width": 0, "experts": 3, "experts_per_token": 2, "expert_width": 12, "qk_norm": True}
DECODERS = {
  "llama": DecoderConfig(**SHAPE, rope_theta=1e5, norm_eps=1e-5),
  "llama_tied": DecoderConfig(**SHAPE | {"tied": True, "head_dim": 6}),
  "qwen2": DecoderConfig(**SHAPE, qkv_bias=True),
  "qwen3": DecoderConfig(**SHAPE, qk_norm=True, head_dim=8, max_position=77),
  "qwen3_moe": DecoderConfig(**SHAPE | MOE, norm_topk_prob=False),
}


def random_params(config):
  """Every leaf random, norms and biases too."""
  shapes = jax.eval_shape(decoder_policy(config).init, jax.random.key(0))
  leaves, tree = jax.tree.flatten(shapes)
  rng = np.random.default_rng(0)
  return jax.tree.unflatten(tree, [rng.standard_normal(leaf.shape, np.float32) for leaf in leaves])


def folder(tmp_path, name="qwen3", **changes):
  MADE["write_checkpoint"](tmp_path, CONFIGS[name] | changes)
  byte_tokenizer().inner.save(str(tmp_path / "tokenizer.json"))
  return tmp_path


def assert_trees_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_lands_in_its_place(name, tmp_path):
  loaded = load(folder(tmp_path, name))
  init = jax.eval_shape(decoder_policy(loaded.config).init, jax.random.key(0))
  assert jax.tree.map(np.shape, loaded.params) == jax.tree.map(lambda x: x.shape, init)
  assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {np.dtype(np.float32)}
  layer, (v, d) = "model.layers.1.self_attn.", (261, 24)
  np.testing.assert_array_equal(loaded.params["embed"], MADE["draw"]("model.embed_tokens.weight", (v, d)))
  o = MADE["draw"](layer + "o_proj.weight", loaded.params["layers"]["attention"]["o"].shape[:0:-1])
  np.testing.assert_array_equal(loaded.params["layers"]["attention"]["o"][1], o.T)
  if "moe" in name:
    down = MADE["draw"]("model.layers.0.mlp.experts.4.down_proj.weight", (24, 16))
    np.testing.assert_array_equal(loaded.params["layers"]["mlp"]["down"][0, 4], down.T)


def test_config_golden():
  assert config_from_hf(CONFIGS["qwen3_moe"]) == DecoderConfig(
    vocab_size=261, width=24, layers=2, heads=4, kv_heads=2, head_dim=8, rope_theta=500.0, norm_eps=1e-5, tied=False,
    qk_norm=True, max_position=128, experts=6, experts_per_token=2, expert_width=16, norm_topk_prob=True,
  )  # fmt: skip
  older = {k: v for k, v in CONFIGS["llama"].items() if k != "rope_parameters"}
  assert config_from_hf(older | {"rope_theta": 500, "rope_scaling": None}) == config_from_hf(CONFIGS["llama"])
  assert config_from_hf(CONFIGS["llama"] | {"architectures": None}) == config_from_hf(CONFIGS["llama"])


def test_dtype_and_remat_go_into_the_config(tmp_path):
  loaded = load(folder(tmp_path), dtype="bfloat16", remat=True)
  assert (loaded.config.dtype, loaded.config.remat) == ("bfloat16", True)
  assert loaded.params["embed"].dtype == np.float32


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_widened_exactly(dtype, tmp_path):
  path = folder(tmp_path) / "model.safetensors"
  save_file({name: tensor.astype(dtype) for name, tensor in load_file(path).items()}, path)
  want = MADE["draw"]("model.embed_tokens.weight", (261, 24)).astype(dtype).astype(np.float32)
  np.testing.assert_array_equal(load(tmp_path).params["embed"], want)


@pytest.mark.parametrize("shard_bytes", [2**30, 9000, 1])
@pytest.mark.parametrize("name", DECODERS)
def test_load_reads_what_export_writes(name, shard_bytes, tmp_path):
  config, tokenizer, template = DECODERS[name], byte_tokenizer(), chatml("hermes")
  params = random_params(config)
  device = jax.tree.map(jax.numpy.asarray, params)
  path = export(tmp_path / "out", config, device, tokenizer, template, shard_bytes=shard_bytes)
  loaded = load(path)
  assert loaded.config == config
  assert_trees_equal(loaded.params, params)
  assert loaded.chat_template == template
  assert loaded.tokenizer.special == tokenizer.special
  assert (loaded.tokenizer.eos_id, loaded.tokenizer.pad_id) == (258, 256)
  shards = sorted(path.glob("*.safetensors"))
  tensors = sum(config.layers ** ("layer" in p.axes) * config.experts ** ("expert" in p.axes) for p in layout(config))
  assert len(shards) == 1 if shard_bytes == 2**30 else 1 < len(shards) <= tensors
  assert (path / "model.safetensors.index.json").exists() == (len(shards) > 1)
  sizes = [sum(t.nbytes for t in load_file(shard).values()) for shard in shards]
  if shard_bytes == 9000:  # only a tensor that is larger by itself exceeds it
    assert all(size <= 9000 or len(load_file(shard)) == 1 for size, shard in zip(sizes, shards))


@pytest.mark.parametrize("name", DECODERS)
def test_transformers_loads_the_export_and_agrees(name, tmp_path):
  torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
  config, params = DECODERS[name], random_params(DECODERS[name])
  params = jax.tree.map(lambda x: x / 4, params)
  path = export(tmp_path / "out", config, params, byte_tokenizer(), chatml("plain"), shard_bytes=9000)
  model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
  assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
  tokens = np.random.default_rng(1).integers(0, 256, (1, 11))
  policy, position = decoder_policy(config), np.arange(11)[None]
  ours = policy.head(params, policy.forward(params, tokens, position, np.zeros_like(tokens)).states)
  with torch.no_grad():
    np.testing.assert_allclose(ours, model(torch.tensor(tokens)).logits.numpy(), atol=1e-4)
  tokenizer = transformers.AutoTokenizer.from_pretrained(path)
  messages = [{"role": "user", "content": "1+1?"}]
  ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
  assert list(ids) == [257, *b"user\n1+1?", 258, 10, 257, *b"assistant\n"]
  assert model.generation_config.eos_token_id == [258] and tokenizer.eos_token_id == 258


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"architectures": ["GemmaForCausalLM"]}, "architecture GemmaForCausalLM is not supported; supported are LlamaFor"),
    ({"architectures": None, "model_type": "gpt2"}, "architecture gpt2 is not supported"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": None}, r"rope scaling \(yarn\)"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}}, r"rope scaling \(llama3\)"),
    ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer types that slide, but for no sliding window"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, r"layer types \['chunked_attention', 'full"),
    ({"layer_types": ["full_attention"]}, "asks for 2 layers, but layer_types has 1"),
    ({"hidden_act": "gelu"}, "activation gelu"),
    ({"attention_bias": True}, "attention_bias"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"hidden_size": 25}, r"shape \(\d+, 24\), its config asks for \(\d+, 25\)"),
    ({"num_hidden_layers": 3}, r"lacks model.layers.2.* of shape"),
    ({"num_hidden_layers": 1}, r"model.layers.1.* of shape .* does not use \(11 such tensors\)"),
    ({"tie_word_embeddings": False}, r"lacks lm_head.weight of shape \(261, 24\)"),
    ({"vocab_size": 300}, r"embed_tokens.weight of .* \(261, 24\), its config asks for \(300, 24\)"),
  ],
)
def test_a_folder_that_does_not_fit_is_an_error(changes, message, tmp_path):
  path = folder(tmp_path)
  (path / "config.json").write_text(json.dumps(CONFIGS["qwen3"] | changes))
  with pytest.raises(ValueError, match=message) as error:
    load(path)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size", "intermediate_size"])
def test_a_missing_key_is_named(key):
  with pytest.raises(ValueError, match=f"config.json lacks {key}"):
    config_from_hf({k: v for k, v in CONFIGS["qwen3"].items() if k != key})


def test_head_stored_beside_tied_embeddings(tmp_path):
  path = folder(tmp_path) / "model.safetensors"
  tensors = load_file(path)
  tensors |= {"lm_head.weight": tensors["model.embed_tokens.weight"], "model.rotary_emb.inv_freq": np.ones(4, "f4")}
  save_file(tensors, path)
  assert "head" not in load(tmp_path).params
  save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, path)
  with pytest.raises(ValueError, match=r"lm_head.weight of .* differs from the embedding"):
    load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_safetensors(keep, tmp_path):
  path = folder(tmp_path) / "model.safetensors"
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(ValueError, match=r"model.safetensors is truncated or damaged") as error:
    load(tmp_path)
  assert "\n" not in str(error.value)


def test_quantised_safetensors_are_refused(tmp_path):
  path = folder(tmp_path) / "model.safetensors"
  save_file(load_file(path) | {"model.norm.weight": np.ones(24, np.int8)}, path)
  with pytest.raises(ValueError, match=r"model.norm.weight .* is stored as I8"):
    load(tmp_path)


@pytest.mark.parametrize(
  ("lost", "error", "message"),
  [
    ("config.json", FileNotFoundError, "config.json does not exist"),
    ("model.safetensors", FileNotFoundError, "neither model.safetensors nor"),
    ("tokenizer.json", ValueError, "has no tokenizer.json; .*set model.tokenizer"),
  ],
)
def test_missing_files(lost, error, message, tmp_path):
  (folder(tmp_path) / lost).unlink()
  with pytest.raises(error, match=message):
    load(tmp_path)


def test_missing_shard_and_tensor_of_an_index(tmp_path):
  path = export(tmp_path / "out", DECODERS["llama"], random_params(DECODERS["llama"]), byte_tokenizer(), shard_bytes=1)
  index = json.loads((path / "model.safetensors.index.json").read_text())
  shard = index["weight_map"]["model.norm.weight"]
  index["weight_map"]["another"] = shard
  (path / "model.safetensors.index.json").write_text(json.dumps(index))
  with pytest.raises(ValueError, match=f"lists another, but {shard} lacks it"):
    load(path)
  (path / shard).unlink()
  with pytest.raises(FileNotFoundError, match=f"{re.escape(shard)} does not exist, but the index lists it"):
    load(path)


def test_tokenizer_larger_than_the_embedding(tmp_path):
  MADE["write_checkpoint"](tmp_path, CONFIGS["qwen3"] | {"vocab_size": 258})
  with pytest.raises(ValueError, match="has 259 tokens but the embedding 258 rows"):
    load(tmp_path, tokenizer="bytes")


def test_another_tokenizer_brings_its_own_template(tmp_path):
  path = folder(tmp_path / "model")
  (path / "chat_template.jinja").write_text("own")
  assert load(path).chat_template == "own"
  assert load(path, tokenizer="bytes").chat_template is None
  other = tmp_path / "other"
  other.mkdir()
  byte_tokenizer().inner.save(str(other / "tokenizer.json"))
  (other / "chat_template.jinja").write_text("other")
  (path / "tokenizer.json").unlink()
  assert load(path, tokenizer=other).chat_template == "other"


def test_paths_that_are_no_model(tmp_path, monkeypatch):
  for path in (tmp_path / "nothing", tmp_path / "no.gguf", "a/b/c"):
    with pytest.raises(FileNotFoundError, match="no model at"):
      load(path)
  (tmp_path / "weights.bin").write_text("")
  with pytest.raises(ValueError, match="neither a model folder nor a"):
    load(tmp_path / "weights.bin")
  import huggingface_hub

  def offline(name, allow_patterns):
    raise OSError(f"cannot reach {name}\nmore")

  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
  with pytest.raises(FileNotFoundError, match=r"the hub did not give it: cannot reach org/model$"):
    load("org/model")
  path = folder(tmp_path / "cached")
  monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(path))
  assert load("org/model").config.width == 24


def test_export_errors(tmp_path):
  config, params = DECODERS["qwen3"], random_params(DECODERS["qwen3"])
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "a").write_text("")
  with pytest.raises(ValueError, match="not an empty folder"):
    export(tmp_path / "full", config, params, byte_tokenizer())
  with pytest.raises(ValueError, match=r"params\[embed\] must have shape \(261, 16\), got \(4, 4\)"):
    export(tmp_path / "a", config, params | {"embed": np.zeros((4, 4))}, byte_tokenizer())
  with pytest.raises(ValueError, match=r"params\[layers.attention.q_bias\] must have shape .* got none"):
    export(tmp_path / "a", DECODERS["qwen2"], random_params(DECODERS["llama"]), byte_tokenizer())
  with pytest.raises(ValueError, match=r"params\[layers.attention.k_bias\] has no place in a llama checkpoint"):
    export(tmp_path / "a", DECODERS["llama"], random_params(DECODERS["qwen2"]), byte_tokenizer())
  with pytest.raises(ValueError, match="no transformers architecture has qkv_bias=True, qk_norm=True"):
    export(tmp_path / "a", DecoderConfig(**SHAPE, qkv_bias=True, qk_norm=True), params, byte_tokenizer())
  assert not (tmp_path / "a").exists()


def test_a_model_inside_an_installed_package(tmp_path, monkeypatch):
  (tmp_path / "packaged_model").mkdir()
  (tmp_path / "packaged_model" / "weights.gguf").touch()
  monkeypatch.syspath_prepend(tmp_path)
  assert loading._locate("package:packaged_model/weights.gguf") == tmp_path / "packaged_model" / "weights.gguf"
  for path, message in [
    ("package:packaged_model/other.gguf", "has no other.gguf"),
    ("package:packaged_model", "has no model named"),
    ("package:no_such_package_here/x.gguf", "no Python package 'no_such_package_here'"),
    ("package:../x", "no Python package '..'"),
  ]:
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
      loading._locate(path)
