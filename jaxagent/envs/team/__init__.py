"""Team decisions with distributed information (after a short summary of TeamGym)."""

from jaxagent.envs.team.instance import Fact, Instance
from jaxagent.envs.team.report import InformationReport, information_report
from jaxagent.envs.team.tasks import Team, TeamEpisode

__all__ = ["Fact", "InformationReport", "Instance", "Team", "TeamEpisode", "information_report"]
