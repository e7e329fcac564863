"""The probe as a stock ``LlamaForCausalLM``: in memory, or as a Hugging Face checkpoint for other engines."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kveval.errors import KvevalError
from kveval.probe import weights
from kveval.probe.tokenizer import build_tokenizer, vocabulary

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM


def config(outlier: float = 0.0) -> LlamaConfig:
    """2 layers of 4 heads (no grouping) of 64 dims; positions to 262,144 at rotary theta 1e12; an MLP that is zero.

    ``outlier`` is recorded as ``kveval_outlier``.
    """
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=weights.HIDDEN,
        intermediate_size=weights.INTERMEDIATE,
        num_hidden_layers=2,
        num_attention_heads=weights.HEADS,
        num_key_value_heads=weights.HEADS,
        head_dim=weights.HEAD_DIM,
        max_position_embeddings=weights.POSITIONS,
        rms_norm_eps=weights.RMS_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": weights.ROPE_THETA},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
        kveval_probe=True,  # an exported copy still says that it is the instrument
        kveval_outlier=outlier,
    )


def build(outlier: float = 0.0) -> LlamaForCausalLM:
    """The probe in float32 on the CPU, in eval mode; the same bytes every time (`weights.state_dict`).

    ``outlier`` plants an outlier of that size in the keys of layer 2; exact attention gives the same answers with it.
    """
    import torch
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):  # the initial weights, drawn and thrown away, leave torch's generator alone
        model = LlamaForCausalLM(config(outlier))
    computed = weights.state_dict(len(vocabulary()), outlier)
    model.load_state_dict({name: torch.from_numpy(matrix) for name, matrix in computed.items()}, assign=True)
    return model.eval()


def export(directory: Path, outlier: float = 0.0) -> None:
    """Write the probe and its tokenizer to ``directory`` as an ordinary Hugging Face checkpoint, whole or not at all.

    Raises KvevalError when the directory holds something already or cannot be written.
    """
    target = Path(directory).absolute()
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise KvevalError(f"'{directory}' exists and is not an empty directory: name one that does not exist yet")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
            checkpoint = Path(scratch) / "checkpoint"
            checkpoint.mkdir()  # with the user's own permissions, which a temporary directory does not have
            build(outlier).save_pretrained(checkpoint)
            build_tokenizer().save_pretrained(checkpoint)
            checkpoint.replace(target)
    except OSError as error:
        raise KvevalError(f"cannot write a checkpoint to '{directory}': {error.strerror or error}") from error
