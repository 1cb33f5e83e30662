"""Rendezvous of the machines: torch's own for several machines, and a plain store for one.

torch's elastic rendezvous also works for one machine. But it exchanges heartbeats with itself,
which a busy machine can miss, and after a restart it gives the new ranks the addresses of the dead
ranks. A single machine waits for no other, and every attempt gets a new store.
"""

from __future__ import annotations

import socket
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from plait.cli.launching.settings import LaunchSettings

# Other machines are not involved, and in containers the name of this machine often does not
# resolve.
LOOPBACK = "127.0.0.1"


def make_rendezvous(settings: LaunchSettings) -> RendezvousHandler:
    """Return the rendezvous of a launch.

    Raises:
        RendezvousError, DistError: torch connected already, and failed.
    """
    seconds = max(1, int(settings.timeout_seconds))
    if settings.single_node:
        run_id = settings.rdzv_id or str(uuid.uuid4())
        return SingleNodeRendezvous(run_id, timedelta(seconds=seconds))
    elastic = settings.rdzv_endpoint is not None
    config: dict[str, Any] = {"rank": settings.node_rank, "timeout": seconds}
    if elastic:
        # torch names the timeouts of its two backends differently.
        config = {"join_timeout": seconds, "read_timeout": seconds}
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d" if elastic else "static",
            endpoint=settings.meeting_point,
            run_id=settings.rdzv_id or "plait",
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            **config,
        )
    )


def loopback_store(timeout: timedelta) -> TCPStore:
    """Return the server of a store that only processes of this machine can connect to.

    TCPStore requires no key, and the socket that it would open listens on all interfaces. Anyone on
    the network could read and write the addresses that ranks exchange.
    """
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    # The store closes the descriptor.
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


class SingleNodeRendezvous(RendezvousHandler):
    """Rendezvous of one machine. Every attempt gets a new store on the loopback interface."""

    def __init__(self, run_id: str, timeout: timedelta) -> None:
        self._run_id = run_id
        self._timeout = timeout

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = loopback_store(self._timeout)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, store.port))

    def get_backend(self) -> str:
        return "one machine"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other machine could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
