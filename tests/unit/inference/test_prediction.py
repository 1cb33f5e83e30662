"""Times of a pass to times of a generation, and what limits it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from plait.inference.beside import measure_beside
from plait.inference.copy_rates import as_streamed, into, measure_files, measure_handover
from plait.inference.deployment import Account, Deployment
from plait.inference.pass_times import PassTimes, _at, _Times, lengths_of, measure_passes
from plait.inference.prediction import Batches, Beside, CopyRates, in_batches, predict
from plait.inference.quantised import quantised_copy
from plait.inference.reading import FileReader
from plait.inference.source import open_source
from plait.inference.stored import Stored, stored_tensors
from plait.inference.streamed import tensors_of
from tests.unit.inference.models import built, saved

PASSES = PassTimes(first=2.0, token=0.1, layers=0.08, source="")


def of(**kept: int) -> Deployment:
    return Deployment("", account=Account(10**9, 10**6, 0, **kept))


def test_what_takes_longest_is_the_limit() -> None:
    found = predict(of(), PASSES, CopyRates(), requests=4, new=11)
    assert (found.first_seconds, found.token_seconds, found.limit, found.first_limit) == (2.0, 0.1, "computation", "computation")
    assert found.tokens_per_second == pytest.approx(40) and found.tokens_per_second_in_all == pytest.approx(44 / 3)
    found = predict(of(in_files=10**9), PASSES, CopyRates(files=2e9), requests=4, new=11)
    assert found.token_seconds == 0.5 and found.first_limit == "computation"
    assert found.limit == "reading 953.7 MiB of weights from files at 2.00 GB/s"
    found = predict(of(in_files=10**8), PASSES, CopyRates(files=2e9, beside=(Beside(), Beside(1.5, 1.5))), requests=1, new=1)
    assert (found.first_seconds, found.first_limit) == (2.0, "computation")
    assert (
        found.token_seconds == pytest.approx(0.075 + 0.1 * (1 - 0.075 / 0.15))
        and found.limit == "computation (reading takes cores and memory from computing)"
    )
    found = predict(of(in_files=10**8, streamed_layers=20), PASSES, CopyRates(files=2e9, handover=0.001), requests=1, new=1)
    assert (found.first_seconds, found.token_seconds) == (2.02, pytest.approx(0.12))
    found = predict(of(cache_copied=10**8), PASSES, CopyRates(host=2e9), requests=1, new=1)
    assert found.token_seconds == pytest.approx(0.15) and found.limit == "computation, and keys and values back to the host"
    found = predict(of(in_files=10**8, on_host=9 * 10**8), PASSES, CopyRates(files=1e9, host=2e9), requests=1, new=1)
    assert found.token_seconds == 0.5 and found.limit == "copying 953.7 MiB of weights to the GPU at 2.0 GB/s"


def test_batches_run_one_after_another() -> None:
    found = predict(of(), PASSES, CopyRates(), requests=4, new=11)
    assert in_batches(found, requests=4, at_once=4, new=11) == Batches(1, 2.0, pytest.approx(3), pytest.approx(44 / 3))
    assert in_batches(found, requests=9, at_once=4, new=11) == Batches(3, pytest.approx(8), pytest.approx(9), pytest.approx(11))


def test_lengths_that_are_measured_and_what_follows_from_them() -> None:
    model = built(layers=2)
    assert lengths_of(model, 2, 2, prompt=30, new=8, requests=1) == [30]
    assert lengths_of(model, 2, 2, prompt=30, new=70, requests=1) == [30, 90]
    most = int(1.5e11 / 2 / sum(p.numel() for p in model.parameters()))
    assert lengths_of(model, 2, 2, prompt=most + 1, new=70, requests=1) == [most // 2, most]
    times = [_Times(2 * 10 + 3 * 100, 5 + 10), _Times(2 * 20 + 3 * 400, 5 + 20)]
    first, token = _at([10, 20], times, prompt=40, new=8)
    assert first == pytest.approx(2 * 40 + 3 * 1600) and token == pytest.approx(5 + 44)
    assert _Times(3, 5).beyond(_Times(1, 1), 2) == _Times(7, 13)
    assert _at([10], times[:1], prompt=10, new=8) == (320, 15)


def test_a_layer_is_the_difference_of_two_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = built(layers=8)
    each = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    monkeypatch.setattr("plait.inference.pass_times.SAMPLE_BYTES", 3 * each)
    monkeypatch.setattr("plait.inference.pass_times._measured", lambda model, blocks, count, *_, **__: [_Times(3 + 2 * count, 1 + count)])
    found = measure_passes(model, prompt=9, new=4, requests=2, quant=None, memory_bytes=1 << 30)
    assert (found.first, found.token, found.layers) == (3 + 16, 1 + 8, 8)


def test_a_few_layers_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = built(layers=8)
    each = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
    monkeypatch.setattr("plait.inference.pass_times.SAMPLE_BYTES", 3 * each)
    for quant in (None, "int8"):
        found = measure_passes(model, prompt=9, new=4, requests=2, quant=quant, memory_bytes=1 << 30)
        assert 0 <= found.layers <= found.token and found.first > 0
        assert found.source.startswith("measured here on 1 and 3 of the 8 layers with random weights, 2 prompts of 9 tokens")
    assert all(p.is_meta for p in model.parameters()) and len(model.model.layers) == 8
    assert all(p.is_meta for p in quantised_copy(model, "int8").parameters())


def test_the_rate_of_files(tmp_path: Path) -> None:
    saved(tmp_path / "model", layers=1)
    source = open_source(tmp_path / "model")
    tensors = list(tensors_of(source, source.model()).values())
    rate, how = measure_files(tensors, total=1, places=1, straight=True)
    assert rate > 0 and how == "0 MiB read here, as the kernel has the files in its cache now"
    for straight in (False, True):
        assert measure_files(tensors, total=1 << 60, places=1 << 20, straight=straight)[1].endswith("from the disk")


@pytest.mark.parametrize("straight", [False, True])
def test_files_are_read_as_streamed_layers_are(straight: bool, tmp_path: Path) -> None:
    """Straight to where they compute, or through buffers: every byte once, in turns to memory of two layers."""
    drawn = torch.Generator().manual_seed(0)
    sizes = (3 << 20, 5, 3 << 20, (9 << 20) + 1, 4096)
    for file in ("first", "second"):
        save_file({str(at): torch.randint(256, (size,), generator=drawn).byte() for at, size in enumerate(sizes)}, tmp_path / file)
    tensors = [one for file in ("second", "first") for one in stored_tensors(tmp_path / file).values()]
    reads = as_streamed(tensors, 4 << 20, straight=straight)
    assert sum(part.memory.numel() for parts, _ in reads for part in parts) == 2 * sum(sizes)
    reader = FileReader({tmp_path / "first", tmp_path / "second"}, largest=1 << 30, keeps=False)
    for parts, image in reads:
        assert (image is not None) == straight and len({part.stored.path for part in parts}) == 1
        reader.read(parts, image)
        for part in parts:
            assert part.memory.numpy().tobytes() == part.stored.path.read_bytes()[part.offset : part.end]
            assert image is None or part.memory.data_ptr() - image.memory.data_ptr() == part.offset - image.low
    assert len({parts[0].memory.data_ptr() >> 21 for parts, _ in reads}) == 2 and len(reads) > 4
    reader.close()


def test_reads_go_to_as_much_memory_as_streamed_layers_have() -> None:
    """Each to memory of its own, as long as there is some."""
    tensors = [Stored(Path("weights"), 100 * number, 100, torch.uint8, (100,)) for number in range(5)]
    for places, starts in ((1, [0] * 5), (250, [0, 100, 0, 100, 0]), (500, [0, 100, 200, 300, 400])):
        parts = into(tensors, places)
        assert [part.memory.data_ptr() - parts[0].memory.data_ptr() for part in parts] == starts
        assert all(part.memory.numel() == 100 and part.stored is one for part, one in zip(parts, tensors, strict=True))


def test_what_a_streamed_layer_costs_besides() -> None:
    few, many = measure_handover(1), measure_handover(30)
    assert 0 < few < many < 0.05


def test_of_two_that_slow_each_other_down_the_longer_goes_on_alone() -> None:
    assert Beside().seconds(3, 2) == 3 and Beside().seconds(2, 3) == 3 and Beside(2, 2).seconds(0, 3) == 3
    assert Beside(2, 1).seconds(3, 2) == pytest.approx(2 + 3 * (1 - 2 / 6))  # reading ends after 2, when a third is computed
    assert Beside(2, 2).seconds(1, 1) == 2  # as one after the other
    assert Beside(1, 4).seconds(1, 1) == pytest.approx(1 + 3 / 4)


def test_what_reading_and_computing_take_from_each_other(tmp_path: Path) -> None:
    saved(tmp_path / "model", layers=2)
    source = open_source(tmp_path / "model")
    tensors = list(tensors_of(source, source.model()).values())
    found = measure_beside(source.model(), tensors, places=1 << 20, prompt=9, new=4, requests=2, quant=None, memory_bytes=1 << 30)
    for one in found:
        assert one.computing >= 1 and one.reading >= 1
        assert one.seconds(1, 1) > 1  # they need the same cores
