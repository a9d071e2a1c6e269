"""The schema of a run: frozen dataclasses that hold the defaults. YAML holds values only.

Read with `load(path, overrides)`; an unknown key is an error that names the nearest valid one.
"""

import dataclasses
from dataclasses import field
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class Run:
  dir: str | None = None  # the run's folder, local or remote; default runs/<config>-<n>
  steps: int = 100  # batches of rollouts
  init_from: str | None = None  # a finished run to start from: its newest checkpoint's parameters
  checkpoint_every: int = 20  # steps; the last step is always saved
  checkpoint_keep: int = 2
  compilation_cache: str | None = "auto"  # folder of the persistent compilation cache; null switches it off


@dataclasses.dataclass(frozen=True)
class Model:
  path: str | None = None  # a Hugging Face folder, a .gguf file or a hub name; null: initialise `shape`
  tokenizer: str | None = None  # "bytes", or a folder with tokenizer.json; default: from `path`, else bytes
  tool_format: Literal["hermes", "qwen_xml", "plain"] = "plain"
  shape: dict[str, Any] = field(default_factory=dict)  # fields of models.config.DecoderConfig
  dtype: Literal["float32", "bfloat16"] = "float32"  # of the compute; parameters, router, logits and softmax are float32
  remat: bool = False  # recompute each layer's activations in the backward pass


@dataclasses.dataclass(frozen=True)
class Env:
  name: str = "calculator"  # calculator, reasoning_gym, dataset, or my_package.module:MyEnv
  options: dict[str, Any] = field(default_factory=dict)  # its keyword arguments


@dataclasses.dataclass(frozen=True)
class Rollout:
  prompts: int = 8  # tasks a step
  samples: int = 8  # rollouts a task: the group
  max_turns: int = 4
  max_tokens: int = 256  # of a whole episode, prompt included: the row length and the cache capacity
  max_turn_tokens: int = 64
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  stop: tuple[str, ...] = ()
  slots: int = 64  # sequences decoded at once
  replay_routing: bool = True  # MoE: train with the experts that the sampler used


@dataclasses.dataclass(frozen=True)
class Sft:
  steps: int = 0  # 0: no warm start
  batch: int = 64  # demonstrations a step
  learning_rate: float = 1e-3
  stop_at: float | None = None  # end early at this held-out success
  eval_every: int = 50


@dataclasses.dataclass(frozen=True)
class MethodSection:
  name: str = "grpo"  # a preset of jaxagent.methods, or my_package.module:my_method
  options: dict[str, Any] = field(default_factory=dict)  # for a preset or function that takes arguments


@dataclasses.dataclass(frozen=True)
class Optimizer:
  name: Literal["adamw"] = "adamw"
  learning_rate: float = 1e-6
  schedule: Literal["constant", "cosine", "linear"] = "constant"
  warmup: int = 0  # updates
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip: float | None = 1.0  # global norm


@dataclasses.dataclass(frozen=True)
class Training:
  epochs: int = 1  # passes over each batch of rollouts
  minibatches: int = 1  # optimizer updates a pass
  microbatch_rows: int = 8  # packed rows whose gradient is computed at once
  row_tokens: int | None = None  # length of a packed row; default rollout.max_tokens
  logprob_chunk: int = 1024  # tokens whose logits exist at once


@dataclasses.dataclass(frozen=True)
class Evaluation:
  every: int = 0  # steps; 0: only before and after
  tasks: int = 200
  temperature: float = 0.0
  samples: int = 1


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Sizes of the mesh axes; -1 takes the devices that are left."""

  data: int = -1
  fsdp: int = 1
  tensor: int = 1
  expert: int = 1


@dataclasses.dataclass(frozen=True)
class Tracking:
  tensorboard: bool = True
  wandb: str | None = None  # project
  rollouts_every: int = 1  # steps between stored batches of rollouts; 0: none
  show: int = 2  # rollouts of each step in readable form
  gap_warning: float = 0.1  # nats of logp_gap/max above which a warning is printed


@dataclasses.dataclass(frozen=True)
class Config:
  run: Run = field(default_factory=Run)
  model: Model = field(default_factory=Model)
  env: Env = field(default_factory=Env)
  rollout: Rollout = field(default_factory=Rollout)
  sft: Sft = field(default_factory=Sft)
  method: MethodSection = field(default_factory=MethodSection)
  optimizer: Optimizer = field(default_factory=Optimizer)
  training: Training = field(default_factory=Training)
  evaluation: Evaluation = field(default_factory=Evaluation)
  mesh: Mesh = field(default_factory=Mesh)
  tracking: Tracking = field(default_factory=Tracking)
  seed: int = 0
