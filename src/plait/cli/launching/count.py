"""How many processes a configuration starts on this machine where the command line does not say."""

from __future__ import annotations

from plait.cluster.topology import default_processes, device_count
from plait.config.resolving.degrees import smallest_world
from plait.config.schema.config import Config


def processes_of(config: Config) -> int:
    """As many as the file says, else one a GPU; on a CPU as many as the layout names, or two."""
    wanted = config.run.processes if config.run is not None else "auto"
    if wanted != "auto":
        return wanted
    named = smallest_world(config.parallel)
    return named if named > 1 and not device_count() else default_processes()
