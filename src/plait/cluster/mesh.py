"""Process groups of a layout. No other module creates process groups for training.

An existing default group is used, and the user who created it destroys it. Otherwise a default
group is created from the launcher's environment, or for a single process. The groups of a layout
are dimensions of a torch DeviceMesh, one per parallel dimension of degree above 1.

Note [Creation of groups]
    Creating a process group is collective over all ranks of the run, even over those that are not
    members, and all ranks must create groups in the same order. Ranks may need different groups, so
    a technique must not create a group at the point where it needs the group. Instead, all groups
    are created together with the mesh. Techniques announce the groups that they need in `Groups`.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait._torch.groups import (
    consistent_split_names,
    copy_timeout,
    flatten_mesh,
    set_timeout,
    timeout_of,
)
from plait.cluster import accelerator
from plait.cluster.layout import AXES, EXPERT_AXES, SAMPLE_AXES, SPLIT_AXES, TOKEN_AXES, Layout
from plait.cluster.open_files import check_open_files
from plait.cluster.process_groups import (
    end_default_group,
    end_groups,
    finish_at_exit,
    is_fake,
    store_of_next_group,
)
from plait.cluster.small_messages import all_gather_objects, max_over_ranks
from plait.cluster.topology import RankInfo, place
from plait.errors import ConfigError, Problem
from plait.names import number_of

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""Timeout of collectives."""
COMBINED = (SAMPLE_AXES, TOKEN_AXES, ("pp", *TOKEN_AXES), SPLIT_AXES)
"""Dimensions that every mesh combines into one group.

They are used for sums over the batch, for a loss that only the last pipeline stage has, and for the
global norm of gradients. Dimensions of degree 1 are ignored, so that without cp the first two are
the same group.
"""
LANES = 3
"""Number of pairs of groups over pp for messages between stages with NCCL (`comm.messages`)."""
_DEFAULT_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[GroupUse]] = (
    weakref.WeakKeyDictionary()
)
"""Default groups that Plait created, with their uses. Global, as torch's own list of groups is."""
_mesh_count = 0
"""Number of meshes of this process, or of another rank that has created more."""


@dataclass(frozen=True)
class Groups:
    """Groups that a run needs in addition to those of single dimensions and of COMBINED.

    See Note [Creation of groups].

    Attributes:
        axes: Dimensions that are combined into one group.
        stages: Sets of coordinates along pp. The ranks of a set form groups within which all other
            coordinates are equal.
        levels: Dimensions whose groups are also split by machine.
    """

    axes: tuple[tuple[str, ...], ...] = ()
    stages: tuple[frozenset[int], ...] = ()
    levels: tuple[str, ...] = ()

    def __add__(self, other: Groups) -> Groups:
        """Return the union of the groups of both operands."""
        return Groups(
            axes=tuple(dict.fromkeys(self.axes + other.axes)),
            stages=tuple(dict.fromkeys(self.stages + other.stages)),
            levels=tuple(dict.fromkeys(self.levels + other.levels)),
        )


@dataclass(frozen=True)
class Levels:
    """Two-level view of a group that has equally many ranks on each of several machines.

    Attributes:
        inside: Ranks of the group on this machine.
        across: One rank per machine: the ranks with the same position on their machine as this one.
    """

    inside: dist.ProcessGroup
    across: dist.ProcessGroup


class GroupUse:
    """Reference of one mesh to a default group that Plait created, for reference counting.

    Args:
        users: References to the same group. The new reference is added.
    """

    # The set is weak, so that a mesh that was garbage-collected without `close` does not count.
    def __init__(self, users: weakref.WeakSet[GroupUse]) -> None:
        self.users = users
        users.add(self)


@dataclass(frozen=True)
class Mesh:
    """Layout over the existing processes, with the process groups of its dimensions.

    Attributes:
        layout: The layout.
        device: Device of this process.
        rank: Global rank of this process.
        device_mesh: torch's mesh, with a dimension for `dp_shard`, whatever its degree, and for
            every other parallel dimension of degree above 1.
        use: Reference that keeps the default group alive with this mesh if Plait created the group.
            None if the user created it.
        expert_mesh: Mesh of the same ranks with the dimensions `pp`, `edp` and `ep`. None if
            experts are not split.
        reverse_pp: Second group over pp for messages to lower stages. None without a pipeline.
        extra_pp: Further groups over pp for messages to higher and to lower stages, if messages in
            one group would wait for each other (`comm.messages`).
        combined: Groups over several dimensions.
        stages: Groups of some stages, keyed by their coordinates along pp. None on ranks that are
            not members.
        node_levels: Groups within and across machines, and the number of machines, per dimension.
        created_groups: Groups that this mesh created, which are destroyed with it.
    """

    layout: Layout
    device: torch.device
    rank: int
    device_mesh: DeviceMesh
    use: GroupUse | None
    expert_mesh: DeviceMesh | None = None
    reverse_pp: dist.ProcessGroup | None = None
    extra_pp: tuple[tuple[dist.ProcessGroup, dist.ProcessGroup], ...] = ()
    combined: Mapping[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)
    stages: Mapping[frozenset[int], dist.ProcessGroup | None] = field(default_factory=dict)
    node_levels: Mapping[str, tuple[Levels | None, int]] = field(default_factory=dict)
    created_groups: list[dist.ProcessGroup] = field(default_factory=list, repr=False)

    @property
    def coordinates(self) -> dict[str, int]:
        """Coordinates of this process along every dimension."""
        return self.layout.coordinates(self.rank)

    @property
    def norm_axes(self) -> tuple[str, ...]:
        """Dimensions over which the norm of gradients is summed.

        If experts are split, these include dp_replicate, because its ranks may hold different
        experts.
        """
        return AXES if self.layout.ep > 1 else SPLIT_AXES

    @property
    def dp_index(self) -> int:
        """Index of the slice of the batch that this process reads."""
        return self.layout.dp_index(self.rank)

    def sub(self, *axes: str) -> DeviceMesh:
        """Return the mesh over some dimensions.

        Args:
            axes: Names of the dimensions, outermost first.

        Raises:
            KeyError: A dimension has no group.
        """
        present = self.device_mesh.mesh_dim_names or ()
        missing = [axis for axis in axes if axis not in present]
        if missing:
            raise KeyError(f"no group along {missing}: their degree is 1; this mesh has {present}")
        return self.device_mesh[axes if len(axes) > 1 else axes[0]]

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the process group over one dimension, or over several combined dimensions.

        This creates no group, see Note [Creation of groups].

        Args:
            axes: Names of the dimensions. A dimension of EXPERT_AXES cannot be combined.

        Returns:
            The group, or None if all degrees are 1, so that there is nothing to communicate.

        Raises:
            KeyError: The combination is neither in COMBINED nor in the mesh's `Groups`.
        """
        if not set(axes).isdisjoint(EXPERT_AXES):
            (axis,) = axes
            if self.expert_mesh is None or self.layout.all_degrees.get(axis, 1) == 1:
                return None
            return self.expert_mesh[axis].get_group()

        used = self._used(axes)
        if not used:
            return None
        if len(used) == 1:
            return self.sub(*used).get_group()
        return self.combined[used]

    def _used(self, axes: Collection[str]) -> tuple[str, ...]:
        """Return the dimensions among `axes` whose degree is above 1, outermost first."""
        return tuple(axis for axis in AXES if axis in axes and getattr(self.layout, axis) > 1)

    def with_groups(self, groups: Groups) -> Mesh:
        """Create all groups except those of single dimensions, and return the mesh with them.

        Collective over all ranks. See Note [Creation of groups].
        """
        combinations = dict.fromkeys(map(self._used, (*COMBINED, self.norm_axes, *groups.axes)))
        combined = {}
        for axes in combinations:
            if len(axes) > 1:
                combined[axes] = self._adopt(flatten_mesh(self.sub(*axes)).get_group())
        mesh = replace(self, combined=combined)

        if self.layout.pp > 1:
            # A message to a lower stage must not wait for one to a higher stage.
            mesh = replace(mesh, reverse_pp=mesh.stages_group(range(self.layout.pp)))
        if self.layout.pp > 2 and accelerator.is_accelerator(self.device) and not is_fake():
            # NCCL executes the operations of a communicator in order, even if their peers differ.
            mesh = replace(mesh, extra_pp=mesh.message_groups(LANES - 1))
        mesh = replace(mesh, stages={stages: mesh.stages_group(stages) for stages in groups.stages})

        if not groups.levels:
            return mesh
        nodes = _node_of_each_rank()
        return replace(
            mesh, node_levels={axis: mesh._split_by_node(axis, nodes) for axis in groups.levels}
        )

    def stages_group(self, stages: Collection[int]) -> dist.ProcessGroup | None:
        """Create the groups of ranks at `stages` whose other coordinates are equal. Collective.

        Args:
            stages: Coordinates along pp.

        Returns:
            The group of this rank, or None if the stage of this rank is not in `stages`.
        """
        columns = [
            [column[stage] for stage in sorted(stages)] for column in self.layout.groups("pp")
        ]
        group, _ = dist.new_subgroups_by_enumeration(columns)
        if group is not None:
            self._adopt(group)
        return group if self.coordinates["pp"] in stages else None

    def message_groups(self, count: int) -> tuple[tuple[dist.ProcessGroup, dist.ProcessGroup], ...]:
        """Create `count` pairs of groups over pp. Collective."""
        groups = [self.stages_group(range(self.layout.pp)) for _ in range(2 * count)]
        pairs = []
        for to_higher, to_lower in zip(groups[::2], groups[1::2], strict=True):
            if to_higher is not None and to_lower is not None:
                pairs.append((to_higher, to_lower))
        return tuple(pairs)

    def host_group(self) -> dist.ProcessGroup | None:
        """Create a gloo group of all ranks for use by a single thread per rank. Collective.

        Returns:
            The group, or None for a single process.
        """
        if self.layout.world_size == 1:
            return None
        # Collectives of two threads in one group would have no common order on all ranks.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_of(_world())))
        self._adopt(group)
        return group

    @property
    def local_world_size(self) -> int:
        """Number of ranks of the run on this machine, according to the launcher."""
        return place().local_world_size

    def levels(self, axis: str) -> Levels | None:
        """Return the subgroups of a dimension's process group: within and across machines.

        Args:
            axis: Name of the dimension.

        Returns:
            The subgroups, or None if the group is not split, see `split_by_node`.

        Raises:
            KeyError: The dimension is not in the `levels` of the mesh's `Groups`.
        """
        return self.node_levels[axis][0]

    def machines(self, axis: str) -> int:
        """Return the number of machines that the process group of a dimension spans.

        Args:
            axis: Name of the dimension.

        Returns:
            The number, or 1 if the machines have different numbers of the group's ranks.

        Raises:
            KeyError: The dimension is not in the `levels` of the mesh's `Groups`.
        """
        return self.node_levels[axis][1]

    def _split_by_node(self, axis: str, nodes: Sequence[int]) -> tuple[Levels | None, int]:
        """Split a dimension's group by machine, and return (subgroups, number of machines).

        Collective over all ranks.

        Args:
            axis: Name of the dimension.
            nodes: Machine of every rank of the run.
        """
        groups = self.layout.groups(axis)
        levels = split_by_node(groups, nodes)
        if levels is not None:
            self.created_groups.extend((levels.inside, levels.across))

        members = next(ranks for ranks in groups if self.rank in ranks)
        ranks_per_node = Counter(nodes[rank] for rank in members)
        if len(set(ranks_per_node.values())) > 1:
            return levels, 1
        return levels, len(ranks_per_node)

    def _adopt(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Register a group that this mesh created and will destroy."""
        # torch uses the default group for a dimension with all ranks.
        if group is not dist.group.WORLD:
            self.created_groups.append(group)
        return _with_default_timeout(group)

    def leave(self) -> None:
        """Destroy the groups that this mesh created, except for the default group.

        Other code that uses the default group may then destroy it.
        """
        if self.use is not None:
            self.use.users.discard(self.use)
        end_groups(self.created_groups)
        self.created_groups.clear()

    def close(self) -> None:
        """Destroy the groups that this mesh created.

        The default group is destroyed too if Plait created it and no other mesh uses it.
        """
        self.leave()
        if self.use is not None and not self.use.users:
            end_default_group()


def split_by_node(groups: Sequence[Sequence[int]], nodes: Sequence[int]) -> Levels | None:
    """Split groups by machine: create groups inside and across machines. Collective over all ranks.

    Args:
        groups: Ranks of each group. No rank is in two groups.
        nodes: Machine of every rank of the run.

    Returns:
        The subgroups of this rank's group. None if this rank's group has only one machine or one
        rank per machine, or if its machines do not have equally many consecutive ranks.
    """
    parts = [_ranks_by_node(ranks, nodes) for ranks in groups]
    # All ranks create all groups, so that torch numbers them. A group that only its members create
    # is named by its ranks, and a second group with this name would wait for ever.
    created = []
    for side in (
        [ranks for inside in parts for ranks in inside],
        [list(ranks) for inside in parts for ranks in zip(*inside, strict=True)],
    ):
        if side:
            group, _ = dist.new_subgroups_by_enumeration(side)
            if group is not None:
                created.append(_with_default_timeout(group))
    return Levels(*created) if created else None


def _ranks_by_node(ranks: Sequence[int], nodes: Sequence[int]) -> list[list[int]]:
    """Return a group's ranks by machine, or an empty list if `split_by_node` does not split it."""
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(nodes[rank], []).append(rank)
    inside = list(by_node.values())
    is_even = len({len(members) for members in inside}) == 1
    is_consecutive = list(chain.from_iterable(inside)) == list(ranks)
    if len(inside) in (1, len(ranks)) or not is_even or not is_consecutive:
        return []
    return inside


def _node_of_each_rank() -> list[int]:
    """Return the machine of every rank of the run. Collective if there are several machines."""
    rank_info = place()
    if rank_info.local_world_size != rank_info.world_size and not is_fake():
        return all_gather_objects(rank_info.node_rank)
    return [0] * dist.get_world_size()


def _with_default_timeout(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Set the timeout of a group to that of the default group, which the user may have set."""
    if not is_fake(group):
        copy_timeout(group, _world())
    return group


def build_mesh(
    layout: Layout,
    *,
    timeout: timedelta = DEFAULT_TIMEOUT,
    host_tensors: bool = False,
    groups: Groups = Groups(),
    on_default_group: Callable[[], None] | None = None,
) -> Mesh:
    """Create the process groups of a layout over the existing processes. Collective.

    Args:
        layout: The layout.
        timeout: Timeout of collectives. An existing default group keeps its own timeout.
        host_tensors: Whether the default group of GPU processes also supports tensors in host
            memory. Offloaded parameters are gathered in host memory for checkpoints.
        groups: Further groups.
        on_default_group: Called when the default group exists, before other groups are created.

    Raises:
        ConfigError: The number of processes is not the layout's world size.
    """
    rank_info = place()
    device = local_device(rank_info)
    is_new = not dist.is_initialized()
    finish_at_exit()
    if is_new:
        _make_default_group(rank_info, device, timeout, host_tensors=host_tensors)
    _check_world_size(layout, is_new=is_new)
    if on_default_group is not None:
        # Groups that are created later get the timeout of the default group, which this may change.
        on_default_group()

    # `fully_shard` needs a dimension to shard over even if it has one rank. No other dimension of
    # degree 1 has a group.
    names = tuple(axis for axis in AXES if getattr(layout, axis) > 1 or axis == "dp_shard")
    degrees = tuple(getattr(layout, axis) for axis in names)
    with consistent_split_names(_next_mesh_number(device)):
        device_mesh = init_device_mesh(device.type, degrees, mesh_dim_names=names)
        expert_mesh = _expert_mesh(layout, device) if layout.ep > 1 else None
        use = _use_default_group(is_new=is_new)
        mesh = Mesh(layout, device, dist.get_rank(), device_mesh, use, expert_mesh)
        for torch_mesh in (device_mesh, expert_mesh):
            if torch_mesh is not None:
                for name in torch_mesh.mesh_dim_names or ():
                    mesh._adopt(torch_mesh[name].get_group())
        return mesh.with_groups(groups)


def _check_world_size(layout: Layout, *, is_new: bool) -> None:
    """Raise ConfigError if the number of processes is not the layout's world size.

    A new default group is destroyed first.
    """
    world_size = dist.get_world_size()
    if world_size == layout.world_size:
        return
    if is_new:
        # The caller may try another layout.
        dist.destroy_process_group()
    raise ConfigError(
        Problem(
            "parallel",
            str(layout),
            f"the layout needs {number_of(layout.world_size, 'process')}, and the process group has"
            f" {world_size}",
            f"start {number_of(layout.world_size, 'process')}, or change the layout",
        )
    )


def _use_default_group(*, is_new: bool) -> GroupUse | None:
    """Register a reference to the default group, or return None if the user created it."""
    group = dist.group.WORLD
    if group is None:
        return None
    if is_new:
        _DEFAULT_GROUPS[group] = weakref.WeakSet()
    if group not in _DEFAULT_GROUPS:
        return None
    return GroupUse(_DEFAULT_GROUPS[group])


def _next_mesh_number(device: torch.device) -> int:
    """Return a number that no earlier mesh of any rank has, the same on all ranks. Collective."""
    global _mesh_count
    _mesh_count += 1
    if accelerator.is_accelerator(device) and dist.get_world_size() > 1 and not is_fake():
        _mesh_count = max_over_ranks([_mesh_count], dist.group.WORLD, device=device)[0]
    return _mesh_count


def join(*, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """Create the default group of the launcher's processes, as `build_mesh` would. Collective.

    This is for code that needs the group before there is a model. The caller may destroy the group.
    Does nothing if the default group already exists.

    Raises:
        ConfigError: No rendezvous address is configured.
    """
    if not dist.is_initialized():
        rank_info = place()
        finish_at_exit()
        _make_default_group(rank_info, local_device(rank_info), timeout, host_tensors=False)


def _expert_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Create the mesh of pp, edp and ep, without dimensions of degree 1. Collective.

    `edp` is always present, because experts may be sharded over it even if it has one rank.
    """
    # In the order of the ranks: neighbouring ranks have different experts.
    degrees = {"pp": layout.pp, "edp": layout.stage_ranks // layout.ep, "ep": layout.ep}
    used = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == "edp"}
    return init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))


def local_device(rank_info: RankInfo) -> torch.device:
    """Return the device of this process: a GPU, which becomes the current device, or the CPU.

    Args:
        rank_info: Place of this process.
    """
    device_type = accelerator.available_type()
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(device_type, rank_info.local_rank)
    accelerator.use(device)
    return device


def _make_default_group(
    rank_info: RankInfo, device: torch.device, timeout: timedelta, *, host_tensors: bool
) -> None:
    is_single = rank_info.world_size == 1
    # Processes may start at different times, so they wait longer than a collective does. With a
    # device torch creates NCCL's communicator now, not in the first collective.
    start_timeout = timeout if is_single else max(timeout, DEFAULT_TIMEOUT)
    store = store_of_next_group(rank_info, start_timeout)
    if not is_single:
        check_open_files(store, rank_info)
    dist.init_process_group(
        accelerator.backend(device, host_tensors=host_tensors),
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=start_timeout,
        device_id=device if accelerator.is_accelerator(device) and not is_single else None,
    )
    if start_timeout != timeout:
        set_timeout(_world(), timeout.total_seconds())


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
