"""Which machines' groups the exchange of gradients asks for, before a mesh exists: those that `apply` looks at, and no others."""

import pytest

from plait.cluster.layout import Layout
from plait.parallel.accounting.compression_scheme import Scheme
from plait.parallel.technique import TechniqueContext
from plait.parallel.techniques.data_collectives import Compression
from plait.parallel.techniques.data_parallel import DataParallel
from plait.parallel.techniques.mixed_precision import Precision
from plait.parallel.techniques.offload import OptimizerOffload, ParameterOffload

REPLICAS, SHARDS = Layout(dp_replicate=4), Layout(dp_replicate=2, dp_shard=2)
INT8 = Compression(scheme=Scheme(gradient_bits=8))


@pytest.mark.parametrize(
    ("layout", "techniques", "expected"),
    [
        (REPLICAS, (), ("dp_replicate",)),
        (Layout(tp=4), (), ()),
        (SHARDS, (), ()),
        (SHARDS, (INT8,), ("dp_shard",)),
        (SHARDS, (Compression(candidates=(Scheme(gradient_bits=8),)),), ("dp_shard",)),
        (REPLICAS, (INT8,), ()),
        (REPLICAS, (DataParallel(all_reduce="ring"),), ()),
        (REPLICAS, (Precision(compute="bfloat16"),), ()),
        (REPLICAS, (OptimizerOffload(device="cpu"),), ()),
        (REPLICAS, (ParameterOffload(device="nvme", path="there"),), ()),
        # States in files leave parameters of one process as they are, and their gradients in buckets.
        (
            REPLICAS,
            (OptimizerOffload(device="nvme", path="there"), ParameterOffload(device="nvme", path="there", with_states=True)),
            ("dp_replicate",),
        ),
    ],
)  # fmt: skip
def test_levels(layout, techniques, expected):
    given = techniques
    context = TechniqueContext(layout, given)
    assert context.technique(DataParallel).groups(context).levels == expected
