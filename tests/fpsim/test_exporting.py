"""Packed checkpoints: read by hand, by the casts of ml_dtypes, and by compressed-tensors where it is installed."""

from __future__ import annotations

import json
import logging
import struct
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import fpsim
from fpsim import Operand, Policy, Products, export, frozen, quantize, round_to

# safetensors: eight bytes with the length of a header in JSON, which has type, shape and place of each tensor
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U8": np.uint8,
    "I64": np.int64,
}
EXACT = (
    "mxfp4",
    "mxfp8_e4m3",
    "mxfp6_e2m3",
    "e2m1fn per 16 e4m3fn",
    "e4m3fn",
    "e4m3fn per tensor fp32",
    "e4m3fn per row fp32",
    "e4m3fn per 32x32 fp32",
    "e4m3fn per 16 fp32",
    "e4m3fn per row ceil",
)


def weights_in(fmt: Any, **options: Any) -> Policy:
    return Policy(products=Products(fprop=(None, fmt)), **options)


def as_loaded(w: torch.Tensor, axis: int) -> torch.Tensor:
    """NVFP4 as the loader gives it, which rounds its numbers to bfloat16."""
    return round_to(round_to(w, "nvfp4", axis=axis), "bf16")


def stored(folder: Path) -> dict[str, np.ndarray]:
    content = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    assert header.pop("__metadata__") == {"format": "pt"}
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        found[name] = np.frombuffer(data[first:last], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def config_of(folder: Path) -> dict[str, Any]:
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def unpacked(packed: np.ndarray) -> np.ndarray:
    """Two numbers of a byte, the low nibble first."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def of_six_bits(packed: np.ndarray) -> np.ndarray:
    """Four numbers in three bytes, the first one in the lowest bits: a string of bits that begins with the lowest."""
    bits = np.unpackbits(packed, axis=-1, bitorder="little").reshape(len(packed), -1, 6)
    codes = (bits << np.arange(6, dtype=np.uint8)).sum(-1).astype(np.uint8)
    return codes.view(ml_dtypes.float6_e2m3fn).astype(np.float32)


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The state that a loader makes of a folder: the arithmetic of compressed-tensors 0.20, in NumPy."""
    tensors, groups = stored(folder), config_of(folder)["quantization_config"]["config_groups"]
    (group,) = groups.values()
    arguments, word = group["weights"], group["format"]
    state = {}
    for name in [n for n in tensors if n.endswith("weight_scale")]:
        module = name.removesuffix("weight_scale")
        scale = tensors.pop(name)
        if word == "nvfp4-pack-quantized":
            each = scale.astype(np.float32) / tensors.pop(f"{module}weight_global_scale")
            elements = unpacked(tensors.pop(f"{module}weight_packed"))
            value = (elements * each.repeat(16, -1)).astype(ml_dtypes.bfloat16)
        elif scale.dtype == np.uint8:
            powers = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32).repeat(32, -1)
            if word == "mxfp8-quantized":
                elements = tensors.pop(f"{module}weight").astype(np.float32)
            else:
                read_packed = of_six_bits if word == "mxfp6-pack-quantized" else unpacked
                elements = read_packed(tensors.pop(f"{module}weight_packed"))
            value = (elements * powers).astype(ml_dtypes.bfloat16)
        else:
            elements = tensors.pop(f"{module}weight").astype(np.float32)
            if arguments["strategy"] == "block":
                rows, columns = arguments["block_structure"]
                each = scale.repeat(rows, 0)[: len(elements)].repeat(columns, 1)[:, : elements.shape[1]]
            else:
                each = scale if arguments["group_size"] is None else scale.repeat(arguments["group_size"], -1)
            value = elements * each
        state[f"{module}weight"] = torch.from_numpy(value.astype(np.float32))
    for name, x in tensors.items():
        if x.dtype == ml_dtypes.bfloat16:
            x = x.astype(np.float32)
        state[name] = torch.from_numpy(x.copy())
    return state


def layers(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(sizes)])


# What a reader finds


@pytest.mark.parametrize("fmt", EXACT)
def test_a_reader_gets_the_emulated_weights_bit_for_bit(fmt: str, tmp_path: Path) -> None:
    model = layers(64, 96, 40)
    rows = export(quantize(model, weights_in(fmt)), tmp_path / "out")
    state = read(tmp_path / "out")
    assert set(state) == set(model.state_dict())
    for name, x in model.state_dict().items():
        expected = round_to(x, fmt) if name.endswith("weight") else x
        assert torch.equal(state[name].view(torch.int32), expected.view(torch.int32)), name
    assert [row["module"] for row in rows] == ["0", "1"]
    assert [row["differs"] for row in rows] == [0, 0]
    assert [row["bytes"] for row in rows] == [
        sum(x.nbytes for name, x in stored(tmp_path / "out").items() if name.startswith(f"{i}.weight")) for i in (0, 1)
    ]


def test_a_reader_gets_nvfp4_rounded_to_bfloat16_and_the_rows_say_so(tmp_path: Path) -> None:
    model = layers(64, 96)
    (row,) = export(quantize(model, weights_in("nvfp4")), tmp_path / "out")
    emulated, read_back = round_to(model[0].weight.detach(), "nvfp4"), read(tmp_path / "out")["0.weight"]
    assert torch.equal(read_back, round_to(emulated, "bf16"))
    differs = emulated != read_back
    assert row["differs"] == int(differs.sum()) > 1000
    relative = ((emulated.double() - read_back.double()) / emulated.double()).abs()[differs]
    assert row["largest"] == float(relative.max()) <= 2.0**-8
    # the codes are the emulation's: of them and the scales, its numbers follow to the bit
    tensors = stored(tmp_path / "out")
    products = unpacked(tensors["0.weight_packed"]) * tensors["0.weight_scale"].astype(np.float32).repeat(16, -1)
    assert np.array_equal(products / tensors["0.weight_global_scale"], emulated.numpy())


@pytest.fixture(scope="module")
def llama() -> tuple[Any, torch.Tensor]:
    transformers = pytest.importorskip("transformers", reason="the extra `test` brings transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    return transformers.LlamaForCausalLM(config).eval(), torch.randint(0, 64, (2, 16))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(ids).logits
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("fmt", ["mxfp4", "e4m3fn per row fp32", "nvfp4"])
def test_a_reader_of_a_llama_computes_the_emulated_logits(fmt: str, llama: Any, tmp_path: Path) -> None:
    model, ids = llama
    emulated = quantize(model, weights_in(fmt, overrides={"lm_head": None}))
    export(emulated, tmp_path / "out")
    loaded = type(model)(model.config).eval()
    loaded.load_state_dict(read(tmp_path / "out"))
    if fmt == "nvfp4":
        emulated = quantize(model, weights_in(as_loaded, overrides={"lm_head": None}))
    with frozen(emulated):
        expected = logits(emulated, ids)
    assert torch.equal(logits(loaded, ids), expected)
    assert not torch.equal(expected, logits(model, ids))
    config = config_of(tmp_path / "out")
    assert (config["model_type"], config["architectures"], config["dtype"]) == (
        "llama",
        ["LlamaForCausalLM"],
        "float32",
    )
    assert config["quantization_config"]["ignore"] == ["lm_head"]


def test_the_configuration_is_that_of_compressed_tensors(tmp_path: Path) -> None:
    export(quantize(layers(64, 32), weights_in("nvfp4")), tmp_path / "out")
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16, "strategy": "tensor_group"}
    weights |= {"dynamic": False, "scale_dtype": "torch.float8_e4m3fn"}  # its preset NVFP4A16
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    expected = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": "nvfp4-pack-quantized"}},
        "ignore": [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    assert config_of(tmp_path / "out") == {"quantization_config": expected}


def test_several_layouts_name_their_modules(tmp_path: Path) -> None:
    policy = weights_in("mxfp4", overrides={"1": weights_in("e4m3fn per tensor fp32"), "2": None})
    export(quantize(layers(64, 64, 64, 32), policy), tmp_path / "out")
    config = config_of(tmp_path / "out")["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert [group["targets"] for group in config["config_groups"].values()] == [["0"], ["1"]]
    assert config["ignore"] == ["2"]


def test_what_is_not_packed_is_as_its_module_uses_it(tmp_path: Path) -> None:
    """The role rounds first, the operand what comes of it; buffers stay, and dtypes of torch have no layout."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 32))
    policy = Policy(
        weight="bf16", products=Products(fprop=(None, "mxfp8_e4m3")), overrides={"2": Policy(weight="fp16")}
    )
    rows = export(quantize(model, policy), tmp_path / "out")
    state = read(tmp_path / "out")
    assert [row["module"] for row in rows] == ["0"]
    assert torch.equal(state["0.weight"], round_to(round_to(model[0].weight.detach(), "bf16"), "mxfp8_e4m3"))
    assert torch.equal(state["0.bias"], round_to(model[0].bias.detach(), "bf16"))
    assert torch.equal(state["2.weight"], round_to(model[2].weight.detach(), "fp16"))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(state[f"1.{name}"], getattr(model[1], name))


def test_the_format_of_a_role_is_packed_too(tmp_path: Path) -> None:
    model = layers(8, 4)
    export(quantize(model, Policy(weight="e4m3fn")), tmp_path / "out")
    assert stored(tmp_path / "out")["0.weight_scale"].tolist() == [1.0]
    assert torch.equal(read(tmp_path / "out")["0.weight"], round_to(model[0].weight.detach(), "e4m3fn"))


def test_an_embedding_that_is_tied_to_a_plain_layer_is_stored_under_both_names(tmp_path: Path) -> None:
    model = layers(32, 32, 32)
    model.append(nn.Embedding(32, 32))
    model[2].weight = model[1].weight  # type: ignore[assignment]
    export(quantize(model, weights_in("mxfp4", overrides={"1": None})), tmp_path / "out")
    state = read(tmp_path / "out")
    assert torch.equal(state["1.weight"], model[1].weight)
    assert torch.equal(state["2.weight"], model[1].weight)


def test_a_recipe_is_exported_without_its_activations(tmp_path: Path) -> None:
    model = layers(64, 64)
    quantised = quantize(model, "mxfp4")
    with pytest.raises(ValueError, match=r"rounds more than weights in its forward pass: x of products in mxfp4"):
        export(quantised, tmp_path / "out")
    export(quantised, tmp_path / "out", weights_only=True)
    assert torch.equal(read(tmp_path / "out")["0.weight"], round_to(model[0].weight.detach(), "mxfp4"))


# What has no place


def tied() -> nn.Module:
    model = layers(32, 32, 32)
    model[1].weight = model[0].weight  # type: ignore[assignment]
    return model


def computed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))


def infinite() -> nn.Module:
    model = layers(32, 32)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.inf
    return model


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "stochastic operand": (layers, weights_in(Operand("mxfp4", "stochastic")), "0.weight is rounded stochastically"),
    "stochastic role": (layers, Policy(weight="e4m3fn", rounding="stochastic"), "0.weight is rounded stochastically"),
    "code book": (layers, weights_in("nf4 per 32 fp32"), "0.weight is in nf4 per 32 fp32: .* no place for a code book"),
    "a format without a name": (layers, weights_in("mxfp8_e5m2"), "for which the layout has no name. Expected: nvfp4"),
    "a number without a name": (layers, Policy(weight="e5m2"), "0.weight is in e5m2, for which the layout has no name"),
    "integers": (layers, weights_in("mxint8"), "for which the layout has no name"),
    "a scale for each row": (layers, weights_in("nvfp4_row"), "for which the layout has no name"),
    "a gain": (layers, weights_in("e2m1fn per 32 at 0.75"), "for which the layout has no name"),
    "delayed": (layers, weights_in("e4m3fn per tensor delayed"), "scale follows from earlier steps"),
    "a function": (layers, weights_in(as_loaded), "rounded by a function, as_loaded"),
    "activations alone": (layers, Policy(activation="bf16"), "rounds more than weights.*: activation=bf16"),
    "nothing": (layers, Policy(), "No weight of Sequential is in a format that is packed"),
    "bf16 alone": (layers, Policy(weight="bf16"), "No weight of Sequential is in a format that is packed"),
    "an output": (
        layers,
        Policy(products=Products(fprop=(None, "mxfp4"), output="bf16")),
        "rounds more than weights.*: output=bf16",
    ),
    "an accumulator": (
        layers,
        Policy(products=Products(fprop=(None, "mxfp4"), accumulator="fp16")),
        "rounds more than weights.*: accumulator=fp16",
    ),
    "a convolution": (lambda *_: nn.Sequential(nn.Conv1d(32, 32, 1)), weights_in("mxfp4"), "0 is a Conv1d in mxfp4"),
    "ragged blocks": (lambda *_: layers(40, 8), weights_in("mxfp4"), r"shape \(8, 40\), whose rows 32 does not divide"),
    "tied": (lambda *_: tied(), weights_in("mxfp4"), "0.weight is quantised, and is also '1.weight'"),
    "computed": (lambda *_: nn.Sequential(computed()), weights_in("mxfp4"), "are computed from others"),
    "infinite": (lambda *_: infinite(), weights_in("mxfp4"), "0.weight holds an infinity or NaN"),
    "linear in float32": (layers, weights_in("mxfp4", float32=("linear",)), "has linear in float32"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_place_is_refused_in_words_and_nothing_is_written(case: str, tmp_path: Path) -> None:
    make, policy, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        export(quantize(make(32, 32), policy), tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_model_that_is_not_quantised_and_a_folder_with_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Sequential is not quantised"):
        export(layers(32, 32), tmp_path / "out")
    model = quantize(layers(32, 32), weights_in("mxfp4"))
    (tmp_path / "note").write_text("mine")
    with pytest.raises(FileExistsError, match=r"exists, and is not an empty folder"):
        export(model, tmp_path)
    with pytest.raises(FileExistsError, match=r"exists, and is not an empty folder"):
        export(model, tmp_path / "note")
    with pytest.raises(TypeError, match=r"folder is 3"):
        export(model, 3)  # type: ignore[arg-type]
    (tmp_path / "empty").mkdir()
    export(model, tmp_path / "empty")
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(FileExistsError):
        export(model, tmp_path / "empty")


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_the_folder_is_whole_or_not_there(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantize(layers(32, 32), weights_in("mxfp4"))

    def half_written(_: object, path: Path, **__: object) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr("safetensors.torch.save_file", half_written)
    with pytest.raises(type(error)):
        export(model, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_without_safetensors_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(
        ImportError, match=r"export\(\) needs safetensors, which is not installed: pip install .*export"
    ):
        export(quantize(layers(32, 32), weights_in("mxfp4")), tmp_path / "out")


def test_a_transform_of_both_operands_is_no_matter_of_the_weight_alone(tmp_path: Path) -> None:
    operand = Operand("mxfp4", hadamard=fpsim.Hadamard(16))
    model = quantize(layers(32, 32), Policy(products=Products(fprop=(operand, operand))))
    with pytest.raises(ValueError, match=r"transformed before it is rounded, by Hadamard 16"):
        export(model, tmp_path / "out", weights_only=True)


# compressed-tensors itself


@pytest.fixture
def loader() -> Iterator[Any]:
    """transformers, which loads by compressed-tensors. The package logs to the root, and sets the level of its own."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    import transformers

    level = logging.getLogger().level
    yield transformers
    logging.getLogger().setLevel(level)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of two packages, about each other
@pytest.mark.parametrize("fmt", [*EXACT, "nvfp4", "mixed"])
def test_the_loader_of_compressed_tensors_gives_the_emulated_logits(
    fmt: str, llama: Any, loader: Any, tmp_path: Path
) -> None:
    model, ids = llama
    policy = weights_in(fmt if fmt != "mixed" else "mxfp4", overrides={"lm_head": None})
    if fmt == "mixed":
        policy = weights_in("e4m3fn per 16 fp32", overrides={"lm_head": None, "model.layers.0": weights_in("e4m3fn")})
    emulated = quantize(model, policy)
    export(emulated, tmp_path / "out")
    # in float32: without it the loader leaves weights of bfloat16 in a model of float32, and its own product fails
    dequantized = {} if fmt == "mixed" else {"quantization_config": loader.CompressedTensorsConfig(dequantize=True)}
    loaded = loader.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, **dequantized).eval()
    if fmt == "nvfp4":
        emulated = quantize(model, weights_in(as_loaded, overrides={"lm_head": None}))
    with frozen(emulated):
        expected = logits(emulated, ids)
    assert torch.equal(logits(loaded, ids), expected)
    for name, x in read(tmp_path / "out").items() if fmt != "mixed" else ():
        assert torch.equal(loaded.state_dict()[name], x), name


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_a_model_of_bfloat16_is_loaded_packed_and_computes(fmt: str, llama: Any, loader: Any, tmp_path: Path) -> None:
    model, ids = llama
    half = type(model)(model.config).bfloat16().eval()
    export(quantize(half, weights_in(fmt, overrides={"lm_head": None})), tmp_path / "out")
    loaded = loader.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert logits(loaded, ids).isfinite().all()  # the first call unpacks the weights
    for name, x in read(tmp_path / "out").items():
        assert torch.equal(loaded.state_dict()[name], x.bfloat16()), name
