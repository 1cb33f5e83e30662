"""Weights of one model into another of any layout: on the same ranks, and from a trainer's ranks to a generator's."""
