"""The probe: a transformer whose weights are computed, not trained, and whose answers are known."""

from kveval.probe.model import build, config, export
from kveval.probe.tokenizer import build_tokenizer, vocabulary

__all__ = ["build", "build_tokenizer", "config", "export", "vocabulary"]
