"""Backward pass of a pipeline stage in two halves.

The first half computes the gradients of the stage's inputs, which the previous stage waits for.
The second half computes the gradients of the weights. Both accumulate into `grad` as any backward
pass does, so hooks on parameters run.

Note [Splitting a backward pass]
    The first half runs the nodes that lead to an input. The other nodes of the graph ("weight
    nodes") lead only to leaves such as parameters. Weight nodes are entered from two places: from
    a node that leads to an input as well (an "intermediate", such as the product of a linear
    layer), and from an output that leads to no input (a layer behind a `detach`). The first half
    records the gradients that arrive at the intermediates. The second half starts from them and
    from those outputs.

    Entry points that share a weight node belong to one group. Groups are therefore disjoint: every
    leaf that an output reaches is in exactly one group, and a weight node runs once. Leaves are
    taken from the graph and not from a list of parameters, so that no leaf is missing that one
    backward pass would reach.

    The first half computes a group completely if the second half would repeat a node that must run
    only once:
    - An intermediate leads to another one of its group (a weight that is used twice in a row). One
      pass through both would run everything between them again: collectives, hooks, recomputation.
    - An intermediate is the backward of a `torch.autograd.Function`, which may change what it
      saved (the fused losses of Liger multiply in place). Functions whose backward may run twice
      declare it (`allow_two_runs`).
    - The graph holds a reentrant checkpoint. Its parameters are not in the graph, and it allows no
      backward pass that is limited to some leaves, so the first half is the complete backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.checkpoint import GraphExecGroup

from plait._torch.passes import allows_two_runs
from plait._torch.tensors import is_view


def backward_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor] | None,
    inputs: Sequence[torch.Tensor],
) -> DeferredBackward:
    """Run the first half of a backward pass. See Note [Splitting a backward pass].

    Args:
        outputs: Tensors that require a gradient. They are detached from the graph, except views.
        gradients: One per output; None for a scalar loss.
        inputs: Leaves. Their `grad` is set.

    Returns:
        The second half, for `backward_weights`.
    """
    complete = DeferredBackward(outputs=tuple(outputs))
    if gradients is not None:
        complete.gradients = tuple(gradients)
    sources = [get_gradient_edge(tensor).node for tensor in inputs if tensor.requires_grad]
    if not sources:
        return complete
    edges = [get_gradient_edge(tensor) for tensor in outputs]
    graph = _Graph([edge.node for edge in edges], sources)
    if not graph.leads_to_inputs:
        return complete
    if graph.has_reentrant_checkpoint:
        torch.autograd.backward(complete.outputs, complete.gradients)
        return DeferredBackward()

    if gradients is None:
        gradients = [torch.ones_like(tensor) for tensor in outputs]
    starts = list(zip(edges, gradients, strict=True))
    eager_leaves: list[Node] = []
    deferred: list[WeightGroup] = []
    deferred_outputs: set[int] = set()
    for group in graph.groups():
        if graph.must_run_once(group):
            eager_leaves += group.leaves
        else:
            deferred.append(group)
            deferred_outputs.update(group.outputs)
    _run_first(
        [start for index, start in enumerate(starts) if index not in deferred_outputs],
        [*sources, *eager_leaves],
        deferred,
    )
    for group in deferred:
        group.starts += [starts[index] for index in group.outputs]
        group.owners = graph.owners(group, edges)

    # This frees what only the first half needed (the probabilities of a loss), even while the
    # caller keeps the outputs. torch does not detach views in place.
    for tensor in outputs:
        if not is_view(tensor):
            tensor.detach_()
    return DeferredBackward(groups=deferred)


def backward_weights(deferred: DeferredBackward) -> None:
    """Run the second half, which accumulates into `grad` of the parameters."""
    if deferred.outputs:
        torch.autograd.backward(deferred.outputs, deferred.gradients)
        return
    # Every group is a separate pass, and no two of them use the same saved tensor. A block that
    # recomputes does so once for all groups together.
    with GraphExecGroup():
        while deferred.groups:
            _run_group(deferred.groups.pop())


@dataclass
class DeferredBackward:
    """Second half of a backward pass.

    Attributes:
        groups: Groups of leaves whose gradients the first half has not computed.
        outputs: The stage's outputs if none of them leads to an input, otherwise empty. If they are
            set, nothing has run yet, and the second half is the complete backward.
        gradients: Gradients of `outputs`, None for a scalar loss.
    """

    groups: list[WeightGroup] = field(default_factory=list)
    outputs: tuple[torch.Tensor, ...] = ()
    gradients: tuple[torch.Tensor, ...] | None = None


@dataclass(eq=False)
class WeightGroup:
    """Leaves whose gradients are computed in one pass, and the graph nodes where the pass starts.

    Attributes:
        leaves: Nodes that accumulate into a parameter.
        intermediates: Nodes that lead to inputs as well.
        outputs: Indices of the outputs that lead to no input.
        starts: Edges that the second half starts from, with their gradients.
        recorded: Gradients that arrived at the intermediates in the first half.
        owners: Nodes and edges that keep the intermediates alive. Before torch 2.13 the Python
            object of a custom Function does not own its node.
    """

    leaves: list[Node] = field(default_factory=list)
    intermediates: list[Node] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    starts: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)
    recorded: dict[Node, tuple[torch.Tensor | None, ...]] = field(default_factory=dict)
    owners: list[Any] = field(default_factory=list)


def _run_first(
    starts: Sequence[tuple[GradientEdge, torch.Tensor]],
    leaves: Sequence[Node],
    groups: Iterable[WeightGroup],
) -> None:
    """Accumulate into `leaves`, and record the gradients at the intermediates of `groups`."""

    def recorder(group: WeightGroup, node: Node) -> Callable[[Any], None]:
        def record(gradients: tuple[torch.Tensor | None, ...]) -> None:
            group.recorded[node] = gradients

        return record

    handles = [
        node.register_prehook(recorder(group, node))
        for group in groups
        for node in group.intermediates
    ]
    try:
        _accumulate(starts, leaves, retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()


def _run_group(group: WeightGroup) -> None:
    """Accumulate into the leaves of `group`."""
    starts = group.starts
    handles = []
    for node, gradients in group.recorded.items():
        starts += [
            (GradientEdge(node, index), gradient)
            for index, gradient in enumerate(gradients)
            if gradient is not None
        ]
        # Hooks of the user on the node's tensor run again and have changed the gradient already.
        handles.append(node.register_prehook(lambda _, recorded=gradients: recorded))
    if not starts:
        return
    try:
        _accumulate(starts, group.leaves)
    finally:
        for handle in handles:
            handle.remove()


def _accumulate(
    starts: Sequence[tuple[GradientEdge, torch.Tensor]],
    leaves: Sequence[Node],
    *,
    retain_graph: bool = False,
) -> None:
    """Run a backward pass from edges with given gradients to some leaves."""
    edges = [edge for edge, _ in starts]
    gradients = [gradient for _, gradient in starts]
    inputs = [GradientEdge(leaf, 0) for leaf in leaves]
    torch.autograd.backward(edges, gradients, inputs=inputs, retain_graph=retain_graph)


class _Graph:
    """Autograd graph of a stage. See Note [Splitting a backward pass].

    Attributes:
        leads_to_inputs: Whether any output leads to an input.
        has_reentrant_checkpoint: Whether a node is the backward of a checkpoint with
            `use_reentrant=True`.
        _children: Children of each node. A node is inserted after all of its children.
        _parents: One parent of each node; roots may have none.
        _carrying: Nodes that lead to an input.
        _chained: Groups in which one intermediate leads to another.
    """

    def __init__(self, roots: Sequence[Node], inputs: Sequence[Node]) -> None:
        self._roots = roots
        self._children: dict[Node, list[Node]] = {}
        self._parents: dict[Node, Node] = {}
        self._walk()
        self._carrying = set(inputs)
        for node, children in self._children.items():
            if not self._carrying.isdisjoint(children):
                self._carrying.add(node)
        self.leads_to_inputs = not self._carrying.isdisjoint(roots)
        # By name: the checkpoints of Megatron-LM and DeepSpeed are copies of torch's, with its
        # rules.
        self.has_reentrant_checkpoint = any(
            _is_custom(node) and node.name() == "CheckpointFunctionBackward"
            for node in self._children
        )
        self._chained: list[WeightGroup] = []

    def _walk(self) -> None:
        """Visit all nodes depth first. Graphs are too deep for recursion in Python."""
        pending: dict[Node, list[Node]] = {}
        for root in self._roots:
            stack = [root]
            while stack:
                node = stack[-1]
                if node in self._children:
                    stack.pop()
                elif node in pending:
                    self._children[node] = pending.pop(node)
                    stack.pop()
                else:
                    children = [child for child, _ in node.next_functions if child is not None]
                    pending[node] = children
                    unseen = [child for child in children if child not in self._children]
                    self._parents.update(dict.fromkeys(unseen, node))
                    stack += unseen

    def groups(self) -> list[WeightGroup]:
        """Partition the leaves into groups. See Note [Splitting a backward pass]."""
        connected = _DisjointSets()
        # Pairs of an intermediate and a weight node below it.
        entered: list[tuple[Node, Node]] = []
        for node, children in self._children.items():
            weight_nodes = [child for child in children if child not in self._carrying]
            if node not in self._carrying:
                weight_nodes.append(node)
            elif weight_nodes:
                entered.append((node, weight_nodes[0]))
            for weight_node in weight_nodes[1:]:
                connected.union(weight_nodes[0], weight_node)

        groups: dict[Node, WeightGroup] = {}
        for node, children in self._children.items():
            if node not in self._carrying and not children and hasattr(node, "variable"):
                groups.setdefault(connected.find(node), WeightGroup()).leaves.append(node)
        for node, below in entered:
            group = groups.get(connected.find(below))
            if group is not None:
                group.intermediates.append(node)
        for index, root in enumerate(self._roots):
            if root not in self._carrying and connected.find(root) in groups:
                groups[connected.find(root)].outputs.append(index)
        self._chained = self._find_chained(groups.values())
        return list(groups.values())

    def _find_chained(self, groups: Iterable[WeightGroup]) -> list[WeightGroup]:
        """Return the groups in which one intermediate leads to another."""
        several = [group for group in groups if len(group.intermediates) > 1]
        if not several:
            return []
        # One bit per group, so that one walk over the graph serves all of them.
        bits: dict[Node, int] = {}
        for index, group in enumerate(several):
            bits.update(dict.fromkeys(group.intermediates, 1 << index))
        below: dict[Node, int] = {}
        chained = 0
        for node, children in self._children.items():
            if node in self._carrying:
                reached = 0
                for child in children:
                    reached |= below.get(child, 0)
                bit = bits.get(node, 0)
                chained |= reached & bit
                below[node] = reached | bit
        return [group for index, group in enumerate(several) if chained >> index & 1]

    def must_run_once(self, group: WeightGroup) -> bool:
        """Return True if the first half must compute the leaves of `group`."""
        if any(group is chained for chained in self._chained):
            return True
        return any(_is_custom(node) and not allows_two_runs(node) for node in group.intermediates)

    def owners(self, group: WeightGroup, edges: Sequence[GradientEdge]) -> list[Any]:
        """Return objects that keep alive the custom Functions among the intermediates."""
        owners: list[Any] = []
        for node in group.intermediates:
            if _is_custom(node):
                owner = node
                while _is_custom(owner) and owner in self._parents:
                    owner = self._parents[owner]
                owners.append(owner)
                # The edge of a root that is a custom Function holds a view of the output, which
                # owns it.
                owners += [edge for edge in edges if edge.node is owner]
        return owners


class _DisjointSets:
    """Union-find structure over nodes of a graph."""

    def __init__(self) -> None:
        self._parents: dict[Node, Node] = {}

    def find(self, node: Node) -> Node:
        """Return the representative of a node's set."""
        parents = self._parents
        while parents.setdefault(node, node) is not node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    def union(self, first: Node, second: Node) -> None:
        """Merge the sets of two nodes."""
        self._parents[self.find(second)] = self.find(first)


def _is_custom(node: object) -> bool:
    """Return True if a node is the backward of a `torch.autograd.Function`."""
    return isinstance(node, BackwardCFunction)
