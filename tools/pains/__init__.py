"""Fifteen things that users of Hugging Face's libraries run into, as scenarios that are run with Plait and with other libraries."""
