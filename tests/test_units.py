"""Token counts, byte counts and exit codes. Known values: the shared cases 1 and 3."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kveval.errors import EngineError, EvidenceError, KvevalError
from kveval.units import GIB, format_bytes, format_tokens, parse_tokens


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("128k", 131_072),
        ("128K", 131_072),
        ("128000", 128_000),
        ("128,000", 128_000),
        ("131_072", 131_072),
        (" 4k ", 4_096),
        ("0.5k", 512),
        ("1.5k", 1_536),
        ("1m", 1_048_576),
        ("1", 1),
    ],
)
def test_tokens_are_binary_thousands(text: str, count: int) -> None:
    assert parse_tokens(text) == count


@pytest.mark.parametrize(
    "text", ["", "k", "0", "0k", "-4k", "+4k", "4 k", "4kb", "1.3", "0.0001k", "128ki", "nan", "1e5"]
)
def test_what_is_no_number_of_tokens_is_refused_by_name(text: str) -> None:
    with pytest.raises(KvevalError) as caught:
        parse_tokens(text)
    message = str(caught.value)
    assert f"'{text}'" in message
    assert "128k" in message, "says how to write it"


@given(st.integers(min_value=1, max_value=2**40))
def test_what_is_printed_is_read_back(count: int) -> None:
    assert parse_tokens(format_tokens(count)) == count


def test_the_short_form_is_used_only_where_it_is_exact() -> None:
    assert format_tokens(131_072) == "128k"
    assert format_tokens(128_000) == "125k", "128,000 is 125 x 1,024 exactly"
    assert format_tokens(130_950) == "130,950"
    assert format_tokens(1_000) == "1,000"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (131_072 * 327_680, "40.000 GiB"),  # case 1
        (128_000 * 327_680, "39.062 GiB"),  # case 3: 39.0625
        (327_680, "320 KiB"),
        (92_160, "90 KiB"),
        (2_048, "2,048 B"),
        (0, "0 B"),
        (GIB - 1, "1024.0 MiB"),
        (5 * 1024 * 1024, "5.0 MiB"),
        (10_500.0, "10.3 KiB"),
    ],
)
def test_bytes_carry_a_binary_unit(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_each_kind_of_error_has_the_exit_code_of_the_design() -> None:
    assert (KvevalError.exit_code, EvidenceError.exit_code, EngineError.exit_code) == (2, 4, 5)
    assert issubclass(EvidenceError, KvevalError)
    assert issubclass(EngineError, KvevalError)
