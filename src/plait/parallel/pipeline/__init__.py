"""Pipeline parallelism: consecutive blocks of a model on different ranks.

`techniques.pipeline_parallel` is the technique. `stage` reduces the model to the stages of a rank,
`runtime` executes the table of a schedule, `split_backward` divides a backward pass in two,
`cut_check` verifies that the stages compute what the full model computes, and `estimates` balances
the stages and predicts bytes.
"""
