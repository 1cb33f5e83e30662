"""Listeners: what a run tells, written to a file and shown to a person. Nothing here changes what a
run computes.
"""
