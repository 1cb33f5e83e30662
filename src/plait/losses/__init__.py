"""Losses as (sum, weight)."""
