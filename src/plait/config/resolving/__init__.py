"""From a Config, which may say "auto", to what runs: degrees, batch sizes, techniques, each value
with its source.
"""
