"""Accelerate's Accelerator, for which the processes are the data-parallel ranks of a layout.

The Trainer counts and gathers over the world: right where every process has its own batch, and
wrong under tensor and pipeline parallelism, where several share one. Everything that it asks about
processes is asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch.utils.data import DataLoader, IterableDataset

from plait.cluster.layout import SAMPLE_AXES, Layout
from plait.config.resolving.resolve import Resolved
from plait.data.split_rows import refuse_other_stream, refuse_split_stream, split_sampler
from plait.data.stream_part import StreamPart, is_of_datasets
from plait.engine.engine import Engine
from plait.engine.weights import full_weights
from plait.errors import InputError
from plait.hf.batches import OwnRounds, Rounds
from plait.model.adapters import adapters_of
from plait.sharded.model import owner_of
from plait.sharded.parallel_model import ParallelModel, parallelize

FULL_WEIGHTS = (
    "accelerator.get_state_dict(model) on every process, and save the result in one"
    " (save_pretrained(folder, state_dict=...) takes it)"
)
"""Remedy of messages: the call that returns full weights."""
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)
_KEPT_OF_WORKERS = ("prefetch_factor", "persistent_workers")


class Accelerator(accelerate.Accelerator):
    """Made of the Trainer's own by `adopt`."""

    layout: Layout
    engine: Engine | None
    own_rank: int
    seed: int
    evaluates: bool
    """Whether the next loader is for an evaluation."""
    present: int | None
    """How many data-parallel ranks, the first ones, compute on a batch of their own, where others
    have another's: those count for nothing. None: all.
    """
    references: list[ParallelModel]
    """Models beside the trained one, which compute forwards alone."""
    resolved: Resolved
    backward_of: Callable[[torch.Tensor], None]
    _alone: bool
    _own_counts: bool
    _begins = "train() or evaluate() of the Trainer does it"

    @classmethod
    def adopt(
        cls, accelerator: accelerate.Accelerator, resolved: Resolved, *, rank: int, seed: int
    ) -> Accelerator:
        """The same object, whose processes are the data-parallel ranks of the configuration's
        layout.
        """
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator.resolved = resolved
        accelerator.layout = resolved.layout
        accelerator.own_rank = rank
        accelerator.seed = seed
        accelerator.engine = accelerator.present = None
        accelerator.references = []
        accelerator.evaluates = accelerator._alone = accelerator._own_counts = False
        return accelerator

    @property
    def num_processes(self) -> int:
        """Data-parallel ranks; 1 while each of them evaluates a batch of its own."""
        return 1 if self._alone else self.layout.dp

    @property
    def process_index(self) -> int:
        """Which part of the batch this process has."""
        return self.layout.dp_index(self.own_rank)

    @property
    def evaluates_alone(self) -> bool:
        """Whether that is so now."""
        return self._alone

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What a rank computes inside is about its own batch only."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    @contextmanager
    def counting(self, *, present: int | None) -> Iterator[None]:
        """What is gathered inside is that of the first `present` data-parallel ranks, which have a
        batch of their own; of all for None.
        """
        before = self.present
        self.present = present
        try:
            yield
        finally:
            self.present = before

    @contextmanager
    def own_counts(self) -> Iterator[None]:
        """What is gathered inside is this rank's own."""
        before = self._own_counts
        self._own_counts = True
        try:
            yield
        finally:
            self._own_counts = before

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """A loader of this rank's part, which moves batches to the device."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        ranks = self.layout.dp
        index = self.process_index
        settings: dict[str, Any] = {name: getattr(data_loader, name) for name in _KEPT}
        if data_loader.num_workers:
            settings |= {name: getattr(data_loader, name) for name in _KEPT_OF_WORKERS}
        settings["in_order"] = getattr(data_loader, "in_order", True)
        start = settings["worker_init_fn"]
        # ranks that share a batch have equal workers
        if isinstance(start, partial) and "rank" in start.keywords:
            settings["worker_init_fn"] = partial(
                start.func, *start.args, **{**start.keywords, "rank": index}
            )
        if data_loader.batch_sampler is None:
            raise InputError(
                "a DataLoader with batch_size=None has no batches to share between ranks; give it a"
                " batch_size"
            )
        dataset = data_loader.dataset
        drop_last = bool(data_loader.drop_last)
        if isinstance(dataset, IterableDataset):
            if self.evaluates and ranks > 1:  # what a worker reads last, nobody else learns
                settings |= {"num_workers": 0, "multiprocessing_context": None}
                for name in _KEPT_OF_WORKERS:
                    settings.pop(name, None)
            refuse_split_stream(dataset)
            # Rows of other data sets are compared while they are read, which workers cannot do.
            is_compared = is_of_datasets(dataset) or settings["num_workers"] > 0
            if is_compared:
                context = settings["multiprocessing_context"]
                refuse_other_stream(
                    dataset, device=self.device, workers=settings["num_workers"], context=context
                )
            size = data_loader.batch_size
            stream = StreamPart(
                dataset,
                batch_size=size,
                ranks=ranks,
                index=index,
                drop_last=drop_last,
                device=None if is_compared else self.device,
            )
            made = DataLoader(stream, batch_size=size, drop_last=drop_last, **settings)
        else:
            drop_last = drop_last or bool(getattr(data_loader.batch_sampler, "drop_last", False))
            is_split = split_sampler(data_loader.batch_sampler, ranks=ranks, index=index)
            rounds_class = OwnRounds if is_split else Rounds
            rounds = rounds_class(
                data_loader.batch_sampler,
                ranks=ranks,
                index=index,
                drop_last=drop_last,
                device=self.device,
                seed=self._order()["data_seed"],
            )
            made = DataLoader(dataset, batch_sampler=rounds, **settings)
        prepared = prepare_data_loader(
            made,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            dispatch_batches=False,
            non_blocking=self.non_blocking,
            **self._order(),
        )
        self._dataloaders.append(prepared)
        return prepared

    def _order(self) -> dict[str, Any]:
        """How `accelerate.data_loader.prepare_data_loader` orders shuffled samples: by the seed and
        the epoch.
        """
        return {"use_seedable_sampler": True, "data_seed": self.seed}

    def prepare_model(
        self, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        """A model that Plait has is ready. Another one for evaluation, such as the reference of a
        preference loss, is sharded in place, as the trained one is, and computes forwards alone.
        """
        if owner_of(model) is not None:
            return model
        if evaluation_mode:
            settings = self.resolved.model_copy(
                update={
                    "faults": self.resolved.faults.model_copy(update={"compare_replicas_every": 0})
                }
            )
            self.references.append(parallelize(model, settings))
            return model.requires_grad_(False).eval()
        return super().prepare_model(
            model, device_placement=device_placement, evaluation_mode=evaluation_mode
        )

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward of the micro-batch that the Trainer is at.

        Raises:
            InputError: Any argument besides the loss is given.
        """
        if kwargs:
            raise InputError(
                f"accelerator.backward({next(iter(kwargs))}=...): a micro-batch has one backward"
                " here; add its losses and call it once"
            )
        self.backward_of(loss)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return full weights by name. Collective.

        Args:
            model: The model that is trained.
            unwrap: Accelerate's argument, which changes nothing here.

        Returns:
            Tensors on the CPU in the first process, and nothing in the others. If the model has
            adapters, the tensors are the adapters' only.

        Raises:
            InputError: `model` is not the one that is trained, or it is not sharded yet.
        """
        engine = self.engine
        if engine is None:
            raise InputError(
                f"accelerator.get_state_dict: the model is not sharded yet: {self._begins}"
            )
        if model is not engine.model:
            raise InputError("accelerator.get_state_dict takes the model that is trained")
        return full_weights(engine, adapters=adapters_of(model))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Refused: parts of gradients have no norm of their own."""
        raise InputError(
            "accelerator.clip_grad_norm_: the step clips by max_grad_norm, over all ranks; take the"
            " call out"
        )

    def _group(self) -> dist.ProcessGroup | None:
        if self.layout.dp == 1:
            return None
        if self.engine is None:
            raise InputError(
                "the accelerator gathers over the ranks of a layout once the model is sharded:"
                f" {self._begins}"
            )
        return self.engine.mesh.group(*SAMPLE_AXES)

    def gather(self, tensor: Any) -> Any:
        """Return the rows of all data-parallel ranks, one rank after another in dim 0.

        Unlike in Accelerate, ranks may have different numbers of rows. A 0-dimensional tensor
        counts as one row. Collective.

        Raises:
            InputError: The sizes of another dimension differ between ranks. Raised on all ranks.
        """
        if self._own_counts:
            return tensor
        return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`; objects in a list. Collective."""
        group = self._group()
        if use_gather_object:
            if group is None:
                return input_data
            found: list[Any] = [None] * group.size()
            dist.all_gather_object(found, input_data, group=group)
            return [entry for part in found for entry in part]
        return self.gather(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum or mean over data-parallel ranks. Collective."""
        group = self._group()

        def reduced(one: torch.Tensor) -> torch.Tensor:
            one = one.clone()
            if group is not None and reduction != "none":
                shapes = _shapes(one, group, device=self.device)
                if len(set(shapes)) > 1:
                    raise InputError(
                        "accelerator.reduce: the tensors of the data-parallel ranks have the"
                        f" shapes {_listed(shapes)}; reduce tensors of one shape, such as a sum and"
                        " a count, or use accelerator.gather, whose rows may differ in number"
                    )
                dist.all_reduce(one, group=group)
                if reduction == "mean":
                    one = one / group.size()
            return one

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Tensors filled up with `pad_index` to the longest of all data-parallel ranks.
        Collective.
        """
        group = self._group()

        def padded(one: torch.Tensor) -> torch.Tensor:
            if group is None or dim >= one.ndim:
                return one
            longest = torch.tensor(one.shape[dim], device=self.device)
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
            missing = int(longest) - one.shape[dim]
            if not missing:
                return one
            fill = one.new_full((*one.shape[:dim], missing, *one.shape[dim + 1 :]), pad_index)
            return torch.cat((fill, one) if pad_first else (one, fill), dim)

        return recursively_apply(padded, tensor, error_on_other_type=True)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all data-parallel ranks, see `gather`. Collective."""
        group = self._group()
        tensor = (tensor[None] if tensor.ndim == 0 else tensor).detach()
        if group is None:
            return tensor

        shapes = _shapes(tensor, group, device=self.device)
        if len({shape[1:] for shape in shapes}) > 1:
            raise InputError(
                "accelerator.gather: the tensors of the data-parallel ranks have the shapes"
                f" {_listed(shapes)}, and only their first dimension may differ; call"
                " accelerator.pad_across_processes(tensor, dim=1) before, with each dimension that"
                " differs"
            )
        rows = [shape[0] for shape in shapes]
        missing = max(rows) - len(tensor)
        # Gathered logits are large, so they are copied only to be filled up.
        filled = (
            torch.cat((tensor, tensor.new_zeros((missing, *tensor.shape[1:]))))
            if missing
            else tensor.contiguous()
        )
        parts = [torch.empty_like(filled) for _ in rows]
        dist.all_gather(parts, filled, group=group)
        return torch.cat(
            [part[:count] for part, count in zip(parts, rows, strict=True)][: self.present]
        )

    def gather_first(self, data: Any, count: int) -> Any:
        """Gather the first `count` rows of each rank's tensors. `count` may differ. Collective."""
        return recursively_apply(
            lambda tensor: self._gathered(tensor[:count]), data, error_on_other_type=True
        )


_MOST_DIMENSIONS = 16
"""Dimensions that a gathered tensor may have."""


def _shapes(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, device: torch.device
) -> list[tuple[int, ...]]:
    """Return the shape of each rank's tensor. Collective."""
    mine = torch.full((_MOST_DIMENSIONS,), -1)
    mine[: tensor.ndim] = torch.tensor(tensor.shape)
    mine = mine.to(device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return [tuple(size for size in sizes.tolist() if size >= 0) for sizes in everyone]


def _listed(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes[:4]) + (
        ", ..." if len(shapes) > 4 else ""
    )
