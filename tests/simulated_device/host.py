"""Process that starts the workers of a simulated pool.

Its torch has the simulated device, so that of pytest does not need it.
"""

from __future__ import annotations

import pickle
import sys
from multiprocessing.connection import Connection
from typing import Any

from tests.pool import Pool, WorkerFailed
from tests.simulated_device.observed import observed


def serve(connection):
    """Run tasks until the connection is closed."""
    pool = Pool()
    size = 0
    while True:
        try:
            world, function, args, timeout = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        if world != size:  # workers of one size at a time
            pool.close()
            size = world
        try:
            results = pool.run(world, observed, function, args, timeout=timeout)
            answer: tuple[bool, Any] = (True, results)
            if any(seen.failed for seen in results):
                pool.discard(world)  # process groups of a failed rank are unusable
        except WorkerFailed as error:
            answer = (False, str(error))
        connection.send_bytes(pickle.dumps(answer))
    pool.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
