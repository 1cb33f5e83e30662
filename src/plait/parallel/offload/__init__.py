"""Offload of optimizer states and parameters to host memory and files."""
