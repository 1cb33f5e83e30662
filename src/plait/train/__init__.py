"""Training run behind `plait train`.

`session` builds model, data and engine from the sections of a configuration, `loop` takes the
steps, and `export` writes the trained model for Transformers. The package prints nothing: it
notifies listeners of `plait.events`.
"""
