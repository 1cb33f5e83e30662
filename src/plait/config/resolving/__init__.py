"""Resolution of a Config: degrees, batch sizes and techniques, each value with its source."""
