"""Mixture of experts: routers, their balance, and experts on different ranks.

`expert_parallel` is the technique that splits experts over ranks. `dispatch` sends tokens to them.
`routing` is the technique for routers: losses from `router_statistics`, and biases that
`bias_update` moves.
"""
