"""Mixture of experts: routers, load balancing, and experts on different ranks.

`techniques.experts` splits experts over ranks, and `dispatch` sends tokens to them.
`router_statistics` computes the losses of routers, and `adapted_parameters` supports adapters on
the parameters of experts.
"""
