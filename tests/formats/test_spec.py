"""KV formats: their names, what goes together, and their bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kveval.errors import KvevalError
from kveval.formats.kivi import ChannelInt
from kveval.formats.parse import parse_format
from kveval.formats.pruning import METHODS, Pruning
from kveval.formats.registry import ALIASES, STORAGES
from kveval.formats.side import Side
from kveval.formats.spec import KVFormat
from kveval.formats.window import Window
from kveval.memory.geometry import Geometry
from kveval.memory.layers import layer_formats
from kveval.memory.predict import stream_bytes, token_bytes

LLAMA_70B = Geometry(("full",) * 80, kv_heads=8, head_dim=128, positions=131_072)
CANONICAL = [
    *STORAGES,
    "fp8,values=int4-g32",
    "kivi4,residual=32",
    "kivi2,values=q8_0",
    "int4-g32,rotate=hadamard",
    "int4-g32,skip_layers=2",
    "kivi4,residual=64,rotate=hadamard,skip_layers=1",
    "window:4k",
    "window:1000,sinks=1",
    "window:4k,store=fp8",
    "window:4k,store=fp8,values=int4-g32,rotate=hadamard",
    "swa:4k",
    "swa:4k,store=nvfp4",
    "snapkv:0.5",
    "tova:0.25,store=int4-g32",
    "knorm:0.3333333333333333",
    "streaming:0.1",
]


@pytest.mark.parametrize("name", CANONICAL)
def test_canonical_names_round_trip(name: str) -> None:
    fmt = parse_format(name)
    assert fmt.name == name
    assert parse_format(fmt.name) == fmt
    assert hash(parse_format(fmt.name)) == hash(fmt)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("FP8", "fp8"),
        ("fp8_e4m3", "fp8"),
        ("int4_per_token_head", "int4-token-head"),
        ("int4-g32,keys=fp8", "fp8,values=int4-g32"),
        ("fp8,values=fp8", "fp8"),
        ("kivi4,residual=128", "kivi4"),
        ("int4-g32,rotate=none,skip_layers=0", "int4-g32"),
        ("int4-g32, skip_layers=2 ,rotate=hadamard", "int4-g32,rotate=hadamard,skip_layers=2"),
        ("window:4096", "window:4k"),
        ("window:4k,sinks=4", "window:4k"),
        ("window:1k,sinks=0", "swa:1k"),
        ("window:4k,store=bf16", "window:4k"),
        ("snapkv:.5", "snapkv:0.5"),
    ],
)
def test_other_ways_to_write_it(text: str, name: str) -> None:
    assert parse_format(text).name == name


def test_aliases_are_names_of_storages_and_shadow_none() -> None:
    assert set(ALIASES.values()) <= set(STORAGES)
    assert not set(ALIASES) & set(STORAGES)
    assert not (set(METHODS) | {"window", "swa"}) & (set(STORAGES) | set(ALIASES))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("fp9", "did you mean fp8"),
        ("", "use one of bf16"),
        ("int4-g33", "did you mean int4-g32"),
        ("fp8:3", "fp8 takes no argument, but ':3'"),
        ("fp8,residual=32", "keeps no newest tokens apart"),
        ("kivi4,residual=0", "blocks of 32 tokens"),
        ("kivi4,residual=40", "32 or a multiple"),
        ("kivi4,residual=x", "residual=x is not a whole number"),
        ("bf16,rotate=hadamard", "rotate=hadamard means nothing where bf16"),
        ("window:4k,skip_layers=2", "add store="),
        ("int4-g32,rotate=fourier", "use rotate=hadamard"),
        ("int4-g32,skip_layers=-1", "skip_layers=-1 is not a whole number"),
        ("int4-g32,rotate=hadamard,rotate=none", "rotate= is given twice"),
        ("int4-g32,sinks=4", "takes keys, residual, rotate, skip_layers, values, not 'sinks'"),
        ("fp8,values=fp9", "'fp9' is not a KV format"),
        ("window:4k,store=kivi4", "tokens cannot leave kivi4"),
        ("snapkv:0.5,store=kivi2", "tokens cannot leave kivi2"),
        ("window", "needs its size"),
        ("swa", "needs its size"),
        ("swa:4k,sinks=2", "not 'sinks'"),
        ("window:4", "at least 5"),
        ("window:4k,sink=2", "not 'sink'"),
        ("window:4k,sinks=-1", "sinks=-1"),
        ("window:4k,sinks", "key=value"),
        ("window:4k,store=fp9", "'fp9' is not a KV format"),
        ("window:lots", "'lots' is not a number of tokens"),
        ("snapkv", "needs the fraction"),
        ("snapkv:half", "needs the fraction"),
        ("snapkv:0", "between 0 and 1"),
        ("snapkv:1", "between 0 and 1"),
        ("snapkv:nan", "between 0 and 1"),
        ("streaming:-0.5", "between 0 and 1"),
    ],
)
def test_bad_names_are_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(KvevalError) as error:
        parse_format(text)
    assert told in str(error.value)


@given(
    st.one_of(
        st.text(max_size=30),
        st.lists(
            st.sampled_from([*CANONICAL, "sinks=2", "store=fp8", "values=q4_0", "residual=64", ":3"]), max_size=4
        ).map(",".join),
    )
)
@settings(max_examples=500)
def test_any_text_is_a_format_or_one_clear_error(text: str) -> None:
    try:
        fmt = parse_format(text)
    except KvevalError as error:
        assert str(error)  # noqa: PT017  # either outcome is right, each with its own claim
    else:
        assert parse_format(fmt.name) == fmt


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("bf16", 327_680),  # case 1: 80 layers x 2 x 8 KV heads x 128 x 2 bytes
        ("fp16", 327_680),
        ("fp8", 163_840),
        ("int4-g32", 102_400),  # case 2: fp16 scale and zero a group of 32, 3.2 x smaller
        ("int4-g32-sym", 92_160),  # case 2: fp16 scale only, 3.556 x smaller
        ("int4-g64", 92_160),
        ("int4-g64-sym", 87_040),
        ("int2-g32", 61_440),
        ("kivi4", 102_400),
        ("kivi2", 61_440),
        ("fp8-token-head", 80 * 8 * 2 * (128 + 4)),
        ("int8-token-head", 80 * 8 * 2 * (128 + 4)),
        ("int4-token-head", 80 * 8 * 136),  # vLLM: 136 bytes for key and value
        ("nvfp4", 80 * 8 * 144),  # vLLM: 144
        ("q8_0", 80 * 8 * 2 * 4 * 34),  # ggml's block sizes
        ("q5_1", 80 * 8 * 2 * 4 * 24),
        ("q4_0", 80 * 8 * 2 * 4 * 18),
        ("fp8,values=int4-g32", 80 * 8 * (128 + 80)),
        ("int4-g32,skip_layers=2", 4 * 4096 + 76 * 1280),
        ("int4-g32,rotate=hadamard", 102_400),
        ("window:4k,store=fp8", 163_840),  # of a token that is kept
        ("snapkv:0.5", 327_680),
    ],
)
def test_bytes_of_a_token(name: str, bytes_per_token: int) -> None:
    assert token_bytes(LLAMA_70B, parse_format(name)) == bytes_per_token


@pytest.mark.parametrize(
    ("name", "tokens", "whole"),
    [
        ("bf16", 131_072, 42_949_672_960),  # case 1: 40 GiB
        ("bf16", 128_000, 41_943_040_000),  # case 3: 39.0625 GiB
        ("int4-g32", 131_072, 131_072 * 102_400),
        ("window:4k", 131_072, 1_342_177_280),  # case 15
        ("swa:4k", 100, 100 * 327_680),
        ("streaming:0.25", 131_072, 10 * 2**30),
        ("snapkv:0.29", 100, 29 * 327_680),
        # keys: 128 of 160 in blocks of 32, 32 wait; values: 32 of 160 encoded, 128 wait
        ("kivi4", 160, 80 * 8 * ((128 * 80 + 32 * 256) + (32 * 80 + 128 * 256))),
        ("kivi4,residual=32", 33, 80 * 8 * ((32 * 80 + 256) + (80 + 32 * 256))),
        ("fp8-tensor", 10, 10 * 163_840 + 80 * 2 * 4),
        ("fp8-head", 10, 10 * 163_840 + 80 * 2 * 8 * 4),
        ("fp8-channel", 10, 10 * 163_840 + 80 * 2 * 8 * 128 * 4),
    ],
)
def test_bytes_of_a_stream(name: str, tokens: int, whole: int) -> None:
    assert stream_bytes(LLAMA_70B, parse_format(name), tokens) == whole


def test_case_15_window_keeps_a_thirty_second() -> None:
    window = parse_format("window:4k").window
    assert window == Window(4096, 4)
    assert window.recent == 4092
    assert window.kept(131_072) / 131_072 == 0.03125


def test_case_5_sliding_layers() -> None:
    """36 layers, 18 sliding over 128 tokens, 8 KV heads, head_dim 64: 4,836,556,800 B at 131,072 tokens."""
    geometry = Geometry(("sliding", "full") * 18, kv_heads=8, head_dim=64, positions=131_072, sliding_window=128)
    assert stream_bytes(geometry, KVFormat(), 131_072) == 4_836_556_800
    windowed = stream_bytes(geometry, parse_format("window:4k"), 131_072)
    assert windowed == 18 * 2048 * (128 + 4096)  # the format's window is for the layers that do not slide
    assert [layer.window.size for layer in layer_formats(geometry, parse_format("swa:1k")) if layer.window] == [
        128,
        1024,
    ] * 18


@pytest.mark.parametrize(
    ("name", "kinds", "told"),
    [
        ("window:64", ("sliding", "full"), "smaller than the model's own sliding window of 128"),
        ("window:1k", ("sliding", "sliding"), "has nothing to do"),
        ("snapkv:0.5", ("sliding", "sliding"), "has nothing to do"),
        ("kivi4", ("sliding", "full"), "tokens cannot leave"),
        ("fp8,skip_layers=1", ("full", "full"), "leaves none of the model's 2"),
    ],
)
def test_what_a_models_layers_do_not_allow(name: str, kinds: tuple, told: str) -> None:
    window = 128 if "sliding" in kinds else None
    with pytest.raises(KvevalError, match=told):
        token_bytes(Geometry(kinds, 2, 64, 4096, window), parse_format(name))


def test_skipped_layers_store_bf16_and_keep_as_many_tokens() -> None:
    layers = [layer.fmt.name for layer in layer_formats(LLAMA_70B, parse_format("snapkv:0.5,store=q4_0,skip_layers=2"))]
    assert layers == ["snapkv:0.5"] * 2 + ["snapkv:0.5,store=q4_0"] * 76 + ["snapkv:0.5"] * 2


@pytest.mark.parametrize("residual", [32, 128])
def test_newest_tokens_wait_as_kivi_lets_them(residual: int) -> None:
    """Keys: all whole residuals are encoded. Values: all but the last residual. Each token reads before it hands over."""
    keys, values = Side(ChannelInt(4), residual), Side(STORAGES["kivi4"].values.codec, residual)
    for tokens in (0, 1, residual - 1, residual, residual + 1, 3 * residual, 1000):
        assert keys.encoded(tokens) == residual * (tokens // residual)
        assert values.encoded(tokens) == max(0, tokens - residual)
        assert keys.read_encoded(tokens) == keys.encoded(tokens)  # the token at position n finds n written before it
    assert Side(STORAGES["fp8"].keys.codec).read_encoded(7) == 8  # its own included


@pytest.mark.parametrize(
    ("fraction", "tokens", "kept"), [(0.5, 131_072, 65_536), (0.29, 100, 29), (0.01, 5, 1), (0.5, 0, 0)]
)
def test_pruning_counts_what_it_keeps(fraction: float, tokens: int, kept: int) -> None:
    assert Pruning("tova", fraction).kept(tokens) == kept
