"""Reading a compiled program: which collectives it runs, how often, and with how many bytes."""

import dataclasses
import math
import re

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "c64": 8, "c128": 16}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_CONSTANT = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_BELOW = re.compile(r"^\s+ROOT .* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT")


@dataclasses.dataclass(frozen=True)
class Collective:
  """`count` runs of one kind on a device, which receive `bytes` in all; loops of unknown length are counted once."""

  kind: str
  count: int
  bytes: float


def collectives(text: str) -> list[Collective]:
  """Of the HLO of a compiled program. The bytes are those of the results."""
  computations, entry = _computations(text)
  found: dict[str, list[float]] = {}

  def walk(name: str, times: int, inside: tuple[str, ...]) -> None:
    if name in inside:
      return
    for line in computations.get(name, ()):
      match = _OPERATION.match(line)
      if match is None:
        continue
      shape, operation = match.groups()
      kind = operation.removesuffix("-start")
      if kind in KINDS:
        total = found.setdefault(kind, [0, 0.0])
        total[0] += times
        total[1] += times * _received(shape, started=operation.endswith("-start"))
      trips = _trips(line, computations) if operation == "while" else 1
      called = _CALLED.findall(line)
      for branches in _BRANCHES.findall(line):
        called += [branch.strip().lstrip("%") for branch in branches.split(",")]
      for other in called if kind not in KINDS else ():
        walk(other, times * trips, (*inside, name))

  if entry is not None:
    walk(entry, 1, ())
  return [Collective(kind, int(count), size) for kind, (count, size) in sorted(found.items())]


def _trips(line: str, computations: dict[str, list[str]]) -> int:
  """How often a while loop runs: as the compiler says, or the constant below which its counter stays; else 1."""
  if known := _TRIPS.search(line):
    return int(known[1])
  condition = _CONDITION.search(line)
  lines = computations.get(condition[1], []) if condition else []
  constants = dict(match.groups() for match in map(_CONSTANT.match, lines) if match)
  below = next((match[1] for match in map(_BELOW.match, lines) if match), None)
  return int(constants.get(below, 1))


def _computations(text: str) -> tuple[dict[str, list[str]], str | None]:
  found: dict[str, list[str]] = {}
  entry = current = None
  for line in text.splitlines():
    if not line.startswith(" ") and (match := _COMPUTATION.match(line)):
      current = match[2]
      found[current] = []
      entry = current if match[1] else entry
    elif line.startswith("}"):
      current = None
    elif current is not None:
      found[current].append(line)
  return found, entry


def _received(shape: str, *, started: bool) -> float:
  """Bytes of a result; one that is only started is a tuple of operands, results and scalars of the runtime's."""
  arrays = _ARRAY.findall(shape)
  if started and len(arrays) > 1:
    arrays = [array for array in arrays if array[1]]
    arrays = arrays[len(arrays) // 2 :]
  return sum(_size(kind, dims) for kind, dims in arrays)


def _size(kind: str, dims: str) -> float:
  bits = re.search(r"\d+", kind)
  width = BYTES.get(kind) or (int(bits[0]) / 8 if bits else 1)
  return width * math.prod(int(d) for d in dims.split(",") if d)
