"""From last hidden states to float32 logits, a slice of positions at a time: 128k x 150,000 logits never exist."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kveval.errors import KvevalError

SLICE_BYTES = 128 * 1024**2  # logits alive at once


class Head:
    """The model's output embedding and what its config does to logits (Gemma's soft cap, Cohere's and Granite's scales)."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises KvevalError when the model's own forward gives other logits than this: it does something kveval does not know."""
        config = model.config.get_text_config()
        self._output = model.get_output_embeddings()
        self._cap = getattr(config, "final_logit_softcapping", None)
        self._scale = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self.vocabulary = int(self._output.weight.shape[0])
        self.rows = max(1, SLICE_BYTES // (4 * self.vocabulary))

    @torch.inference_mode()
    def verify(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """Compare with ``logits`` (tokens, vocabulary) that the model computed itself from ``hidden`` (tokens, hidden size)."""
        if not torch.allclose(self(hidden), logits.float(), rtol=1e-3, atol=1e-3):
            raise KvevalError(
                "this architecture changes its logits in a way that kveval does not know: its perplexity would be wrong"
            )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits (tokens, vocabulary) of ``hidden`` (tokens, hidden size)."""
        logits = self._output(hidden).float()
        if self._scale != 1.0:
            logits = logits * self._scale
        if self._cap is not None:
            logits = torch.tanh(logits / self._cap) * self._cap
        return logits
