"""The shape of the built-in decoder: Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE."""

import dataclasses
import typing
from typing import Literal

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]
Attention = Literal["full", "sliding", "prefix_sliding"]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes of a pre-norm decoder: RMSNorm, rotary positions, grouped-query attention, gated SiLU or a mixture of them.

  `experts > 0` replaces every layer's MLP (`mlp_width`) by `experts` of `expert_width`, of which each token uses
  `experts_per_token`. `attention` is one kind or a sequence of one for each layer: a token sees all before it ("full"),
  the last `window`, itself counted ("sliding"), or these and the first prompt ("prefix_sliding").
  Errors: a ValueError for sizes that do not fit each other.
  """

  vocab_size: int
  width: int
  layers: int
  heads: int
  mlp_width: int = 0
  kv_heads: int = 0  # 0: as many as heads
  head_dim: int = 0  # 0: width // heads
  rope_theta: float = 10000.0
  norm_eps: float = 1e-6
  tied: bool = True  # the head is the transposed embedding
  qkv_bias: bool = False  # Qwen2
  qk_norm: bool = False  # Qwen3: RMSNorm of each head's query and key
  max_position: int = 4096
  experts: int = 0
  experts_per_token: int = 0
  expert_width: int = 0
  norm_topk_prob: bool = True  # the weights of the chosen experts sum to one
  attention: Attention | tuple[Attention, ...] = "full"
  window: int = 0  # tokens, of layers that slide
  max_prefix: int = 0  # tokens, of prefix_sliding layers: the longest first prompt, for which their caches have room
  dtype: Literal["float32", "bfloat16"] = "float32"  # of the operands of products; everything else is float32
  remat: bool = False  # recompute each layer's activations in the backward pass
  init_scale: float = 0.02  # standard deviation of the embedding and the head; products use 1 / sqrt(fan-in)

  def __post_init__(self):
    if not self.kv_heads:
      object.__setattr__(self, "kv_heads", self.heads)
    if not self.head_dim and self.heads > 0:
      _require(self.width % self.heads == 0, f"width {self.width} is not divisible by heads {self.heads}; set head_dim")
      object.__setattr__(self, "head_dim", self.width // self.heads)
    for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "max_position"):
      _require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
    _require(
      self.heads % self.kv_heads == 0,
      f"heads {self.heads} is not divisible by kv_heads {self.kv_heads}; choose kv_heads among the divisors of heads",
    )
    _require(self.head_dim % 2 == 0, f"head_dim must be even for rotary positions, got {self.head_dim}; set head_dim")
    _require(self.dtype in ("float32", "bfloat16"), f"dtype must be float32 or bfloat16, got {self.dtype!r}")
    for name in ("rope_theta", "norm_eps", "init_scale"):
      _require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
    self._check_mlp()
    if not isinstance(self.attention, str):
      _require(isinstance(self.attention, tuple | list), f"attention must be a name or several, got {self.attention!r}")
      each = tuple(self.attention)
      object.__setattr__(self, "attention", each[0] if each and each == each[:1] * self.layers else each)
    self._check_attention()

  def _check_attention(self) -> None:
    known = typing.get_args(Attention)
    _require(
      len(self.kinds) == self.layers,
      f"attention must be one kind, or one for each of the {self.layers} layers, got {len(self.kinds)} of them",
    )
    for kind in self.kinds:
      _require(kind in known, f"attention must be made of {', '.join(known)}, got {kind!r}")
    self._check_size("window", set(self.kinds) != {"full"}, "sliding or prefix_sliding")
    self._check_size("max_prefix", "prefix_sliding" in self.kinds, "prefix_sliding")

  def _check_size(self, name: str, needed: bool, kinds: str) -> None:
    size = getattr(self, name)
    _require(isinstance(size, int) and not isinstance(size, bool), f"{name} must be a number of tokens, got {size!r}")
    _require(size > 0 or not needed, f"attention {self.attention!r} needs a positive {name}, got {size}; set {name}")
    _require(
      size == 0 or needed,
      f"{name} is for {kinds} layers, got {name}={size} with attention {self.attention!r};"
      f" set attention, or leave {name} at 0",
    )

  def _check_mlp(self) -> None:
    _require(self.experts >= 0, f"experts must be at least 0 (0: a dense model), got {self.experts}")
    if not self.experts:
      _require(self.mlp_width > 0, f"a dense model needs a positive mlp_width, got {self.mlp_width}; or set experts")
      _require(
        self.experts_per_token == 0 and self.expert_width == 0,
        "experts_per_token and expert_width are for mixtures; set experts > 0, or leave both at 0",
      )
      return
    _require(
      0 < self.experts_per_token <= self.experts,
      f"experts_per_token must be in [1, experts = {self.experts}], got {self.experts_per_token}",
    )
    _require(self.expert_width > 0, f"a mixture needs a positive expert_width, got {self.expert_width}")

  @property
  def kinds(self) -> tuple[Attention, ...]:
    """The kind of attention of each layer."""
    return (self.attention,) * self.layers if isinstance(self.attention, str) else self.attention

  @property
  def residual_scale(self) -> float:
    """Factor of the initial output products, so that the residual stream's variance does not grow with depth."""
    return (2 * self.layers) ** -0.5

  @property
  def architecture(self) -> Architecture:
    """Name of the `transformers` model with this arithmetic, for export; a ValueError where there is none."""
    names = {(False, False, False): "llama", (True, False, False): "qwen2"}
    names |= {(False, True, False): "qwen3", (False, True, True): "qwen3_moe"}
    kind = (self.qkv_bias, self.qk_norm, self.experts > 0)
    _require(
      kind in names,
      f"no transformers architecture has qkv_bias={self.qkv_bias}, qk_norm={self.qk_norm} and experts={self.experts}:"
      " llama has none of the three, qwen2 qkv_bias, qwen3 qk_norm, qwen3_moe qk_norm and experts",
    )
    _require(
      "prefix_sliding" not in self.kinds,
      "no transformers architecture has prefix_sliding attention; export the weights with dataclasses.replace(config,"
      " attention='full', window=0, max_prefix=0), and set attention, window and max_prefix again on loading them",
    )
    name = names[kind]
    if name == "llama" and self.attention == "sliding":
      return "mistral"
    _require(
      isinstance(self.attention, str) or name in ("qwen2", "qwen3"),
      f"no transformers architecture like {name} has both full and sliding layers, only qwen2 and qwen3 do;"
      " choose one kind of attention for all layers",
    )
    return name


def _require(ok: bool, message: str) -> None:
  if not ok:
    raise ValueError(f"DecoderConfig: {message}")
