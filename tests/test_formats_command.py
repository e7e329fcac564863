"""`kveval formats` and named formats: what is said of each is held against bytes that were worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kveval.cli import main
from kveval.errors import KvevalError
from kveval.formats import explain as explaining
from kveval.formats.listing import OPTIONS, SERVERS, listing
from kveval.formats.named import named_format, names, resolve_format
from kveval.formats.parse import WINDOWS, parse_format
from kveval.formats.pruning import METHODS
from kveval.formats.registry import ALIASES, STORAGES
from kveval.formats.served import served_by
from kveval.memory.geometry import Geometry
from kveval.runs.plan import resolve_arms

LLAMA_70B, WORDS = explaining.parse_geometry("80x8x128")


def formats(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["formats", *arguments])


def told(name: str, geometry: str = "80x8x128") -> dict[str, object]:
    shown = formats(name, "--geometry", geometry, "--json")
    assert shown.exit_code == 0, shown.output
    return dict(json.loads(shown.output))


@pytest.mark.parametrize(
    ("name", "token_bytes", "key_bytes", "value_bytes"),
    [
        ("bf16", 327_680, 256, 256),  # shared case 1: 80 x 8 x 2 x 128 x 2
        ("int4-g32", 102_400, 80, 80),  # shared case 2: 64 + 4 groups x 4
        ("int4-g32-sym", 92_160, 72, 72),  # shared case 2, fp16 scale only
        ("fp8", 163_840, 128, 128),
        ("fp8-token-head", 80 * 8 * 264, 132, 132),
        ("nvfp4", 80 * 8 * 144, 72, 72),  # 64 + 128 / 16
        ("q8_0", 80 * 8 * 2 * 4 * 34, 136, 136),  # 34 bytes for 32 numbers
        ("q8_0,values=q4_0", 80 * 8 * (136 + 72), 136, 72),  # 18 bytes for 32 numbers
        ("kivi4", 102_400, 80, 80),
        ("int4-g32,skip_layers=2", 76 * 8 * 160 + 4 * 8 * 512, 80, 80),
        ("int4-g32,rotate=hadamard", 102_400, 80, 80),
        ("window:4k", 327_680, 256, 256),
    ],
)
def test_bytes_of_a_token(name: str, token_bytes: int, key_bytes: int, value_bytes: int) -> None:
    found = told(name)
    assert (found["token_bytes"], found["key_bytes"], found["value_bytes"]) == (token_bytes, key_bytes, value_bytes)
    assert found["bf16_token_bytes"] == 327_680
    assert found["bf16_stream_bytes"] == 42_949_672_960


@pytest.mark.parametrize(
    ("name", "stream_bytes"),
    [
        ("int4-g32", 131_072 * 102_400),
        ("window:4k", 1_342_177_280),  # shared case 15
        ("snapkv:0.5", 65_536 * 327_680),
        ("fp8-channel", 131_072 * 163_840 + 80 * 2 * 8 * 128 * 4),  # a float32 scale a channel, keys and values
        # 131,072 is a multiple of 128: no key waits, and 128 values do, 256 bytes each instead of 80.
        ("kivi4", 131_072 * 102_400 + 80 * 8 * 128 * (256 - 80)),
    ],
)
def test_bytes_of_a_long_stream(name: str, stream_bytes: int) -> None:
    assert told(name)["stream_bytes"] == stream_bytes


def test_the_text_says_what_a_person_asks() -> None:
    text = formats("int4-g32").output
    assert "80 layers x 8 KV heads x head_dim 128 (Llama-3.3-70B)" in text
    assert "102,400 B a token in all layers, 3.200 times fewer than bf16's 327,680" in text
    assert "= 12.500 GiB (bf16: 40.000 GiB)" in text
    assert "80 is refused" in text
    kivi = formats("kivi4,residual=32").output
    assert "(5.00 bits a number, scales included)" in kivi
    assert "keys wait in BF16 until 32 have gathered; the latest 32 values are in BF16" in kivi
    assert "arXiv 2402.02750" in kivi
    assert "655,360 B of scales" in formats("fp8-channel").output  # 80 x 2 x 8 x 128 x 4
    assert "the first and last 2 of 80 layers store BF16" in formats("int4-boundary").output
    assert "the first 4 and the latest 4,092" in formats("streaming-llm-4k").output
    assert "a Hadamard matrix of 128 channels" in " ".join(formats("int4-rotated").output.split())


def test_layers_that_are_skipped_have_no_scales() -> None:
    assert told("fp8-channel,skip_layers=2")["constant_bytes"] == 76 * 2 * 8 * 128 * 4


def test_head_dims_that_are_refused() -> None:
    assert told("fp8")["head_dims_refused"] == {}
    refused = told("fp8,rotate=hadamard")["head_dims_refused"]
    assert isinstance(refused, dict)
    assert set(refused) == {"100", "120"}  # 4 and 8 are the largest powers of two that divide them
    assert "a head_dim of 100" in refused["100"]


def test_a_geometry_that_has_no_name_gets_none() -> None:
    text = formats("fp8", "--geometry", "32x8x128").output
    assert "32 layers x 8 KV heads x head_dim 128\n" in text
    assert "65,536 B a token in all layers, 2.000 times fewer than bf16's 131,072" in text


def test_sliding_layers_are_told() -> None:
    half = Geometry(("sliding", "full") * 18, 8, 64, 131_072, 128)  # shared case 5
    found = explaining.explanation(parse_format("bf16"), half)
    assert found.stream_bytes == 4_836_556_800
    assert "18 of the layers slide over 128 tokens" in found.geometry


def test_the_shape_of_a_model_is_read_from_its_config() -> None:
    shown = formats("fp8", "--model", "probe", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert "(probe)" in found["geometry"]
    assert found["token_bytes"] * 2 == found["bf16_token_bytes"]


@pytest.mark.parametrize("name", [row.name for row in listing()] + names() + [option.example for option in OPTIONS])
def test_everything_in_the_list_is_explained(name: str) -> None:
    shown = formats(name)
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith(f"format     {resolve_format(name).name}\n")
    assert max(map(len, shown.output.splitlines())) <= 100
    assert "\x1b" not in shown.output
    assert "None" not in shown.output


def test_the_list_leaves_nothing_out() -> None:
    listed = {row.name.partition(":")[0] for row in listing()}
    assert listed == {*STORAGES, *WINDOWS, *METHODS}
    text = formats().output
    for name in [*(row.name for row in listing()), *names(), *(option.key for option in OPTIONS)]:
        assert any(line.startswith(f"  {name} ") for line in text.splitlines()), name
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


def test_bits_of_a_number() -> None:
    bits = {row.name: row.bits for row in listing()}
    assert bits["q8_0"] == 34 / 32 * 8
    assert bits["q5_1"] == 24 / 32 * 8
    assert bits["kivi4"] == bits["int4-g32"] == 5.0
    assert bits["nvfp4"] == 4.5
    assert bits["int4-token-head"] == 4.25  # a float32 scale for 128 numbers
    assert [row.group for row in listing() if row.name in ("fp16", "q8_0", "q5_1", "kivi2", "swa:4k")] == [
        "16 bits",
        "8 bits",
        "4 and 5 bits",
        "2 bits",
        "fewer tokens",
    ]


def test_json_of_the_list() -> None:
    data = json.loads(formats("--json").output)
    assert set(data) == {"head_dim", "formats", "options", "named"}
    assert {"name": "vllm-fp8", "format": "fp8", "why": named_format("vllm-fp8").why} in data["named"]
    assert len(data["formats"]) == len(STORAGES) + len(WINDOWS) + len(METHODS)


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("q8_0,values=q4_0", "llama.cpp -ctk q8_0 -ctv q4_0"),
        ("fp8,skip_layers=2", "vLLM --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers"),
        ("fp8", "vLLM --kv-cache-dtype fp8"),
        ("kivi4,residual=32", "the authors' code"),
        ("window:4k", "streaming-llm"),
        ("snapkv:0.5", "kvpress's SnapKVPress"),
    ],
)
def test_who_serves_it(name: str, served: str) -> None:
    assert served in "; ".join(served_by(parse_format(name)))


@pytest.mark.parametrize(
    "name",
    [
        "fp8,rotate=hadamard",
        "fp8,values=nvfp4",
        "q8_0,values=fp8",
        "q8_0,values=q4_0,skip_layers=1",
        "nvfp4,skip_layers=2",
        "window:4k,store=fp8",
        "window:4k,store=fp16",
        "swa:4k",
        "snapkv:0.5,store=q8_0",
        "int4-g32",
        "fp8-channel",
    ],
)
def test_no_server_is_made_up(name: str) -> None:
    assert served_by(parse_format(name)) == ()
    assert not any(f"served by  {server}" in formats(name).output for server in SERVERS)
    assert "no server that we know" in formats(name).output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["int4-g32", "--geometry", "32x8x80"], "int4-g32 cannot store a head_dim of 80"),
        (["int4-g64", "--geometry", "32x8x96"], "int4-g64 cannot store a head_dim of 96"),
        (["fp8,rotate=hadamard", "--geometry", "32x8x100"], "cannot spread a head_dim of 100"),
        (["fp8,skip_layers=2", "--geometry", "4x8x128"], "leaves none of the model's 4"),
        (["fp8", "--geometry", "80x8"], "--geometry 80x8: write LAYERSxKV_HEADSxHEAD_DIM"),
        (["fp8", "--geometry", ""], "write LAYERSxKV_HEADSxHEAD_DIM"),
        (["fp8", "--geometry", "0x8x128"], "--geometry 0x8x128"),
        (["fp8", "--geometry", "999999x8x128"], "at most 10,000 layers"),
        (["fp8", "--geometry", "80x8x128", "--model", "probe"], "leave out --geometry"),
        (["fp8", "--model", "prob"], "did you mean 'probe'"),
        (["--model", "probe"], "name it"),
        (["--geometry", "80x8x128"], "name it"),
        (["fp9"], "did you mean fp8"),
        (["vllm-fp9"], "did you mean vllm-fp8"),
        (["windw:4k"], "did you mean window:4k"),
        (["kivi4-r3"], "did you mean kivi4-r32"),
        (["zzz"], "one of the named int4-boundary"),
        (["vllm-int4,skip_layers=2"], "write out what it means: int4-token-head,rotate=hadamard,skip_layers=2"),
        (["vllm-int4:3"], "takes nothing more"),
        (["fp8,values=fp9"], "'fp9' is not a KV format"),
        (["nowhere/mine.yaml"], "'nowhere/mine.yaml' is no file"),
        ([""], "is not a KV format"),
    ],
)
def test_mistakes_are_told(arguments: list[str], said: str) -> None:
    shown = formats(*arguments)
    assert shown.exit_code == 2
    assert said in shown.output
    assert "Traceback" not in shown.output


def test_names_are_nothing_else() -> None:
    assert len(names()) >= 6
    assert not {*STORAGES, *ALIASES, *WINDOWS, *METHODS} & set(names())


@pytest.mark.parametrize("name", names())
def test_a_named_format_is_its_format(name: str) -> None:
    assert resolve_format(f" {name.upper()} ") == parse_format(named_format(name).format)
    assert named_format(name).why.endswith(".")


def test_a_run_records_the_canonical_format(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("format: int4-g32, skip_layers=1\nwhy: To try.\n")
    arms = resolve_arms(["kivi4-r32", str(own), "vllm-fp8", "fp8"])
    assert [arm.name for arm in arms] == ["bf16", "kivi4,residual=32", "int4-g32,skip_layers=1", "fp8"]
    assert all(arm.name == arm.fmt.name for arm in arms)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("format: fp8\n", "the key 'why' is missing"),
        ("why: x\n", "the key 'format' is missing"),
        ("format: fp8\nwhy: x\nbits: 8\n", "unknown key 'bits': accepted are format, why"),
        ("format: 8\nwhy: x\n", "'format' is 8"),
        ("format: fp9\nwhy: x\n", "'fp9' is not a KV format"),
        ("format: vllm-fp8\nwhy: x\n", "'vllm-fp8' is not a KV format"),  # a file names no other
        ("- fp8\n", "holds no keys"),
        ("", "holds no keys"),
        ("format: [\n", "cannot be read"),
        ("format: \xff\n", "cannot be read"),
    ],
)
def test_a_file_that_is_not_in_order(tmp_path: Path, text: str, said: str) -> None:
    own = tmp_path / "mine.yaml"
    own.write_bytes(text.encode("latin-1"))
    with pytest.raises(KvevalError) as refused:
        resolve_format(str(own))
    assert said in str(refused.value)
    assert str(own) in str(refused.value)


def test_a_run_takes_another_baseline_and_refuses_others() -> None:
    refused = CliRunner().invoke(main, ["run", "--kv", "fp8", "--ctx", "2k", "--baseline", "fp8"])
    assert refused.exit_code == 2
    assert "'bf16', 'fp16'" in refused.output
    nothing = CliRunner().invoke(main, ["run", "--kv", "fp16", "--ctx", "2k", "--baseline", "fp16", "--quiet"])
    assert nothing.exit_code == 2
    assert "fp16 is the baseline of this run" in nothing.output
    unknown = CliRunner().invoke(main, ["run", "--kv", "vllm-fp9", "--ctx", "2k", "--quiet"])
    assert unknown.exit_code == 2
    assert "did you mean vllm-fp8" in unknown.output


@pytest.mark.parametrize("arguments", [["fp8"], ["kivi4-r32", "--json"], []])
def test_explaining_is_quick_and_needs_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom kveval.cli import main\n"
        f"main(['formats', *{arguments!r}], standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'scipy', 'pandas'} & set(sys.modules)), file=sys.stderr)"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert time.perf_counter() - start < 5  # 0.3 s on an idle machine
