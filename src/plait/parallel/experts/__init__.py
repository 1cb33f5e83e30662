"""Mixture of experts: routers, their balance, and experts on different ranks."""
