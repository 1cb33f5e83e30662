"""Messages of refused calls, for workers that return them to the test."""

import pytest

import plait


def message_of(call, *args, error=plait.PlaitError, **options):
    """Return the message of the error that a call raises, and fail if it raises none."""
    with pytest.raises(error) as raised:
        call(*args, **options)
    return str(raised.value)
