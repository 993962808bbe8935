"""A launch that is planned and has claimed nothing yet."""

from dataclasses import dataclass

from configs.loader import LoadedConfig
from launch.options import Options
from launch.plan import LaunchPlan, plan_launch
from launch.request import Request
from launch.topology import Topology, detect_topology


@dataclass(frozen=True)
class Ready:
    """Everything known before a folder is claimed."""

    loaded: LoadedConfig
    topology: Topology
    request: Request
    plan: LaunchPlan


def make_ready(loaded: LoadedConfig, request: Request, options: Options) -> Ready:
    """Raises ConfigError or EnvironmentProblem, as plan_launch."""
    topology = detect_topology(options.environ)
    return Ready(loaded, topology, request, plan_launch(loaded.config, topology, request))
