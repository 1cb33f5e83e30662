"""Facts about a model. Nothing here changes one."""
