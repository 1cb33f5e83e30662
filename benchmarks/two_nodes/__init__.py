"""Two nodes joined by a slow link, on one machine: what a training step costs where communication is dear."""
