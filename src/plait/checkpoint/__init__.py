"""Saving and loading: torch's distributed checkpoint for training, safetensors for Hugging Face."""
