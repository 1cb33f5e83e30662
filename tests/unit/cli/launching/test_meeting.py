"""A rendezvous that fails says why, and works when its message is followed."""

from __future__ import annotations

import socket
import threading

import pytest

from plait.cli.launching import agent
from plait.cli.launching.agent import LaunchError, make_rendezvous
from plait.cli.launching.launch_settings import LaunchSettings


def settings(address, *, seconds=20, **fields):
    return LaunchSettings(
        1,
        min_nodes=2,
        max_nodes=2,
        rdzv_endpoint=address,
        rdzv_id="test",
        timeout_seconds=seconds,
        **fields,
    )


def free_port():
    with socket.create_server(("localhost", 0)) as probe:
        return probe.getsockname()[1]


def refusal(address, *, seconds):
    """The message of a launch on one of two machines."""
    with pytest.raises(LaunchError) as error:
        agent.launch(["none.py"], settings(address, seconds=seconds))
    return str(error.value)


def numbers_of_two_machines(*addresses):
    """The numbers that two machines get, each of which is played by a thread."""
    found = []
    both_have_met = threading.Barrier(len(addresses), timeout=60)

    def meet(address):
        handler = make_rendezvous(settings(address))
        found.append(handler.next_rendezvous().rank)
        both_have_met.wait()
        handler.shutdown()

    threads = [threading.Thread(target=meet, args=(address,)) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return sorted(found)


def test_a_machine_that_does_not_come():
    address = f"localhost:{free_port()}"
    said = refusal(address, seconds=1)
    assert said.startswith(f"2 machines did not join the rendezvous at {address} within 1 s: ")
    assert "Check that every machine runs the same command with the same address" in said
    address = f"localhost:{free_port()}"
    assert numbers_of_two_machines(address, address) == [0, 1]


def test_a_name_without_an_address():
    said = refusal("none.invalid:29500", seconds=1)
    assert "finds no address for the name 'none.invalid'" in said and "correct it" in said
