"""Accelerate's Accelerator with the data-parallel ranks of a layout as its processes.

Accelerate counts processes and gathers from all of them. That is correct if every process has a
batch of its own, and wrong under tensor and pipeline parallelism, where several processes share a
batch. The Accelerator of this module therefore tells the Trainer that the data-parallel ranks are
the processes.

`EngineOptimizerProxy` is the optimizer that LR schedulers and callbacks see. Its `step` steps the
engine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.state import PartialState, is_initialized
from accelerate.utils import recursively_apply
from torch.utils.data import DataLoader, IterableDataset

from plait.attributes import override_attributes
from plait.cluster import accelerator as device_kind
from plait.cluster.layout import SAMPLE_AXES, Layout
from plait.cluster.mesh import join, local_device
from plait.cluster.small_messages import all_gather_objects, max_over_ranks
from plait.cluster.topology import place
from plait.config.resolving.resolve import Resolved
from plait.data.split_rows import StreamPart, compare_stream, split_sampler
from plait.engine.engine import Engine, OptimizerProxy
from plait.engine.weights import full_weights
from plait.errors import InputError
from plait.hf.batches import OwnRounds, Rounds
from plait.model.adapters import adapter_names
from plait.sharded.model import owner_of
from plait.sharded.parallel_model import ParallelModel, parallelize

FULL_WEIGHTS = (
    "accelerator.get_state_dict(model) on every process, and save the result in one"
    " (save_pretrained(folder, state_dict=...) takes it)"
)
"""Remedy of messages: the call that returns full weights."""
_LOADER_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
)
_WORKER_SETTINGS = ("prefetch_factor", "persistent_workers")


def rejoin(backend: str | None, *, timeout: timedelta) -> None:
    """Create the default process group again if an earlier Accelerator destroyed it. Collective.

    Accelerate would reuse the destroyed group's keys in the launcher's store. A rank that reads an
    old key before another rank has replaced it connects to an address that no longer answers.

    Args:
        backend: Requested backend. None: the default backend of the devices.
        timeout: Timeout of collectives.
    """
    if dist.is_initialized() or not is_initialized() or PartialState().num_processes == 1:
        return
    if backend in (None, device_kind.backend(local_device(place()), host_tensors=False)):
        join(timeout=timeout)


class RanksAccelerator(accelerate.Accelerator):
    """Accelerate's Accelerator whose processes are the data-parallel ranks of a layout.

    `adopt` converts the Accelerator of a Trainer to this class.

    Attributes:
        layout: Layout of the ranks.
        engine: Engine of the model that is trained. None until the model is sharded.
        own_rank: Global rank of this process.
        seed: Seed of the order of the samples.
        evaluates: Whether the next data loader is for an evaluation.
        present: Number of data-parallel ranks, counted from index 0, that have a batch of their
            own. The remaining ranks repeat the batch of another rank, and their results are
            ignored. None: all ranks have a batch of their own.
        references: Models that are not trained and only run forwards, such as a reference model.
        resolved: Resolved configuration.
        backward_of: Function that runs the backward of a loss in the engine.
        evaluates_alone: True inside `alone`, where each rank evaluates only its own batch.
    """

    layout: Layout
    engine: Engine | None = None
    own_rank: int
    seed: int
    evaluates: bool = False
    present: int | None = None
    references: list[ParallelModel]
    resolved: Resolved
    backward_of: Callable[[torch.Tensor], None]
    evaluates_alone: bool = False
    _gathers: bool = True
    """False inside `own_counts`, where `gather` returns this rank's tensor."""
    _sharding_call = "train() or evaluate() of the Trainer"
    """Name in messages of the call that shards the model."""

    @classmethod
    def adopt(
        cls, accelerator: accelerate.Accelerator, resolved: Resolved, *, rank: int, seed: int
    ) -> RanksAccelerator:
        """Convert an accelerator in place, and return it.

        Args:
            accelerator: The Trainer's accelerator.
            resolved: The configuration, whose data-parallel ranks become the processes.
            rank: Global rank of this process.
            seed: Seed of the order of the samples.
        """
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator.resolved = resolved
        accelerator.layout = resolved.layout
        accelerator.own_rank = rank
        accelerator.seed = seed
        accelerator.references = []
        return accelerator

    @property
    def num_processes(self) -> int:
        """Number of data-parallel ranks. It is 1 inside `alone`."""
        return 1 if self.evaluates_alone else self.layout.dp

    @property
    def process_index(self) -> int:
        """Index of the slice of the batch that this process reads."""
        return self.layout.dp_index(self.own_rank)

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which each rank computes results for its own batch only."""
        return override_attributes(self, evaluates_alone=True)

    def counting(self, *, present: int | None) -> AbstractContextManager[None]:
        """Return a context in which `gather` omits ranks without a batch of their own.

        Args:
            present: Number of data-parallel ranks, counted from index 0, that have a batch of their
                own. None: all of them.
        """
        return override_attributes(self, present=present)

    def own_counts(self) -> AbstractContextManager[None]:
        """Return a context in which `gather` returns only this rank's tensor."""
        return override_attributes(self, _gathers=False)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a data loader that yields this rank's batches and moves them to the device."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if data_loader.batch_sampler is None:
            raise InputError(
                "a DataLoader with batch_size=None has no batches to share between ranks; give it a"
                " batch_size"
            )
        settings = self._loader_settings(data_loader)
        if isinstance(data_loader.dataset, IterableDataset):
            rank_loader = self._stream_loader(data_loader, settings)
        else:
            rank_loader = self._sampled_loader(data_loader, settings)

        if device_placement is None:
            device_placement = self.device_placement
        # The loader has only this rank's batches already, so Accelerate must not split it again.
        prepared = prepare_data_loader(
            rank_loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=device_placement,
            dispatch_batches=False,
            non_blocking=self.non_blocking,
            **self._order(),
        )
        self._dataloaders.append(prepared)
        return prepared

    def _loader_settings(self, data_loader: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {name: getattr(data_loader, name) for name in _LOADER_SETTINGS}
        if data_loader.num_workers:
            settings |= {name: getattr(data_loader, name) for name in _WORKER_SETTINGS}
        settings["in_order"] = getattr(data_loader, "in_order", True)
        # Transformers seeds workers by their rank. Ranks that share a batch need equal workers.
        seed_worker = settings["worker_init_fn"]
        if isinstance(seed_worker, partial) and "rank" in seed_worker.keywords:
            keywords = {**seed_worker.keywords, "rank": self.process_index}
            settings["worker_init_fn"] = partial(seed_worker.func, *seed_worker.args, **keywords)
        return settings

    def _stream_loader(self, data_loader: Any, settings: dict[str, Any]) -> DataLoader[Any]:
        dataset = data_loader.dataset
        ranks = self.layout.dp
        if self.evaluates and ranks > 1:
            # Of several workers, only the one that reads the last round would know which ranks have
            # a batch in it.
            settings |= {"num_workers": 0, "multiprocessing_context": None}
            for name in _WORKER_SETTINGS:
                settings.pop(name, None)
        comparison_device = compare_stream(
            dataset,
            device=self.device,
            workers=settings["num_workers"],
            context=settings["multiprocessing_context"],
        )
        size = data_loader.batch_size
        drop_last = bool(data_loader.drop_last)
        stream = StreamPart(
            dataset,
            batch_size=size,
            ranks=ranks,
            index=self.process_index,
            drop_last=drop_last,
            device=comparison_device,
        )
        return DataLoader(stream, batch_size=size, drop_last=drop_last, **settings)

    def _sampled_loader(self, data_loader: Any, settings: dict[str, Any]) -> DataLoader[Any]:
        batch_sampler = data_loader.batch_sampler
        ranks = self.layout.dp
        index = self.process_index
        drop_last = bool(data_loader.drop_last) or bool(getattr(batch_sampler, "drop_last", False))
        is_split = split_sampler(batch_sampler, ranks=ranks, index=index)
        # A sampler that knows the ranks yields the batches of this rank already.
        rounds_class = OwnRounds if is_split else Rounds
        rounds = rounds_class(
            batch_sampler,
            ranks=ranks,
            index=index,
            drop_last=drop_last,
            device=self.device,
            seed=self._order()["data_seed"],
        )
        return DataLoader(data_loader.dataset, batch_sampler=rounds, **settings)

    def _order(self) -> dict[str, Any]:
        """Return the arguments of Accelerate's `prepare_data_loader` that fix the shuffle order.

        The order depends on the seed and the epoch.
        """
        return {"use_seedable_sampler": True, "data_seed": self.seed}

    def prepare_model(
        self, model: Any, device_placement: Any = None, evaluation_mode: bool = False
    ) -> Any:
        """Shard a model in place, unless it is already sharded, and return it.

        A model for evaluation, such as the reference model of a preference loss, only runs
        forwards. It gets the layout of the trained model.
        """
        if owner_of(model) is not None:
            return model
        if not evaluation_mode:
            return super().prepare_model(
                model, device_placement=device_placement, evaluation_mode=evaluation_mode
            )
        # There is no optimizer whose replicas could be compared.
        faults = self.resolved.faults.model_copy(update={"compare_replicas_every": 0})
        settings = self.resolved.model_copy(update={"faults": faults})
        self.references.append(parallelize(model, settings))
        return model.requires_grad_(False).eval()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward of the current micro-batch of the Trainer.

        Raises:
            InputError: Any argument besides the loss is passed.
        """
        if kwargs:
            raise InputError(
                f"accelerator.backward({next(iter(kwargs))}=...) is not supported, because a"
                " micro-batch has one backward; add up its losses, and call"
                " accelerator.backward(loss) once"
            )
        self.backward_of(loss)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return full weights by name. Collective.

        Args:
            model: The model that is trained.
            unwrap: Accelerate's argument, which changes nothing here.

        Returns:
            Full tensors on the CPU of the first process, and an empty mapping in the other
            processes. If the model has adapters, see `full_weights` for the tensors that are
            included.

        Raises:
            InputError: `model` is not the one that is trained, or it is not sharded yet.
        """
        engine = self.engine
        if engine is None:
            raise InputError(
                "accelerator.get_state_dict: the model is not sharded yet; call"
                f" {self._sharding_call} first"
            )
        if model is not engine.model:
            raise InputError(
                f"accelerator.get_state_dict was given a {type(model).__name__} that is not the"
                " model that is trained; pass the trained model"
            )
        return full_weights(engine, adapters=adapter_names(model))

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Raise InputError, because the norm of a gradient shard is not the global norm."""
        raise InputError(
            "accelerator.clip_grad_norm_: the step clips by max_grad_norm, over all ranks; remove"
            " the call"
        )

    def _group(self) -> dist.ProcessGroup | None:
        """Return the group of the data-parallel ranks, or None if there is only one rank."""
        if self.layout.dp == 1:
            return None
        if self.engine is None:
            raise InputError(
                "the accelerator gathers over the ranks of a layout, whose process groups do not"
                f" exist before the model is sharded; call {self._sharding_call} first"
            )
        return self.engine.mesh.group(*SAMPLE_AXES)

    def gather(self, tensor: Any) -> Any:
        """Return the rows of all data-parallel ranks, one rank after another in dim 0.

        Unlike in Accelerate, ranks may have different numbers of rows. A 0-dimensional tensor
        counts as one row. Collective.

        Raises:
            InputError: The size of a dimension other than dim 0 differs between ranks. Raised on
                all ranks.
        """
        if not self._gathers:
            return tensor
        return recursively_apply(self._gather_rows, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the result of `gather`. With `use_gather_object`, return a list. Collective."""
        group = self._group()
        if not use_gather_object:
            return self.gather(input_data)
        if group is None:
            return input_data
        gathered = all_gather_objects(input_data, group)
        return [entry for rank_data in gathered for entry in rank_data]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean over the data-parallel ranks. Collective.

        Raises:
            InputError: The shapes differ between ranks. Raised on all ranks.
        """
        group = self._group()

        def reduce_tensor(entry: torch.Tensor) -> torch.Tensor:
            entry = entry.clone()
            if group is None or reduction == "none":
                return entry
            # An all-reduce of different shapes would hang or return wrong sums.
            shapes = _shapes(entry, group, device=self.device)
            if len(set(shapes)) > 1:
                raise InputError(
                    "accelerator.reduce: the tensors of the data-parallel ranks have the"
                    f" shapes {_listed(shapes)}; reduce tensors of one shape, such as a sum and"
                    " a count, or use accelerator.gather, whose rows may differ in number"
                )
            dist.all_reduce(entry, group=group)
            return entry / group.size() if reduction == "mean" else entry

        return recursively_apply(reduce_tensor, tensor, error_on_other_type=True)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pad dim `dim` of tensors to its largest size on any data-parallel rank. Collective."""
        group = self._group()

        def pad(entry: torch.Tensor) -> torch.Tensor:
            if group is None or dim >= entry.ndim:
                return entry
            longest = max_over_ranks([entry.shape[dim]], group, device=self.device)[0]
            missing = longest - entry.shape[dim]
            if not missing:
                return entry
            fill_shape = (*entry.shape[:dim], missing, *entry.shape[dim + 1 :])
            fill = entry.new_full(fill_shape, pad_index)
            return torch.cat((fill, entry) if pad_first else (entry, fill), dim)

        return recursively_apply(pad, tensor, error_on_other_type=True)

    def _gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of all data-parallel ranks. See `gather`. Collective."""
        group = self._group()
        tensor = tensor.detach()
        if tensor.ndim == 0:
            tensor = tensor[None]
        if group is None:
            return tensor

        shapes = _shapes(tensor, group, device=self.device)
        if len({shape[1:] for shape in shapes}) > 1:
            raise InputError(
                "accelerator.gather: the tensors of the data-parallel ranks have the shapes"
                f" {_listed(shapes)}, but only their first dimension may differ; first call"
                " accelerator.pad_across_processes(tensor, dim=d) for every other dimension d that"
                " differs"
            )
        rows = [shape[0] for shape in shapes]
        missing = max(rows) - len(tensor)
        # Gathered logits are large, so they are copied only if they have to be padded.
        if missing:
            padded = torch.cat((tensor, tensor.new_zeros((missing, *tensor.shape[1:]))))
        else:
            padded = tensor.contiguous()
        gathered = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(gathered, padded, group=group)
        # Ranks without a batch of their own are the last ones.
        return torch.cat(
            [entry[:count] for entry, count in zip(gathered, rows, strict=True)][: self.present]
        )

    def gather_first(self, data: Any, count: int) -> Any:
        """Gather each rank's first `count` rows. `count` may differ between ranks. Collective."""
        return recursively_apply(
            lambda tensor: self._gather_rows(tensor[:count]), data, error_on_other_type=True
        )


_MAX_DIMENSIONS = 16
"""Largest number of dimensions of a gathered tensor."""


def _shapes(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, device: torch.device
) -> list[tuple[int, ...]]:
    """Return the shape of each rank's tensor. Collective."""
    # Padded with -1, because ranks may have different numbers of dimensions.
    local = torch.full((_MAX_DIMENSIONS,), -1)
    local[: tensor.ndim] = torch.tensor(tensor.shape)
    local = local.to(device)
    gathered = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(gathered, local, group=group)
    return [tuple(size for size in sizes.tolist() if size >= 0) for sizes in gathered]


def _listed(shapes: list[tuple[int, ...]]) -> str:
    text = ", ".join(str(list(shape)) for shape in shapes[:4])
    return f"{text}, ..." if len(shapes) > 4 else text


class EngineOptimizerProxy(OptimizerProxy):
    """Proxy of an engine's optimizer for the Trainer. Its `step` calls `engine.step`.

    `engine.step` reduces and clips the gradients, and updates the parameters.

    Attributes:
        norm: Tensor to which the next `step` writes the norm of the step's gradients.
    """

    _is_accelerate_prepared = True

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.norm = torch.zeros((), dtype=torch.float64)

    def new_norm(self) -> torch.Tensor:
        """Return a tensor that `step` will fill with the gradient norm before clipping.

        It is 0-dimensional, float64, on the CPU.
        """
        self.norm = torch.zeros((), dtype=torch.float64)
        return self.norm

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run the engine's optimizer step, and fill `norm`. Collective."""
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        self.norm.fill_(self.engine.get_global_grad_norm())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing, because `step` drops the gradients."""
