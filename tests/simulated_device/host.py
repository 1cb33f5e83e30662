"""The process in which the workers of a simulated pool are started: its torch has the simulated device, so that of pytest needs none."""

from __future__ import annotations

import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

from tests.pool import Pool, WorkerFailed
from tests.simulated_device.observed import observed


def serve(connection):
    """Until the other side closes."""
    pool, size = Pool(), 0
    while True:
        try:
            world, function, args, timeout = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        if world != size:  # workers of one size at a time
            pool.close()
            size = world
        try:
            found = pool.run(world, observed, function, args, timeout=timeout)
            answer: tuple[bool, Any] = (True, found)
            if any(seen.failed for seen in found):
                pool.discard(world)  # groups of a rank that failed are of no use
        except WorkerFailed as error:
            answer = (False, str(error))
        connection.send_bytes(pickle.dumps(answer))
    pool.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
