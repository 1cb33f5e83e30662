"""One technique a file: what can be set, what it does to a model, what it costs."""
