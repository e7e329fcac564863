"""Load what ``catalogue.resolve`` found. Weights are safetensors only, and no code of a checkpoint is run."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kveval.errors import EngineError, KvevalError
from kveval.models.catalogue import ModelSource, require_tokenizer
from kveval.models.hashing import checkpoint_sha256, state_dict_sha256

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    source: ModelSource,
    *,
    dtype: str | torch.dtype = "float32",
    device: str = "cpu",
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """The model in ``dtype`` on ``device``, in eval mode, its parameters without gradients.

    Raises KvevalError when the checkpoint cannot be loaded whole (a missing tensor is never made up at random),
    EngineError when memory runs out.
    """
    import torch

    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype):
        raise KvevalError(f"'{dtype}' is no dtype: use float32, bfloat16 or float16")
    try:
        if source.path is None:
            model = _probe(source.outlier)
            model.set_attn_implementation(attn_implementation)
            model = model.to(device=device, dtype=kind)
        else:
            model = _pretrained(source, kind, device, attn_implementation)
    except torch.OutOfMemoryError as error:
        raise EngineError(f"'{source.name}' in {kind} does not fit on {device}: {_first_line(error)}") from error
    return model.eval().requires_grad_(False)


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's own tokenizer. Raises KvevalError when there is none or it cannot be loaded."""
    if source.path is None:
        from kveval.probe.tokenizer import build_tokenizer

        return build_tokenizer()
    if source.kind == "directory":
        require_tokenizer(Path(source.path))
    from transformers import AutoTokenizer

    with _loading(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(source.path, **_where(source))


def load_config(source: ModelSource) -> dict[str, Any]:
    """The model's configuration with transformers' defaults filled in, as ``memory.Geometry.from_config`` takes it."""
    return _config(source).to_dict()


def model_sha256(source: ModelSource) -> str:
    """What identifies the weights: SHA-256 of the probe's tensors or of a directory's files, a hub id's commit hash."""
    if source.path is None:
        return _probe_sha256(source.outlier)
    if source.kind == "hub":
        return _commit(source)
    return checkpoint_sha256(Path(source.path))


@functools.cache
def _probe_sha256(outlier: float) -> str:
    return state_dict_sha256(_probe(outlier).state_dict())


def _probe(outlier: float) -> PreTrainedModel:
    from kveval.probe.model import build

    return build(outlier)


def _config(source: ModelSource) -> Any:
    if source.path is None:
        from kveval.probe.model import config

        return config(source.outlier)
    from transformers import AutoConfig

    with _loading(source, "configuration"):
        return AutoConfig.from_pretrained(source.path, **_where(source))


def _pretrained(source: ModelSource, dtype: torch.dtype, device: str, attn_implementation: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with _loading(source, "weights"), _quietly():
        # device_map puts each tensor on its device as it is read; on the CPU there is nothing to place.
        placed = {} if device == "cpu" else {"device_map": {"": device}}
        model, info = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # told below in one sentence; transformers prints a table and raises
            output_loading_info=True,
            **placed,
            **_where(source),
        )
    misshapen = sorted(info["mismatched_keys"])
    if misshapen:
        name, there, wanted = misshapen[0]
        raise KvevalError(
            f"'{source.name}' holds {len(misshapen)} tensors of another shape than its config.json says ({name} is "
            f"{tuple(there)}, expected {tuple(wanted)}): give config.json and weights of the same model"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        raise KvevalError(
            f"'{source.name}' lacks {len(missing)} tensors of a {type(model).__name__} ({missing[0]} ...): "
            f"copy the whole checkpoint, or give one of a causal language model"
        )
    return model


def _where(source: ModelSource) -> dict[str, Any]:
    """Arguments that every ``from_pretrained`` here shares. The hub client itself heeds HF_HUB_OFFLINE."""
    where: dict[str, Any] = {"local_files_only": source.kind != "hub", "trust_remote_code": False}
    if source.kind == "hub":
        where["revision"] = _commit(source)
    return where


@functools.cache
def _commit(source: ModelSource) -> str:
    """Commit hash of a hub id, asked for once: all that this process loads of a model is of one commit."""
    from huggingface_hub import hf_hub_download

    assert source.path is not None
    with _loading(source, "configuration"):
        # The cache keeps a file as snapshots/<commit>/<file>.
        return Path(hf_hub_download(source.path, "config.json", revision=source.revision)).parent.name


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps transformers' progress bars and its tables of missing tensors out of what kveval says itself."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _loading(source: ModelSource, part: str) -> Iterator[None]:
    """Turns what is raised for a bad checkpoint into one sentence.

    A broken file can raise anything: safetensors, huggingface_hub and tokenizers each have exceptions of their own.
    """
    import torch

    try:
        yield
    except (KvevalError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        step = "check the checkpoint"
        if source.kind == "hub":
            step = "no such directory is here; check the hub id and the connection, or run 'hf download' beforehand"
        raise KvevalError(f"the {part} of '{source.name}' cannot be loaded ({_first_line(error)}): {step}") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
