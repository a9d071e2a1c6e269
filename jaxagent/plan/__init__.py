"""What a run would need on chips that are not here: its programs, compiled for them by their own compilers."""

from jaxagent.plan.chips import Chip, chip_of, topology_devices
from jaxagent.plan.hlo import Collective, collectives
from jaxagent.plan.programs import PROGRAMS, Plan, ProgramPlan, plan
from jaxagent.plan.table import table

__all__ = [
  "PROGRAMS",
  "Chip",
  "Collective",
  "Plan",
  "ProgramPlan",
  "chip_of",
  "collectives",
  "plan",
  "table",
  "topology_devices",
]
