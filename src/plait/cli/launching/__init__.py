"""Launcher of `plait launch` and of all commands that start processes.

It contains the agent of a machine, the code that runs in each rank, the reports of failures and
hangs, standby processes, and the start of several machines by ssh.
"""
