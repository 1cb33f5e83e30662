"""The only place where process groups are made: a layout over the processes that exist.

An existing default group is adopted (the user made it, the user destroys it); otherwise one is made
from the launcher's environment, or for a single process without any launcher. Sub-groups are
torch's DeviceMesh dimensions, one per axis of degree above 1.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait._torch.groups import flattened, give_timeout, set_timeout, splits_named_alike, timeout_of
from plait.cluster import accelerator
from plait.cluster.ending import end_default_group, end_groups, finish_at_exit
from plait.cluster.fake_group import is_fake
from plait.cluster.layout import AXES, EXPERT_AXES, SAMPLE_AXES, SPLIT_AXES, TOKEN_AXES, Layout
from plait.cluster.meeting import store_of_next_group
from plait.cluster.nccl import Library
from plait.cluster.topology import RankInfo, place, tell_library
from plait.errors import ConfigError, Problem

DEFAULT_TIMEOUT = timedelta(minutes=10)
COMBINED = (SAMPLE_AXES, TOKEN_AXES, ("pp", *TOKEN_AXES), SPLIT_AXES)
"""Axes that are taken together: for sums over the batch, for a loss that only a pipeline's last
stage has, and for the global norm of gradients. Axes of degree 1 count for nothing, so that without
cp the first two are one group.
"""


@dataclass(frozen=True)
class Groups:
    """The groups that a run needs besides one for every axis and those of COMBINED. All are made
    with the mesh, in one order.
    """

    axes: tuple[tuple[str, ...], ...] = ()
    """Several axes, each taken together."""
    stages: tuple[frozenset[int], ...] = ()
    """Coordinates along pp: their ranks that share all other coordinates."""
    levels: tuple[str, ...] = ()
    """Axes that are split by machine too, where a group spans several."""

    def __add__(self, other: Groups) -> Groups:
        """Both, each once."""
        return Groups(
            *(
                tuple(dict.fromkeys((*getattr(self, f.name), *getattr(other, f.name))))
                for f in fields(self)
            )
        )


@dataclass(frozen=True)
class Levels:
    """A group whose ranks sit on several machines, equally many on each: this rank's machine, and
    its counterparts on the others.
    """

    whole: dist.ProcessGroup
    inside: dist.ProcessGroup
    """The ranks of the group on this machine."""
    across: dist.ProcessGroup
    """One rank of every machine: those with this rank's position on theirs."""


class GroupUse:
    """One mesh's use of a default group that Plait made."""

    def __init__(self, users: weakref.WeakSet[GroupUse]) -> None:
        self.users = users
        users.add(self)


_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.WeakSet[GroupUse]] = (
    weakref.WeakKeyDictionary()
)
"""The default groups that Plait made, and their users: as global as torch's own record of them."""


def _use_of_default_group(*, made: bool) -> GroupUse | None:
    group = dist.group.WORLD
    if group is None:
        return None
    if made:
        _MADE[group] = weakref.WeakSet()
    return GroupUse(_MADE[group]) if group in _MADE else None


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


LANES = 3
"""Pairs of groups over pp for messages between stages, where a communicator carries them out one
after another (`comm.messages`).
"""


@dataclass(frozen=True)
class Mesh:
    """A layout made real: this process's rank and device, and the groups along every axis."""

    layout: Layout
    device: torch.device
    rank: int
    device_mesh: DeviceMesh
    use: GroupUse | None
    """Of a default group that Plait made; None for an adopted one."""
    expert_mesh: DeviceMesh | None = None
    """The same ranks by their second view, with `edp` and `ep` in the place of all axes but `pp`;
    None where experts are not split.
    """
    reverse_pp: dist.ProcessGroup | None = None
    """A second group over pp, for messages to lower stages; None without a pipeline."""
    more_pp: tuple[tuple[dist.ProcessGroup, dist.ProcessGroup], ...] = ()
    """Further groups over pp, for messages to higher and to lower stages, where one group would
    make them wait for each other: see `comm.messages`.
    """
    combined: Mapping[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)
    """Groups over several axes. Made with the mesh, because that is collective over all ranks, and
    not all may want a group later.
    """
    stages: Mapping[frozenset[int], dist.ProcessGroup | None] = field(default_factory=dict)
    """Groups of some stages by their coordinates along pp; None on the other ranks."""
    node_levels: Mapping[str, tuple[Levels | None, int]] = field(default_factory=dict)
    """Axis to its levels, and how many machines its group spans."""
    made: list[dist.ProcessGroup] = field(default_factory=list, repr=False)
    """All groups that this mesh made, to be ended with it."""

    @property
    def coordinates(self) -> dict[str, int]:
        """Where this process sits on every axis."""
        return self.layout.coordinates(self.rank)

    @property
    def norm_axes(self) -> tuple[str, ...]:
        """Axes over which what ranks hold of a model adds up. Experts may be split over ranks that
        replicate all else.
        """
        return AXES if self.layout.ep > 1 else SPLIT_AXES

    @property
    def dp_index(self) -> int:
        """Which slice of the batch this process reads."""
        return self.layout.dp_index(self.rank)

    def sub(self, *axes: str) -> DeviceMesh:
        """The mesh over `axes`, outermost first. Raises KeyError for an axis that has no group."""
        present = self.device_mesh.mesh_dim_names or ()
        missing = [axis for axis in axes if axis not in present]
        if missing:
            raise KeyError(f"no group along {missing}: their degree is 1; this mesh has {present}")
        return self.device_mesh[axes if len(axes) > 1 else axes[0]]

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The process group over `axes` taken together; None when their degrees are all 1 (nothing
        to communicate). Makes none: raises KeyError for several axes that are neither in COMBINED
        nor in the mesh's `Groups`.
        """
        if not set(axes).isdisjoint(EXPERT_AXES):
            (axis,) = axes
            return (
                self.expert_mesh[axis].get_group()
                if self.layout.all_degrees.get(axis, 1) > 1 and self.expert_mesh is not None
                else None
            )
        used = self._used(axes)
        if len(used) < 2:
            return self.sub(*used).get_group() if used else None
        return self.combined[used]

    def _used(self, axes: Collection[str]) -> tuple[str, ...]:
        return tuple(axis for axis in AXES if axis in axes and getattr(self.layout, axis) > 1)

    def with_groups(self, wanted: Groups) -> Mesh:
        """With the groups over several axes, of stages and of machines. Collective over all
        ranks.
        """
        used = dict.fromkeys(
            used
            for used in map(self._used, (*COMBINED, self.norm_axes, *wanted.axes))
            if len(used) > 1
        )
        mesh = replace(
            self,
            combined={axes: self._own(flattened(self.sub(*axes)).get_group()) for axes in used},
        )
        if self.layout.pp > 1:
            mesh = replace(mesh, reverse_pp=mesh.stages_group(range(self.layout.pp)))
        if self.layout.pp > 2 and accelerator.is_one(self.device) and not is_fake():
            mesh = replace(mesh, more_pp=mesh.message_groups(LANES - 1))
        mesh = replace(mesh, stages={stages: mesh.stages_group(stages) for stages in wanted.stages})
        nodes = _nodes() if wanted.levels else []
        return replace(
            mesh, node_levels={axis: mesh._levels(axis, nodes) for axis in wanted.levels}
        )

    def stages_group(self, stages: Collection[int]) -> dist.ProcessGroup | None:
        """A new group of the ranks at pp coordinates `stages` that share all other coordinates;
        None on the other ranks. Collective.
        """
        columns = [
            tuple(column[stage] for stage in sorted(stages)) for column in self.layout.groups("pp")
        ]
        group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in columns])
        if group is not None:
            self._own(group)
        return group if self.coordinates["pp"] in stages else None

    def message_groups(self, count: int) -> tuple[tuple[dist.ProcessGroup, dist.ProcessGroup], ...]:
        """`count` pairs of new groups over pp. Collective."""
        groups = [self.stages_group(range(self.layout.pp)) for _ in range(2 * count)]
        return tuple(
            (up, down)
            for up, down in zip(groups[::2], groups[1::2], strict=True)
            if up is not None and down is not None
        )

    def host_group(self) -> dist.ProcessGroup | None:
        """A new group of all ranks for tensors in host memory, of a thread of its own; None for one
        process. Collective.
        """
        if self.layout.world_size == 1:
            return None
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_of(_world())))
        self._own(group)
        return group

    @property
    def ranks_here(self) -> int:
        """How many ranks of the run are on this machine, as the launcher says."""
        return place().local_world_size

    def levels(self, axis: str) -> Levels | None:
        """The intra-node and inter-node groups of the group over `axis`; None where there is no
        such split (see `split_by_node`). Raises KeyError for an axis that is not in the mesh's
        `Groups`.
        """
        return self.node_levels[axis][0]

    def machines(self, axis: str) -> int:
        """How many machines the group over `axis` spans, equally many ranks on each; 1 where these
        are not equal. Raises KeyError as `levels` does.
        """
        return self.node_levels[axis][1]

    def _levels(self, axis: str, nodes: Sequence[int]) -> tuple[Levels | None, int]:
        """`nodes`: the machine of every rank of the world. Collective over the group of the
        axis.
        """
        group = self.group(axis)
        if group is None:
            return None, 1
        own = [nodes[rank] for rank in dist.get_process_group_ranks(group)]
        found = split_by_node(group, own) if len(set(own)) > 1 else None
        if found is not None:
            self.made.extend((found.inside, found.across))
        counts = Counter(own)
        return found, len(counts) if len(set(counts.values())) == 1 else 1

    def _own(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        if group is not dist.group.WORLD:  # which torch takes for an axis that holds all ranks
            self.made.append(group)
        return _timed(group)

    def leave(self) -> None:
        """End the groups that this mesh made; other code that uses the default group may destroy
        it.
        """
        if self.use is not None:
            self.use.users.discard(self.use)
        end_groups(self.made)
        self.made.clear()

    def close(self) -> None:
        """End the groups that this mesh made, and the default one, if Plait made it and no other
        mesh uses it.
        """
        self.leave()
        if self.use is not None and not self.use.users:
            end_default_group()


def split_by_node(group: dist.ProcessGroup, nodes: Sequence[int]) -> Levels | None:
    """The intra-node and inter-node groups of a group whose ranks, in order, run on the machines
    `nodes`. Collective over the group.

    None where there is no such split: one machine, or one rank on each; or where machines do not
    hold equal runs of consecutive ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    by_node: dict[int, list[int]] = {}
    for rank, node in zip(ranks, nodes, strict=True):
        by_node.setdefault(node, []).append(rank)
    inside = list(by_node.values())
    if len(inside) == 1 or len(inside) == len(ranks):
        return None
    if (
        len({len(members) for members in inside}) > 1
        or [rank for members in inside for rank in members] != ranks
    ):
        return None
    me = dist.get_rank()
    groups = [
        members
        for members in [*inside, *(list(column) for column in zip(*inside, strict=True))]
        if me in members
    ]
    mine = [_timed(dist.new_group(members, use_local_synchronization=True)) for members in groups]
    return Levels(group, mine[0], mine[1])


def _nodes() -> list[int]:
    """The machine of every rank of the world. Collective where the run spans several."""
    here = place()
    nodes = [0] * dist.get_world_size()
    if here.local_world_size != here.world_size and not is_fake():
        dist.all_gather_object(nodes, here.node_rank)
    return nodes


def _timed(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of this mesh, whose collectives give up when those of the default group do: the time
    that a user gave that one holds for all.
    """
    if not is_fake(group):
        assert dist.group.WORLD is not None
        give_timeout(group, dist.group.WORLD)
    return group


def build_mesh(
    layout: Layout,
    *,
    device_type: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    host_tensors: bool = False,
    library: Library | None = None,
    groups: Groups = Groups(),
    on_default_group: Callable[[], None] | None = None,
) -> Mesh:
    """Groups for `layout` over the processes that exist, and `groups` besides.

    `device_type` is `cuda` or `cpu`; by default a GPU where there is one. `host_tensors`: with
    GPUs, collectives on tensors in host memory are wanted too (offloaded parameters are gathered
    there for checkpoints). `library`: settings of NCCL. `on_default_group` is called before other
    groups are made. Raises ConfigError when the layout's world is not the real one.
    """
    here = place()
    device = local_device(device_type, here)
    owns = not dist.is_initialized()
    finish_at_exit()
    if library is not None and (owns or not is_fake()):
        tell_library(library, device_type=device.type, group_exists=not owns)
    if owns:
        _make_default_group(here, device, timeout, host_tensors=host_tensors)
    if dist.get_world_size() != layout.world_size:
        world = dist.get_world_size()
        if owns:
            dist.destroy_process_group()
        rule = f"the layout needs {layout.world_size} processes and {world} exist"
        raise ConfigError(Problem("parallel", str(layout), rule, f"start {layout.world_size}"))
    if on_default_group is not None:
        on_default_group()
    # fully_shard wants a dimension to shard over even where it has one rank; every other axis of
    # degree 1 gets no group.
    names = tuple(axis for axis in AXES if getattr(layout, axis) > 1 or axis == "dp_shard")
    with splits_named_alike(_number_of_mesh(device)):
        device_mesh = init_device_mesh(
            device.type, tuple(getattr(layout, axis) for axis in names), mesh_dim_names=names
        )
        expert_mesh = _expert_mesh(layout, device) if layout.ep > 1 else None
        mesh = Mesh(
            layout,
            device,
            dist.get_rank(),
            device_mesh,
            _use_of_default_group(made=owns),
            expert_mesh,
        )
        for one in (device_mesh, expert_mesh):
            if one is not None:
                for name in one.mesh_dim_names or ():
                    mesh._own(one[name].get_group())
        return mesh.with_groups(groups)


_meshes = 0


def _number_of_mesh(device: torch.device) -> int:
    """One that no mesh of this process has had, the same on all ranks. Collective."""
    global _meshes
    _meshes += 1
    if accelerator.is_one(device) and dist.get_world_size() > 1 and not is_fake():
        largest = torch.full((1,), _meshes, device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        _meshes = int(largest)
    return _meshes


def join(*, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """The default group of the launcher's processes, as `build_mesh` would make it, for code that
    wants one before any model is there; it is the caller's, who may end it. Nothing where there is
    one. Raises ConfigError where the processes do not know where to meet.
    """
    if not dist.is_initialized():
        here = place()
        finish_at_exit()
        _make_default_group(here, local_device(None, here), timeout, host_tensors=False)


def _expert_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """All of its axes but `edp`, over which experts may be sharded also where it has one rank, are
    of degree above 1.
    """
    degrees = {"pp": layout.pp, "edp": layout.stage_ranks // layout.ep, "ep": layout.ep}
    used = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == "edp"}
    return init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))


def local_device(device_type: str | None, here: RankInfo) -> torch.device:
    """This process's device: `cuda:local_rank`, or the CPU."""
    kind = device_type or accelerator.available_type()
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, here.local_rank)
    accelerator.use(device)
    return device


def _make_default_group(
    here: RankInfo, device: torch.device, timeout: timedelta, *, host_tensors: bool
) -> None:
    backend = accelerator.backend(device, host_tensors=host_tensors)
    device_id = device if accelerator.is_one(device) and here.world_size > 1 else None
    # Processes that are slow to start are not stuck: they get longer than a collective.
    patience = max(timeout, DEFAULT_TIMEOUT) if here.world_size > 1 else timeout
    store = store_of_next_group(here, patience)
    dist.init_process_group(
        backend,
        store=store,
        rank=here.rank,
        world_size=here.world_size,
        timeout=patience,
        device_id=device_id,
    )
    if patience != timeout:
        set_timeout(_world(), timeout.total_seconds())
