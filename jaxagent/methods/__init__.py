"""Algorithms as values: an `Objective` and what it needs, and the presets by name for the command line."""

from collections.abc import Callable, Mapping

from jaxagent.methods.annotators import Given, Rescore, Table
from jaxagent.methods.batch import bws, gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline, reinforce_plus_plus_kl
from jaxagent.methods.clips import cispo, cispo_capped, dppo, gmpo, intellect2, luspo, sapo, vespo
from jaxagent.methods.credit import cliff, draco, taspo
from jaxagent.methods.critic import mpo, ppo, t1, vapo
from jaxagent.methods.efficiency import eapo, otc, search_agent, slimsearcher, think_only, when2think
from jaxagent.methods.funnel import experience_funnel
from jaxagent.methods.group import dapo, dapo_within, dr_grpo, dr_grpo_within, grpo, grpo_kl, gspo, rloo
from jaxagent.methods.objective import Method, Objective
from jaxagent.methods.prepare import Prepared, credit, minibatches, plain, prepare, weigh
from jaxagent.methods.steps import gigpo, scpo, shaping, tev
from jaxagent.methods.supervised import sft
from jaxagent.methods.team import teamgym, teamgym_per_agent
from jaxagent.methods.tracked import gepo, spo_muon, spo_plus_plus
from jaxagent.methods.trackers import EntropyTracker, RateTracker

PRESETS: Mapping[str, Method | Callable[..., Method]] = {
  "bws": bws,
  "cispo": cispo,
  "cispo_capped": cispo_capped,
  "cliff": cliff,
  "dapo": dapo,
  "dapo_within": dapo_within,
  "dppo": dppo,
  "dr_grpo": dr_grpo,
  "dr_grpo_within": dr_grpo_within,
  "draco": draco,
  "eapo": eapo,
  "experience_funnel": experience_funnel,
  "gdpo": gdpo,
  "gepo": gepo,
  "gigpo": gigpo,
  "gmpo": gmpo,
  "grpo": grpo,
  "grpo_kl": grpo_kl,
  "gspo": gspo,
  "intellect2": intellect2,
  "luspo": luspo,
  "mpo": mpo,
  "otc": otc,
  "ppo": ppo,
  "reinforce_plus_plus": reinforce_plus_plus,
  "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
  "reinforce_plus_plus_kl": reinforce_plus_plus_kl,
  "rloo": rloo,
  "sapo": sapo,
  "scpo": scpo,
  "search_agent": search_agent,
  "sft": sft,
  "shaping": shaping,
  "slimsearcher": slimsearcher,
  "spo_muon": spo_muon,
  "spo_plus_plus": spo_plus_plus,
  "t1": t1,
  "taspo": taspo,
  "teamgym": teamgym,
  "teamgym_per_agent": teamgym_per_agent,
  "tev": tev,
  "think_only": think_only,
  "vapo": vapo,
  "vespo": vespo,
  "when2think": when2think,
}

__all__ = [
  "PRESETS",
  "EntropyTracker",
  "Given",
  "Method",
  "Objective",
  "Prepared",
  "RateTracker",
  "Rescore",
  "Table",
  "bws",
  "cispo",
  "cispo_capped",
  "cliff",
  "credit",
  "dapo",
  "dapo_within",
  "dppo",
  "dr_grpo",
  "dr_grpo_within",
  "draco",
  "eapo",
  "experience_funnel",
  "gdpo",
  "gepo",
  "gigpo",
  "gmpo",
  "grpo",
  "grpo_kl",
  "gspo",
  "intellect2",
  "luspo",
  "minibatches",
  "mpo",
  "otc",
  "plain",
  "ppo",
  "prepare",
  "reinforce_plus_plus",
  "reinforce_plus_plus_baseline",
  "reinforce_plus_plus_kl",
  "rloo",
  "sapo",
  "scpo",
  "search_agent",
  "sft",
  "shaping",
  "slimsearcher",
  "spo_muon",
  "spo_plus_plus",
  "t1",
  "taspo",
  "teamgym",
  "teamgym_per_agent",
  "tev",
  "think_only",
  "vapo",
  "vespo",
  "weigh",
  "when2think",
]
