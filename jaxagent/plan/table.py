"""A plan in words."""

import math

from jaxagent.plan.programs import KNOBS, Plan, ProgramPlan


def table(plan: Plan) -> str:
  """One block a program, and the assumptions of the estimates."""
  ways = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "one device"
  lines = [
    f"{plan.topology} ({plan.chip.name}, {_bytes(plan.chip.memory)} a device), mesh {ways},"
    f" {plan.parameters / 1e9:.3g} B parameters"
  ]
  for program in plan.programs:
    lines += ["", *_program(plan, program)]
  lines += [
    "",
    "Bytes are of one device. Collectives: bytes received; a loop whose length only the run knows is counted once, so",
    "they are for the unit named. Estimates: 2 operations for each weight and token, attention at the mean context,",
    "at the chip's peak in bfloat16; memory traffic of weights and cache alone; collectives at the speed of all links,",
    "nothing overlapped. They are bounds from below, not predictions. Each program is looked at alone: in a",
    "run the train state, a reference or a critic, and the engine's weights and cache are there at the same time.",
  ]
  return "\n".join(lines)


def _program(plan: Plan, p: ProgramPlan) -> list[str]:
  verdict = "fits" if plan.fits(p) else "DOES NOT FIT"
  peak = "unknown" if math.isnan(p.peak) else f"{_bytes(p.peak)} = {p.peak / plan.chip.memory:.0%} of the device"
  held = ", ".join(f"{kind} {_bytes(size)}" for kind, size in p.arguments.items())
  lines = [f"{p.name}: {verdict}, peak {peak} (compiled in {p.compile_seconds:.0f} s)", f"  holds      {held}"]
  if not math.isnan(p.temporary):
    lines[-1] += f"; temporary {_bytes(p.temporary)}"
  moved = ", ".join(f"{c.kind} {_bytes(c.bytes)} in {c.count}" for c in p.collectives) or "none"
  if p.fault is None:
    flops, traffic, links = p.seconds(plan.chip)
    lines.append(f"  collectives {moved}")
    lines.append(
      f"  {p.unit}: {p.flops:.3g} operations {_seconds(flops)}, memory {_seconds(traffic)}, links {_seconds(links)}:"
      f" at least {_seconds(max(flops, traffic) + links)}"
    )
  if not plan.fits(p):
    lines.append(f"  to make it fit: {KNOBS[p.name]}")
  return lines


def _bytes(size: float) -> str:
  if math.isnan(size):
    return "?"
  for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if size >= scale:
      return f"{size / scale:.3g} {unit}"
  return f"{size:.0f} B"


def _seconds(seconds: float) -> str:
  return f"{seconds * 1e3:.3g} ms"
