"""Numbers only: bytes of states and traffic, and the peak memory of a step."""
