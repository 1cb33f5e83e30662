"""Is the adaptive choice right: the way of summing that the measured links say, beside the best of all ways, timed afresh."""
