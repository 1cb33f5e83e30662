"""What `plait plan` reads and prints."""
