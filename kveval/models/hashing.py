"""Which bytes a result belongs to: hashes of weights and tokenizers."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kveval.units import MIB

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


def sha256_of(file: Path) -> str:
    """SHA-256 of a file's bytes, as 64 hexadecimal digits. Read once a process for each (path, size, mtime)."""
    stat = file.stat()
    return _sha256_of(os.fspath(file.resolve()), stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _sha256_of(path: str, size_bytes: int, mtime_ns: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(4 * MIB), b""):
            digest.update(block)
    return digest.hexdigest()


def checkpoint_sha256(directory: Path) -> str:
    """One hash over a checkpoint's config.json and all of its safetensors files, by name; other files do not count."""
    files = [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
    lines = [f"{file.name} {sha256_of(file)}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def state_dict_sha256(state: Mapping[str, torch.Tensor]) -> str:
    """One hash over a model's tensors in memory: names, dtypes, shapes and bytes, in the order of the names."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """One hash over what turns text into ids: vocabulary, merges, normalizer, pre-tokenizer, added tokens.

    Padding and truncation, which calls switch on and off, are left out.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in pure Python
        described = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    else:
        described = json.loads(backend.to_str())
        described.pop("padding", None)
        described.pop("truncation", None)
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
