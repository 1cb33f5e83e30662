"""Where machines meet: torch's own rendezvous for several, and a plain store for one.

torch's elastic rendezvous serves one machine too, but keeps a heartbeat with itself that a busy
machine can miss, and after a restart hands the new ranks the addresses of the dead ones. One
machine needs neither: it waits for no other, and every attempt gets a fresh store.
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

from plait.cli.launching.settings import Settings

# Other machines are not involved, and in containers this one's name often does not resolve.
LOOPBACK = "127.0.0.1"


def make(settings: Settings) -> RendezvousHandler:
    """The rendezvous for a launch. May already connect: raises torch's RendezvousError or DistError
    when that fails.
    """
    seconds = max(1, int(settings.timeout_seconds))
    if settings.single_node:
        return OneMachine(settings.rdzv_id or str(uuid.uuid4()), timedelta(seconds=seconds))
    elastic = settings.rdzv_endpoint is not None
    config: dict[str, Any] = {"rank": settings.node_rank, "timeout": seconds}
    if elastic:
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

    TCPStore asks for no key, and its own socket listens on all interfaces: anyone on the network
    could read and write the addresses that ranks exchange.
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


class OneMachine(RendezvousHandler):
    """A rendezvous of one: a store on the loopback interface, new for every attempt, that the ranks
    connect to.
    """

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
        """No other machine could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
