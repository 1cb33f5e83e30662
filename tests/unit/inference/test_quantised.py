"""The format, products with quantised weights, and models of them: in memory, and streamed."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from plait.errors import InputError
from plait.inference import layer_files
from plait.inference.generate import generate
from plait.inference.layer_files import scratch_folder
from plait.inference.load import load_model
from plait.inference.quantised import convert, layers_to_quantise, product_bytes, quantised_copy, sizes_of
from plait.inference.quantised_format import GROUP, INT4, INT8, dequantise, quantise
from plait.inference.quantised_products import FEW_ROWS, product
from plait.inference.source import open_source
from plait.inference.streamed import Streaming, load_streamed
from tests.unit.inference.models import built, saved

PROMPTS = [[5, 17, 33, 2, 90], [8, 3]]


def weight(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_int8_is_within_half_a_step_of_its_channel() -> None:
    w = weight(24, 64) * torch.logspace(-3, 3, 24).unsqueeze(1)
    w[3] = 0
    codes, scales = quantise(w, INT8)
    assert codes.dtype == torch.int8 and codes.shape == w.shape and scales.shape == (24,)
    assert ((dequantise(codes, scales, torch.float32) - w).abs() <= scales.unsqueeze(1) * 0.5001).all()
    assert codes.abs().amax(1).tolist() == [127] * 3 + [0] + [127] * 20
    again, _ = quantise(dequantise(codes, scales, torch.float32), INT8)
    assert torch.equal(again, codes)


def test_int4_is_within_a_step_of_its_group_and_packed_as_described() -> None:
    w = weight(6, 2 * GROUP) * torch.logspace(-3, 3, 6).unsqueeze(1)
    w[2, :GROUP] = 0
    codes, scales = quantise(w, INT4)
    assert codes.dtype == torch.uint8 and codes.shape == (6, GROUP) and scales.shape == (6, 2) and scales.dtype == torch.bfloat16
    step = scales.float().abs().repeat_interleave(GROUP, dim=1)
    dense = dequantise(codes, scales, torch.float32)
    error = (dense - w).abs() / torch.where(step > 0, step, 1)
    assert error.max() <= 1.02 and (error <= 0.51).float().mean() > 0.95  # a value as large as the largest, of the other sign, is cut
    assert not dense[2, :GROUP].any()
    for row, group, index in ((0, 0, 0), (4, 1, 15), (4, 1, 16), (5, 0, 31)):
        byte = int(codes[row, index])  # half of a row of 64 is a group
        code = byte & 15 if group == 0 else byte >> 4
        assert (code - 8) * float(scales[row, group]) == dense[row, group * GROUP + index]


@pytest.mark.parametrize("form", [INT8, INT4])
def test_bytes_of_a_large_layer(form: str) -> None:
    codes, scales = quantise(weight(8, 1024), form)
    share = (codes.numel() + scales.numel() * scales.element_size()) / (4 * 8 * 1024)
    assert share <= {INT8: 0.27, INT4: 0.15}[form]


@pytest.mark.parametrize("form", [INT8, INT4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_dense_weight(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.inference.quantised_products.PART", 64 * 4 * 7)  # several parts
    codes, scales = quantise(weight(40, 64), form)
    dense, bias = dequantise(codes, scales, torch.float64), weight(40, seed=2).to(dtype)
    for shape in ((1, 64), (2, 3, 64), (16, 64), (40, 64), (1, 1, 64), (0, 64)):
        x = weight(*shape, seed=1).to(dtype)
        for added in (bias, None):
            expected = x.double() @ dense.t() + (0 if added is None else added.double())
            found = product(x, codes, scales, added)
            assert found.dtype == dtype and found.shape == expected.shape
            torch.testing.assert_close(
                found.double(), expected, **({"rtol": 0.02, "atol": 0.15} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-4})
            )


@pytest.mark.parametrize("form", [INT8, INT4])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("inputs", [96, 192])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_codes_may_leave_the_range_of_float16(form: str, rows: int, inputs: int, dtype: torch.dtype) -> None:
    """As the outliers of some models' activations make them: the sums that scales belong to are a thousand times the result."""
    codes, scales = quantise(weight(40, inputs).abs() * 0.02, form)
    x = (weight(inputs, rows, seed=1).abs() * 100).to(dtype).t()  # not contiguous
    expected = x.double() @ dequantise(codes, scales, torch.float64).t()
    if form == INT8:
        assert (x.double() @ codes.double().t()).max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(product(x, codes, scales, None).double(), expected, rtol=0.02, atol=0.0)


@pytest.mark.parametrize("form", [INT8, INT4])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("size", [1e-3, 1e-5, 1e-6])
def test_small_weights_in_float16(form: str, rows: int, size: float) -> None:
    """Their scales are below its normal numbers. A prompt's many rows and its tokens' few see the same weights."""
    codes, scales = quantise(weight(40, 64) * size, form)
    x = (weight(rows, 64, seed=1) * 100).half()
    expected = x.double() @ dequantise(codes, scales, torch.float64).t()
    found, largest = product(x, codes, scales, None).double(), expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=2**-10, atol=largest * 2**-11)
    exact = dequantise(codes, scales, torch.float64)
    assert torch.equal(dequantise(codes, scales, torch.float16), exact.float().half())


def test_threads_have_memory_of_their_own_for_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.inference.quantised_products.PART", 64 * 4 * 7)
    layers = [quantise(weight(256, 64, seed=seed), form) for seed, form in enumerate([INT8, INT4] * 2)]
    x = weight(3, 64)
    alone = [product(x, *layer, None) for layer in layers]
    with ThreadPoolExecutor(len(layers)) as pool:
        for _ in range(20):
            assert all(map(torch.equal, alone, pool.map(lambda layer: product(x, *layer, None), layers)))


@pytest.mark.parametrize("form", [INT8, INT4])
def test_memory_of_a_product(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dense weight of the largest layer, or what all threads make of it at once, and a quarter for unpacked codes."""
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(64, 96), nn.Linear(128, 32)])
    convert(model, ["0", "1"], form)
    assert product_bytes(model, torch.float32, tokens=9) == 96 * 64 * 4 * 5 // 4
    assert product_bytes(model, torch.bfloat16, tokens=9) == 96 * 64 * 2 * 5 // 4
    assert product_bytes(model, torch.float16, tokens=9) == 96 * 64 * 4 * 5 // 4 + 9 * 160 * 4
    monkeypatch.setattr("plait.inference.quantised_products.PART", 1024)
    assert product_bytes(model, torch.float32, tokens=9) == 1024 * min(torch.get_num_threads(), 8) * 5 // 4
    assert product_bytes(nn.Linear(4, 4), torch.float32, tokens=9) == product_bytes(nn.Linear(4, 4), torch.float16, tokens=9) == 0


def dense_twin(model: nn.Module, form: str) -> nn.Module:
    """A model with the weights that codes and scales mean."""
    twin = copy.deepcopy(model)
    for name in layers_to_quantise(twin):
        module = twin.get_submodule(name)
        transposed = type(module).__name__ == "Conv1D"
        held = module.weight.data.t() if transposed else module.weight.data
        dense = dequantise(*quantise(held, form), torch.float32)
        module.weight.data.copy_(dense.t() if transposed else dense)
    return twin


@pytest.mark.parametrize("form", [INT8, INT4])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_in_memory_and_streamed(form: str, kind: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "model", kind)
    twin = dense_twin(model, form)
    source = open_source(tmp_path / "model")
    kept = load_model(source, quant=form)
    kept.model.eval()
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        torch.testing.assert_close(kept.model(ids).logits, twin(ids).logits, rtol=1e-4, atol=1e-3)
        assert (kept.model(ids).logits - model(ids).logits).abs().max() > 1e-3
    assert not any(name.endswith(".weight") and "layers" in name and "proj" in name for name, _ in kept.model.named_parameters())
    made = [one.token_ids for one in generate(kept, PROMPTS, max_new_tokens=6)]
    counted = quantised_copy(source.model(), form)
    total = sum(p.numel() * p.element_size() for p in counted.parameters())
    assert total == sum(p.numel() * p.element_size() for p in kept.model.parameters())
    assert str(sizes_of(source.model(), counted)).startswith("quantised layers take ")
    kept.close()
    streamed, planned = load_streamed(source, budget_bytes=total - 1, other_bytes=0, quant=form, scratch=tmp_path)
    (stream,) = [hook.stream for hook in streamed.hooks.all if isinstance(hook, Streaming)]
    assert planned.streamed and planned.streamed_bytes < 0.3 * 4 * sum(p.numel() for p in model.parameters())
    assert [one.token_ids for one in generate(streamed, PROMPTS, max_new_tokens=6)] == made
    assert stream.bytes_read and [path.name for path in tmp_path.iterdir()] == ["model"]
    streamed.close()


def test_what_cannot_be_quantised() -> None:
    with pytest.raises(InputError, match="--quant: Sequential has no linear layers in repeated blocks"):
        layers_to_quantise(nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4)))
    with torch.device("meta"):
        model = built(head_dim=12)
    with pytest.raises(
        InputError, match=r"--quant int4: model.layers.0.self_attn.o_proj has 48 inputs, and groups are of 32; use --quant int8"
    ):
        convert(model, layers_to_quantise(model), INT4)


def test_where_streamed_layers_may_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with scratch_folder(tmp_path, 10) as made:
        assert made.parent == tmp_path and list(tmp_path.iterdir()) == [made]
    assert not list(tmp_path.iterdir())
    (tmp_path / "plait-layers-killed").mkdir()  # its process was killed while it wrote
    (tmp_path / "plait-layers-killed" / "0.safetensors").write_bytes(b"left")
    (tmp_path / "mine").mkdir()
    with scratch_folder(tmp_path, 10) as one, scratch_folder(tmp_path, 10) as other:
        assert sorted(tmp_path.iterdir()) == sorted([one, other, tmp_path / "mine"])
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nmemory {tmp_path} tmpfs rw 0 0\n")
    for folder, size, words in (
        (tmp_path / "no", 1, "No such file"),
        (tmp_path, 1 << 60, r"are free, and the layers that are streamed take .* name a folder with more room"),
    ):
        with pytest.raises(InputError, match=words), scratch_folder(folder, size):
            pass
    monkeypatch.setattr(layer_files, "_MOUNTS", mounts)
    with pytest.raises(InputError, match=r"its files are in memory \(tmpfs\)"), scratch_folder(tmp_path, 1):
        pass
