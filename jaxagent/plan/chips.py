"""Chips by name, and the devices of a topology of them.

Sources of the numbers: the vendors' public specifications (Google Cloud's TPU pages, NVIDIA's H100 SXM data sheet),
dense bfloat16. A tpu7x chip shows itself as two devices: each has half.
"""

import dataclasses
import importlib.util
import os
from pathlib import Path

import jax
from jax.experimental import topologies

H100 = Path(__file__).parent / "h100.textproto"


@dataclasses.dataclass(frozen=True)
class Chip:
  """Of one device: bytes of memory, operations a second, bytes a second of memory and of all links together."""

  name: str
  memory: float
  flops: float
  bandwidth: float
  link: float


GIB = 2**30
CHIPS = {
  "v4": Chip("TPU v4", 32 * GIB, 275e12, 1228e9, 300e9),
  "v5e": Chip("TPU v5e", 16 * GIB, 197e12, 819e9, 200e9),
  "v5p": Chip("TPU v5p", 95 * GIB, 459e12, 2765e9, 600e9),
  "v6e": Chip("TPU v6e", 32 * GIB, 918e12, 1640e9, 448e9),
  "tpu7x": Chip("TPU7x, half a chip", 96 * GIB, 1154e12, 3690e9, 600e9),
  "h100": Chip("H100 SXM", 80 * GIB, 989e12, 3350e9, 900e9),
}


def chip_of(topology: str) -> Chip:
  """ValueError: a name of no chip that is known."""
  kind = topology.partition(":")[0]
  if kind not in CHIPS:
    raise ValueError(f"--topology {topology!r}: no chip {kind!r}; known are {', '.join(CHIPS)}, as in v5p:2x2x4")
  return CHIPS[kind]


def topology_devices(topology: str) -> list[jax.Device]:
  """Devices of `v5p:2x2x4`, `h100:8`, ..., described by the chip's compiler; none of them is here.

  ValueError: an unknown chip or shape, or its compiler is not installed.
  """
  chip_of(topology)
  kind, _, shape = topology.partition(":")
  needed, extra = ("jax_cuda13_plugin", "cuda") if kind == "h100" else ("libtpu", "tpu")
  if importlib.util.find_spec(needed) is None:
    raise ValueError(f"--topology {topology} needs the compiler in {needed}: pip install 'jaxagent[{extra}]'")
  for name in ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD"):  # no TPU to ask for, nor to keep from others
    os.environ.setdefault(name, "1")
  try:
    if kind == "h100":
      options = {"target_config": H100.read_text(encoding="utf-8"), "topology": f"1x1x{int(shape or 1)}"}
      return list(topologies.get_topology_desc(platform="cuda", **options).devices)
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
  except Exception as error:  # the compilers raise several kinds
    line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise ValueError(f"--topology {topology}: {line}") from error
