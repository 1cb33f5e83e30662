"""The machinery behind `plait launch`: this machine's agent, what runs inside a worker, failure
reports, and several machines by ssh.
"""
