"""Pipeline parallelism: consecutive blocks of a model on different ranks.

`pipeline_parallel` holds the technique, `stage` cuts the model, `runtime` executes the table of a
schedule, `split_backward` halves a backward pass, `balance` chooses where to cut, and `account`
predicts bytes.
"""
