"""What every benchmark shares: facts about the machine, foreign load, statistics, tables, worker processes."""
