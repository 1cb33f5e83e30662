"""Mesh dimensions for which data parallelism requests the groups of each machine."""

import pytest

from plait.cluster.layout import Layout
from plait.parallel.accounting.compression_scheme import Scheme
from plait.parallel.technique import TechniqueContext
from plait.parallel.techniques.data_collectives import Compression
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.offload import OptimizerOffload, ParameterOffload

REPLICAS = Layout(dp_replicate=4)
SHARDS = Layout(dp_replicate=2, dp_shard=2)
INT8 = Scheme(gradient_bits=8)
FILES = {"device": "nvme", "path": "folder"}


@pytest.mark.parametrize(
    ("layout", "techniques", "expected"),
    [
        (REPLICAS, (), ("dp_replicate",)),
        (Layout(tp=4), (), ()),
        (SHARDS, (), ()),
        (SHARDS, (Compression(scheme=INT8),), ("dp_shard",)),
        (SHARDS, (Compression(candidates=(INT8,)),), ("dp_shard",)),
        (REPLICAS, (Compression(scheme=INT8),), ()),
        (REPLICAS, (DataParallel(all_reduce="ring"),), ()),
        (REPLICAS, (Precision(compute="bfloat16"),), ()),
        (REPLICAS, (OptimizerOffload(device="cpu"),), ()),
        (REPLICAS, (ParameterOffload(**FILES),), ()),
        # Parameters are updated in place and not sharded, so their gradients are in buckets.
        (
            REPLICAS,
            (OptimizerOffload(**FILES), ParameterOffload(**FILES, with_states=True)),
            ("dp_replicate",),
        ),
    ],
)
def test_levels(layout, techniques, expected):
    context = TechniqueContext(layout, techniques)
    assert context.technique(DataParallel).groups(context).levels == expected
