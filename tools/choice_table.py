"""Print the table of docs/explanation/communication.md with the all-reduce algorithms that are
selected on clusters of data sheets.

    python -m tools.choice_table [--write]

tests/unit/comm/test_choose.py compares the document with it.
"""

import sys
from pathlib import Path

from benchmarks.common.report import markdown, read, with_section
from plait.comm.choose import Cost, GroupLinks, Level, Link, choose_buckets, describe
from plait.comm.quantise import packed_bytes
from plait.sizes import GIB, KIB, MIB, format_bytes

ROOT = Path(__file__).parents[1]
TOPOLOGIES = ROOT / "tests" / "unit" / "comm" / "topologies.json"
DOCUMENT = ROOT / "docs" / "explanation" / "communication.md"
MARK = "tools/choice_table.py"
ON_A_GPU = 2e-11
"""Seconds per byte to quantise with error feedback: about 30 passes over memory of 1.5 TB/s. It is
not measured."""
GRADIENTS = (64 * KIB, 100 * MIB, 4 * GIB)


def topologies() -> dict[str, GroupLinks]:
    clusters = {}
    for entry in read(TOPOLOGIES):
        sizes = {"machines": entry["machines"], "per_machine": entry["per_machine"]}
        network = entry.get("network") and Link(**entry["network"])
        links = describe("dp_replicate", **sizes, inside=Link(**entry["inside"]), network=network)
        clusters[entry["name"]] = links
    return clusters


def quantised(group: GroupLinks) -> GroupLinks:
    """Return the group with one algorithm: quantised slices to their owners, and the sums back."""
    scatter = group.whole.costs["reduce_scatter"]
    gather = group.whole.costs["all_gather"]
    seconds_per_byte = scatter.seconds_per_byte + gather.seconds_per_byte
    sent = packed_bytes(MIB // 4, 8) / MIB * seconds_per_byte
    cost = Cost(scatter.fixed_seconds + gather.fixed_seconds, sent + ON_A_GPU)
    level = Level(group.ranks, {"all-reduce": cost})
    return GroupLinks(group.axis, group.machines, group.per_machine, level)


def table() -> str:
    rows = []
    for name, group in topologies().items():
        for gradient_bytes in GRADIENTS:
            choice = choose_buckets(gradient_bytes, group)
            int8 = choose_buckets(gradient_bytes, quantised(group))
            one_call = ""
            if choice.algorithm != "all-reduce":
                one_call = _milliseconds(dict(choice.others)["all-reduce"])
            row = [name, format_bytes(gradient_bytes), choice.algorithm]
            row += [format_bytes(choice.bucket_bytes), _milliseconds(choice.seconds), one_call]
            rows.append([*row, _milliseconds(int8.seconds), choice.why])
    header = "cluster, gradients, chosen, bucket, time, one call, int8 would take, why"
    return markdown(header.split(", "), rows)


def _milliseconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def written(text: str) -> str:
    return with_section(text, MARK, table())


if __name__ == "__main__":
    if "--write" in sys.argv:
        DOCUMENT.write_text(written(DOCUMENT.read_text()))
    else:
        print(table())
