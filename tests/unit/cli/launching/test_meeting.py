"""A rendezvous that fails has its reason, and succeeds when the message is followed."""

from __future__ import annotations

import socket
import threading

import pytest

from plait.cli.launching import agent
from plait.cli.launching.agent import LaunchError, make_rendezvous
from plait.cli.launching.launch_settings import LaunchSettings


def settings_of(address, *, seconds=20):
    """Return the settings of one of two machines."""
    rendezvous = {"rdzv_endpoint": address, "rdzv_id": "test"}
    return LaunchSettings(1, min_nodes=2, max_nodes=2, timeout_seconds=seconds, **rendezvous)


def free_address():
    with socket.create_server(("localhost", 0)) as probe:
        return f"localhost:{probe.getsockname()[1]}"


def refusal(address):
    """Return the message of a launch on one of two machines."""
    with pytest.raises(LaunchError) as error:
        agent.launch(["none.py"], settings_of(address, seconds=1))
    return str(error.value)


def meet(*addresses):
    """Return the numbers of machines, each of which is a thread here."""
    numbers = []
    all_have_met = threading.Barrier(len(addresses), timeout=60)

    def join(address):
        handler = make_rendezvous(settings_of(address))
        numbers.append(handler.next_rendezvous().rank)
        all_have_met.wait()
        handler.shutdown()

    threads = [threading.Thread(target=join, args=(address,)) for address in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return sorted(numbers)


def test_a_machine_that_does_not_come():
    address = free_address()
    message = refusal(address)
    assert message.startswith(f"2 machines did not join the rendezvous at {address} within 1 s: ")
    assert "Check that every machine runs the same command with the same address" in message
    address = free_address()
    assert meet(address, address) == [0, 1]


def test_a_name_without_an_address():
    message = refusal("none.invalid:29500")
    assert "finds no address for the name 'none.invalid'" in message and "correct it" in message
    assert len(message.splitlines()) == 1
