"""Divergence and memory gauges: known values, and readings against plain computations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import read_logits, tiny_llama

from kveval.engines.head import Head
from kveval.engines.stream import Stream
from kveval.errors import EngineError
from kveval.formats.parse import parse_format
from kveval.formats.spec import KVFormat
from kveval.measure.divergence import Recorder, Recording, divergence, is_reference, sample_positions
from kveval.measure.memory import PeakMemory

IDS = np.random.default_rng(0).integers(0, 101, 200)


@pytest.mark.parametrize(
    ("p", "q", "nats"),
    [
        ((0.7, 0.2, 0.1), (0.6, 0.3, 0.1), 0.026812),
        ((0.6, 0.3, 0.1), (0.7, 0.2, 0.1), 0.029149),
        ((0.7, 0.2, 0.1), (0.2, 0.7, 0.1), 0.626381),
        ((0.5, 0.5, 0.0), (0.5, 0.25, 0.25), 0.346574),  # a token that the baseline rules out adds nothing: ln(2) / 2
    ],
)
def test_case_14_kl(p: tuple[float, ...], q: tuple[float, ...], nats: float) -> None:
    got = divergence(torch.tensor([p]).log(), torch.tensor([q]).log())
    assert got.tolist() == pytest.approx([nats], abs=1e-6)


def test_kl_of_a_distribution_with_itself_is_exactly_zero() -> None:
    log_probs = torch.randn(50, 1000).log_softmax(-1)
    assert divergence(log_probs, log_probs).tolist() == [0.0] * 50


def record(fmt: KVFormat, chunk: int, folder: Path, *, baseline: bool) -> Recording:
    """One reading of IDS; the baseline writes the reference that candidates read."""
    model = tiny_llama()
    head = Head(model)
    head.rows = 30  # several slices in a chunk
    reference = folder / "reference.f32"
    sampled = sample_positions(len(IDS), 60, 0, 0)
    output, known = (reference, None) if baseline else (None, reference)
    recorder = Recorder(head, IDS, sampled, baseline=known, output=output)
    with Stream(model, None, head, fmt, IDS, chunk_tokens=chunk) as stream:
        for _ in stream.read_to(len(IDS), recorder):
            pass
    return recorder.finish()


def test_a_recording_equals_the_whole_logits(tmp_path: Path) -> None:
    bf16, fp8 = parse_format("bf16"), parse_format("fp8")
    base = record(bf16, 64, tmp_path, baseline=True)
    got = record(fp8, 64, tmp_path, baseline=False)
    model = tiny_llama()
    log_probs = {f.name: read_logits(model, f, IDS, 64).log_softmax(-1)[:-1] for f in (bf16, fp8)}
    for recording, fmt in ((base, bf16), (got, fp8)):
        expected = -log_probs[fmt.name].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
        np.testing.assert_allclose(recording.nll, expected, atol=1e-4)
    sampled = torch.tensor(sample_positions(len(IDS), 60, 0, 0) - 1)
    p, q = log_probs["bf16"][sampled], log_probs["fp8"][sampled]
    np.testing.assert_allclose(got.kl, (p.exp() * (p - q)).sum(-1), atol=1e-4)
    np.testing.assert_array_equal(got.top1_agree, (p.argmax(-1) == q.argmax(-1)).float())
    assert 0 < got.top1_agree.mean() < 1
    assert base.kl.size == base.top1_agree.size == 0


def test_bf16_against_bf16_in_the_same_chunks_is_exactly_zero(tmp_path: Path) -> None:
    base = record(parse_format("bf16"), 64, tmp_path, baseline=True)
    again = record(parse_format("bf16"), 64, tmp_path, baseline=False)
    assert (base.nll == again.nll).all()
    assert (again.kl == 0).all()
    assert (again.top1_agree == 1).all()


def test_a_reference_is_known_by_what_the_baseline_told(tmp_path: Path) -> None:
    """One that is cut short, another context's or of other positions would make a divergence that looks like one."""
    nll = record(parse_format("bf16"), 64, tmp_path, baseline=True).nll
    file, sampled = tmp_path / "reference.f32", sample_positions(len(IDS), 60, 0, 0)
    assert is_reference(file, 101, IDS, sampled, nll)
    assert not is_reference(tmp_path / "none", 101, IDS, sampled, nll)
    assert not is_reference(file, 101, IDS, sampled, nll[::-1])
    assert not is_reference(file, 101, IDS[::-1], sampled, nll)
    assert not is_reference(file, 101, IDS, sample_positions(len(IDS), 60, 0, 1), nll)
    whole = file.read_bytes()
    for damaged in (whole[:-1], b"\0" * len(whole)):
        file.write_bytes(damaged)
        assert not is_reference(file, 101, IDS, sampled, nll)


def test_a_context_that_was_not_read_to_its_end_is_an_error(tmp_path: Path) -> None:
    head = Head(tiny_llama())
    recorder = Recorder(head, IDS, sample_positions(len(IDS), 60, 0, 0), output=tmp_path / "r")
    recorder(0, torch.zeros(50, 64))
    with pytest.raises(EngineError, match="149 positions"):
        recorder.finish()
    assert not (tmp_path / "r").exists()  # the reference appears whole or not at all


def test_nan_logits_are_an_error_that_names_the_position() -> None:
    head = Head(tiny_llama())
    recorder = Recorder(head, IDS, sample_positions(len(IDS), 60, 0, 0))
    hidden = torch.zeros(10, 64)
    hidden[4] = torch.nan
    with pytest.raises(EngineError, match="position 25"):
        recorder(20, hidden)


@pytest.mark.parametrize(("tokens", "count"), [(1000, 100), (100, 512), (2, 1), (131_072, 512)])
def test_sampled_positions_are_spread_over_the_depth(tokens: int, count: int) -> None:
    positions = sample_positions(tokens, count, 7, 3)
    count = min(count, tokens - 1)
    assert len(positions) == count
    assert (np.diff(positions) > 0).all()
    strata = ((positions - 1) * count) // (tokens - 1)
    assert np.abs(strata - np.arange(count)).max() <= 1
    assert positions[0] >= 1
    assert positions[-1] <= tokens - 1
    np.testing.assert_array_equal(positions, sample_positions(tokens, count, 7, 3))
    if tokens > 2 * count:
        assert (positions != sample_positions(tokens, count, 8, 3)).any()


def test_peak_memory_sees_what_was_held_and_let_go() -> None:
    size = 256 * 1024**2
    with PeakMemory(torch.device("cpu")) as first:
        torch.ones(size, dtype=torch.uint8)
    with PeakMemory(torch.device("cpu")) as second:
        pass
    assert first.peak_bytes - first.start_bytes >= 0.9 * size
    assert second.peak_bytes - second.start_bytes < 0.5 * size


def test_peak_memory_without_the_kernels_gauge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc has no peak to reset, a thread looks; it has ended afterwards."""
    import threading
    import time

    monkeypatch.setattr("kveval.measure.memory._reset_kernel_peak", lambda: False)
    size = 256 * 1024**2
    threads = threading.active_count()
    with PeakMemory(torch.device("cpu")) as memory:
        held = torch.ones(size, dtype=torch.uint8)
        deadline = time.monotonic() + 30  # the thread looks ten times a second, less often on a busy machine
        while memory.peak_bytes - memory.start_bytes < 0.9 * size and time.monotonic() < deadline:
            time.sleep(0.05)
        del held
    assert memory.peak_bytes - memory.start_bytes >= 0.9 * size
    assert threading.active_count() == threads
