"""The command line: one small file a verb. Nothing else of Plait imports this package."""
