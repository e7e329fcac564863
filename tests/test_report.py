"""The report: numbers worked out by hand, the same in all four renderings, and nothing foreign that is not escaped."""

from __future__ import annotations

import copy
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pytest

from kveval import report as reports
from kveval.errors import KvevalError
from kveval.report import cells, charts, jsonout, markdown, tables, terminal, wording
from kveval.report.data import build
from kveval.report.model import Cell, Grid, Report
from kveval.runs.evidence import TABLES, Evidence

ANSI = re.compile(r"\x1b\[")
KIB, MIB, GIB = 1024, 1024**2, 1024**3
CONTEXTS, TOKENS = 4, 8192
SCRIPT = "<script>alert('needle')</script>"
ARMS = [
    {"name": "bf16", "kv": "bf16", "role": "baseline", "lossy": False, "bytes_per_token": 2048.0},
    {"name": "fp8", "kv": "fp8", "role": "candidate", "lossy": True, "bytes_per_token": 1024.0},
    {"name": "window:4k", "kv": "window:4k", "role": "candidate", "lossy": True, "bytes_per_token": 2048.0},
]
# (length, depth) -> right answers of the four contexts, for bf16, fp8 and window:4k. Depth 1.0 of 4k is not asked. At
# depth 0.0 of 8k the baseline has 1 of 4: below the policy's half, so that cell can show no loss.
RIGHT = {
    (4096, 0.0): ("1111", "1111", "1111"),
    (4096, 0.5): ("1111", "1111", "1111"),
    (8192, 0.0): ("1000", "1000", "0000"),
    (8192, 0.5): ("1111", "1101", "0000"),
    (8192, 1.0): ("1111", "1111", "1111"),
}


def _plan(model: str = "smollm2-135m", *, instrument: bool = False) -> dict[str, Any]:
    experiment = {
        "model": {
            "name": model,
            "source": "built-in" if instrument else "catalogue",
            "sha256": "a" * 64,
            "instrument": instrument,
            "architecture": "LlamaForCausalLM",
            "layers": 2,
            "kv_heads": 4,
            "head_dim": 64,
            "positions": 262144,
        },
        "tokenizer_sha256": "b" * 64,
        "versions": {"python": "3.11.7", "kveval": "0.1.0", "torch": "2.13.0"},
        "engine": {
            "name": "transformers",
            "attention": "kveval-split",
            "device": "cpu",
            "compute_dtype": "float32",
            "threads": 2,
            "chunk_tokens": 4096,
        },
        "arms": copy.deepcopy(ARMS),
        "ctx_tokens": TOKENS,
        "task": {
            "name": "kveval_needle_grid",
            "protocol": "shared",
            "lengths": [4096, 8192],
            "depths": [0.0, 0.5, 1.0],
            "contexts": CONTEXTS,
            "needles_per_cell": 1,
            "seed": 7,
            "haystack": {"name": "noise", "sha256": "c" * 64},
        },
        "contexts": [{"context": i, "sha256": f"{i}" * 64, "tokens": TOKENS} for i in range(CONTEXTS)],
        "divergence": {"sampled_positions": 512},
    }
    machine = {
        "cpu": "AMD EPYC 9654",
        "cores": 2,
        "memory_bytes": 24 * GIB,
        "platform": "Linux x86_64",
        "device": "cpu",
    }
    return {
        "schema": 1,
        "hash": "d" * 64,
        "created": "2026-11-30T18:00:00Z",
        "command": "kveval run --kv fp8 --kv window:4k --ctx 8k",
        "machine": machine,
        "experiment": experiment,
    }


def _table(name: str, rows: list[dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=list(TABLES[name])).astype(TABLES[name])


def _answers(wrong: str) -> list[dict[str, Any]]:
    rows = []
    for number, arm in enumerate(ARMS):
        for (length, depth), right in RIGHT.items():
            for context, mark in enumerate(right[number]):
                rows.append(
                    {
                        "arm": arm["name"],
                        "task": "kveval_needle_grid",
                        "context": context,
                        "length": length,
                        "depth": depth,
                        "question": int(depth * 10),
                        "prompt_sha256": f"{length}-{depth}-{context}",
                        "prompt_tokens": length,
                        "read_tokens": length,
                        "needle_first": 0,
                        "needle_last": 9,
                        "expected": "1234567",
                        "answer": "1234567" if mark == "1" else wrong,
                        "score": float(mark),
                        "finish_reason": "stop",
                        "status": "scored",
                        "error": "",
                    }
                )
    return rows


def _divergence() -> list[dict[str, Any]]:
    """100 positions a context: the last 10 are inside needles; every fourth is sampled, half of those agree."""
    rows = []
    for arm, shift, kl in (("fp8", 0.01, 0.0125), ("window:4k", 0.5, 0.25)):
        for context in range(CONTEXTS):
            for position in range(1, 101):
                scored, sampled = position <= 90, position % 4 == 0
                rows.append(
                    {
                        "arm": arm,
                        "context": context,
                        "position": position,
                        "scored": scored,
                        "nll_baseline": 2.0 if scored else 9.0,
                        "nll": 2.0 + shift if scored else 1.0,
                        "kl": kl if sampled else float("nan"),
                        "top1_agree": float(position % 8 != 0) if sampled else float("nan"),
                    }
                )
    return rows


def _footprint() -> list[dict[str, Any]]:
    sizes = {"bf16": 16 * MIB, "fp8": 8 * MIB, "window:4k": 8 * MIB}
    return [
        {
            "arm": arm,
            "context": context,
            "tokens": TOKENS,
            "predicted_bytes": size,
            "stored_bytes": size,
            "reserved_bytes": size * 5 // 4,
            "weights_bytes": 12 * MIB,
            "peak_bytes": GIB + context * 128 * MIB,
            "start_bytes": GIB // 2,
        }
        for arm, size in sizes.items()
        for context in range(CONTEXTS)
    ]


def _throughput() -> list[dict[str, Any]]:
    """4,096 tokens in 1 s, the next in 3 s: 2,048 tokens/s. fp8 read half a context twice; its decode was not timed."""
    rows = []
    for arm in ("bf16", "fp8", "window:4k"):
        for context in range(CONTEXTS):
            stretches = [("prefill", 4096, 4096, 1.0), ("prefill", 8192, 4096, 3.0), ("ask", 8192, 60, 0.5)]
            if arm != "fp8":
                stretches += [("decode", 4096, 10, 1.0), ("decode", 8192, 10, 2.0)]
            elif context == 0:
                stretches += [("prefill", 4096, 4096, 1.0)]
            for phase, length, tokens, seconds in stretches:
                rows.append(
                    {
                        "arm": arm,
                        "context": context,
                        "phase": phase,
                        "length": length,
                        "tokens": tokens,
                        "seconds": seconds,
                    }
                )
    return rows


def _checks() -> list[dict[str, Any]]:
    passed = [("engaged", "fp8"), ("engaged", "window:4k"), *(("whole prompts", arm["name"]) for arm in ARMS)]
    passed += [("paired", "fp8"), ("paired", "window:4k"), ("discriminative", "bf16")]
    return [{"check": check, "arm": arm, "status": "passed", "detail": f"{check} holds"} for check, arm in passed]


def _evidence(plan: dict[str, Any] | None = None, wrong: str = "7654321") -> Evidence:
    return Evidence(
        path=Path("runs/case"),
        plan=plan or _plan(),
        manifest={"schema": 1, "hash": "d" * 64},
        answers=_table("answers", _answers(wrong)),
        divergence=_table("divergence", _divergence()),
        footprint=_table("footprint", _footprint()),
        throughput=_table("throughput", _throughput()),
        checks=_table("checks", _checks()),
    )


@pytest.fixture(scope="module")
def case() -> Report:
    return build(_evidence())


@pytest.fixture(scope="module")
def instrument() -> Report:
    return build(_evidence(_plan("probe", instrument=True)))


def _rendered(report: Report) -> dict[str, str]:
    return {name: reports.render(report, name) for name in reports.FORMATS}


@pytest.fixture(scope="module")
def texts(case: Report) -> dict[str, str]:
    return _rendered(case)


@pytest.fixture(scope="module")
def page(texts: dict[str, str]) -> _Page:
    return _Page(texts["html"])


class _Page(HTMLParser):
    """Tables by id as rows of cell texts, all text, all tags; raises when a tag is closed that is not open."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.heat: dict[str, list[list[tuple[str, str]]]] = {}  # arm -> rows of (class, text)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self._classes: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.tags.append((tag, named))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "table":
            self._rows, self._classes = [], []
            self._table, self._caption = named, ""
        if tag == "tr":
            self._rows.append([])
            self._classes.append([])
        if tag in ("td", "th"):
            self._rows[-1].append("")
            self._classes[-1].append(named.get("class") or "")
        if tag == "small" and self._rows and self._rows[-1]:
            self._rows[-1][-1] += "\n"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "table" and self._table.get("id"):
            self.tables[str(self._table["id"])] = self._rows
        if tag == "table" and self._table.get("class") == "heat":
            rows = zip(self._classes, self._rows, strict=True)
            self.heat[self._caption.split()[0]] = [list(zip(*row, strict=True)) for row in rows]

    def handle_data(self, data: str) -> None:
        self.text += data
        if "caption" in self._open:
            self._caption += data
        elif ("td" in self._open or "th" in self._open) and self._rows and self._rows[-1]:
            self._rows[-1][-1] += data.strip()


def _markdown_table(text: str, title: str) -> list[list[str]]:
    """Cells of the table under a heading of the Markdown text, as written."""
    block = text.split(f"## {title}\n\n", 1)[1].split("\n\n", 1)[0]
    lines = [re.split(r"(?<!\\)\|", line.removeprefix("| ").removesuffix(" |")) for line in block.split("\n")]
    return [[cell.strip() for cell in line] for line in lines if not set("".join(line)) <= set("-: ")]


def _lines(text: str, label: str) -> str:
    """The terminal table's line that begins with ``label``."""
    return next(line for line in text.split("\n") if line.startswith(label))


# What the rows of the case come to, worked out by hand: row label -> bf16, fp8, window:4k.
BY_HAND = {
    "KV bytes per token": ("2,048 B", "1,024 B", "2,048 B"),
    "KV cache, predicted": ("16.0 MiB", "8.0 MiB", "8.0 MiB"),
    "KV cache, stored": ("16.0 MiB", "8.0 MiB", "8.0 MiB"),
    "KV cache, reserved": ("20.0 MiB", "10.0 MiB", "10.0 MiB"),  # 5/4 of what is stored
    "Stored / baseline's": ("1x", "0.5x", "0.5x"),
    "Score": ("9/12", "8/12", "4/12"),
    "Recall retention": ("", "87.5 %", "50 %"),  # 7/8 and 4/8: depth 0 does not count, where the baseline has 1/4
    "PPL ratio": ("", "1.0101", "1.6487"),  # exp(0.01), exp(0.5)
    "PPL": ("7.3891", "7.4633", "12.182"),  # exp(2), exp(2.01), exp(2.5)
    "Mean KL, nats": ("", "0.0125", "0.25"),
    "Top-1 agreement": ("", "50 %", "50 %"),
    "Prefill, tokens/s": ("2,048", "2,168", "2,048"),  # 32,768 / 16 s; 36,864 / 17 s
    "Decode, tokens/s": ("5", "not measured", "5"),  # at 8k only: 40 / 8 s
    "Peak memory": ("1.375 GiB", "1.375 GiB", "1.375 GiB"),  # of the fourth context
}


@pytest.mark.parametrize("label", BY_HAND)
def test_a_number_of_the_main_table_is_the_same_in_every_text(
    case: Report, texts: dict[str, str], page: _Page, label: str
) -> None:
    values = BY_HAND[label]
    data = {row: tuple(value.text for value in cells) for row, cells in tables.main_table(case).rows}
    assert data[label] == values
    html_row = next(row for row in page.tables["main"] if row[0] == label)
    assert tuple(cell.split("\n")[0] for cell in html_row[1:]) == values
    md_row = next(row for row in _markdown_table(texts["md"], "At 8,192 tokens") if row[0] == label)
    assert tuple(cell.split("<br>")[0] for cell in md_row[1:]) == values
    line = _lines(texts["terminal"], f"{label}  ")
    assert re.split(r"\s{2,}", line) == [label, *(value for value in values if value)]


def test_the_json_holds_the_same_numbers_unrounded(texts: dict[str, str]) -> None:
    document = json.loads(texts["json"])
    bf16, fp8, window = document["arms"]
    assert [arm["name"] for arm in document["arms"]] == ["bf16", "fp8", "window:4k"]
    assert [row["length"] for row in fp8["by_length"]] == [4096, 8192]
    retention = fp8["by_length"][1]["retention"]
    assert retention["estimate"] == 7 / 8
    assert (retention["questions"], retention["contexts"], retention["clustered"]) == (8, 4, True)
    assert (retention["lost"], retention["gained"]) == (1, 0)
    assert retention["low"] < 7 / 8 < retention["high"]
    assert window["by_length"][1]["retention"]["estimate"] == 0.5
    assert fp8["divergence"]["ppl"]["estimate"] == pytest.approx(math.exp(0.01), rel=1e-6)
    assert fp8["divergence"]["ppl"]["ppl_baseline"] == pytest.approx(math.exp(2), rel=1e-6)
    assert window["divergence"]["kl"]["estimate"] == 0.25
    assert fp8["coverage"] == {"positions": 400, "scored": 360, "sampled": 88}
    assert fp8["footprint"]["stored_bytes"] == 8_388_608
    assert (bf16["read_ratio"], fp8["read_ratio"]) == (1.0, 1.125)  # fp8 read 4,096 tokens twice: 36,864 / 32,768
    assert bf16["decode"] == {"tokens": 40, "seconds": 8.0, "length": 8192, "tokens_per_s": 5.0}
    assert fp8["decode"] is None
    assert len(fp8["footprints"]) == CONTEXTS
    assert document["plan"] == _plan()


def test_the_json_follows_its_schema_and_holds_no_nan(case: Report, instrument: Report) -> None:
    schema = jsonout.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for report in (case, instrument):
        text = jsonout.render(report)
        jsonschema.validate(json.loads(text, parse_constant=pytest.fail), schema)  # called for NaN and Infinity
    for path, wrong in (("version", 2), ("arms", [{"name": "x"}]), ("unknown", 1)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**json.loads(text), path: wrong}, schema)


def test_every_field_of_the_schema_is_written(texts: dict[str, str]) -> None:
    """A field that the data model has lost or gained fails here."""
    document = json.loads(texts["json"])
    schema = jsonout.schema()
    for name, found in (
        ("arm", document["arms"][1]),
        ("retention", document["arms"][1]["by_length"][0]["retention"]),
        ("grid", document["grids"][0]),
        ("cell", document["grids"][0]["cells"][0][0]),
        ("lostAnswer", document["arms"][1]["lost_examples"][0]),
        ("rule", document["verdict"]["arms"][0]["rules"][0]),
    ):
        assert set(schema["$defs"][name]["properties"]) == set(found), name


def test_grid_cells_hold_what_was_asked(texts: dict[str, str], page: _Page) -> None:
    """3/4 where one of four was lost, a dot where the baseline has 1/4, nothing where nothing was asked."""
    shown = {
        "bf16": [["4/4", "4/4", ""], ["1/4", "4/4", "4/4"]],
        "fp8": [["4/4", "4/4", ""], ["·", "3/4", "4/4"]],
        "window:4k": [["4/4", "4/4", ""], ["·", "0/4", "4/4"]],
    }
    losses = {"bf16": {}, "fp8": {(1, 1): "-1"}, "window:4k": {(1, 1): "-4"}}
    for arm, expected in shown.items():
        html_rows = [[text.split("\n")[0] for _, text in row[1:]] for row in page.heat[arm][1:]]
        assert html_rows == expected
        marked = {
            (i, j): text.split("\n")[1]
            for i, row in enumerate(page.heat[arm][1:])
            for j, (_, text) in enumerate(row[1:])
            if "\n" in text
        }
        assert marked == losses[arm]
        written = _markdown_table(texts["md"], f"{arm}: kveval\\_needle\\_grid, length x depth")
        assert [[cell.split(" ")[0] for cell in row[1:]] for row in written[1:]] == expected
        block = texts["terminal"].split(f"{arm}: kveval_needle_grid, length x depth in %\n")[1].split("\n")
        assert [line.split() for line in block[2:4]] == [
            [name, *(cell for cell in row if cell)] for name, row in zip(("4k", "8k"), expected, strict=True)
        ]
    grey, lost = page.heat["window:4k"][2][1], page.heat["window:4k"][2][2]
    assert (grey[0], lost[0]) == ("grey", "h5")
    assert page.heat["fp8"][2][2][0] == "h3"  # a quarter of the baseline's score
    assert page.heat["fp8"][1][3][0] == "empty"
    grid = json.loads(texts["json"])["grids"][1]
    assert grid["cells"][0][2] is None
    assert grid["cells"][1][1] | {"score": 3.0, "baseline_score": 4.0, "scored": 4} == grid["cells"][1][1]
    assert grid["cells"][1][0]["discriminative"] is False


def test_retention_by_length_has_the_baseline_and_every_candidate(case: Report) -> None:
    rows = {label: [value.text for value in values] for label, values in tables.retention_table(case).rows}
    assert rows == {"4k": ["8/8", "100 %", "100 %"], "8k (deployed)": ["8/8", "87.5 %", "50 %"]}
    assert "over 4 contexts" in tables.retention_table(case).note


@pytest.mark.parametrize("name", reports.FORMATS)
def test_a_probe_run_says_that_it_measures_the_instrument(texts: dict[str, str], instrument: Report, name: str) -> None:
    told = "This run measures the instrument, not your model."
    assert told in " ".join(reports.render(instrument, name).split())
    assert told not in " ".join(texts[name].split())


@pytest.mark.parametrize("name", reports.FORMATS)
def test_every_form_tells_the_verdict_the_checks_and_how_to_repeat_it(
    case: Report, texts: dict[str, str], page: _Page, name: str
) -> None:
    text = page.text if name == "html" else texts[name]
    flat = " ".join(text.replace("\\", "").split())
    assert "May smollm2-135m be served with a KV cache in fp8 or window:4k at 8,192 tokens?" in flat
    for arm in case.verdict.arms:
        body = arm.sentence.removeprefix(f"{arm.outcome}: ")
        assert body.split("[")[0] in flat
    for words in ("noise floor", "not checked", "sane", "d" * 64, "c" * 64, "torch", "2.13.0", "AMD EPYC 9654"):
        assert words in flat, words
    assert "kveval run --kv fp8 --kv window:4k --ctx 8k" in text
    assert "Several streams at once" in flat


@pytest.mark.parametrize("width", [80, 120])
def test_plain_terminal_text_fits_and_is_plain(case: Report, width: int) -> None:
    text = terminal.render(case, width=width, color=False)
    assert not ANSI.search(text)
    assert "\x1b" not in text
    assert "…" not in text
    assert max(len(line) for line in text.split("\n")) <= width
    header = next(line for line in text.split("\n") if line.split() == ["bf16", "fp8", "window:4k"])
    assert len(header) <= width  # three arms stand side by side at 80 columns
    assert set(text) - set(map(chr, range(32, 127))) <= {"\n", wording.GREY}


def test_more_arms_than_fit_go_into_a_second_table_with_the_baseline(case: Report) -> None:
    text = terminal.render(case, width=60)
    assert max(len(line) for line in text.split("\n")) <= 60
    heads = [line.split() for line in text.split("\n") if line.split()[:1] == ["bf16"] and len(line.split()) == 2]
    assert heads[:2] == [["bf16", "fp8"], ["bf16", "window:4k"]]


def test_colour_adds_nothing_but_colour(case: Report) -> None:
    coloured = terminal.render(case, width=100, color=True)
    assert ANSI.search(coloured)
    words = re.sub(r"\x1b\[[0-9;]*m", "", coloured).replace("─", "").replace("-", "").split()
    assert words == terminal.render(case, width=100).replace("-", "").split()


def test_the_page_loads_nothing_and_runs_nothing(texts: dict[str, str], page: _Page) -> None:
    text = texts["html"]
    assert len(text.encode()) < 300_000
    assert {tag for tag, _ in page.tags} & {"script", "iframe", "img", "object", "embed", "form", "base"} == set()
    for tag, named in page.tags:
        assert not [name for name in named if name.startswith("on")], tag
        assert named.get("href", "data:,") == "data:,"
        assert "src" not in named
    assert "url(" not in text
    assert "@import" not in text
    assert any("default-src 'none'" in (named.get("content") or "") for _, named in page.tags)
    for words in ("prefers-color-scheme: dark", "@media print", "width=device-width"):
        assert words in text
    scopes = {named.get("scope") for tag, named in page.tags if tag == "th"}
    assert scopes == {"row", "col"}
    names = {named["id"] for _, named in page.tags if named.get("id")}
    pointed = {word for _, named in page.tags for word in (named.get("aria-labelledby") or "").split()}
    assert pointed
    assert pointed <= names


HOSTILE = f"{SCRIPT} | `x` **b** [bold]red[/bold] @someone #12 https://evil.example \x1b[31m\u202e\r\n<!-- -->"


@pytest.fixture(scope="module")
def hostile() -> Report:
    plan = _plan("mo|del [bold] <i>`x`")
    plan["command"] = "kveval run --model 'a```b[bold]' --kv fp8 <i>"
    plan["machine"]["cpu"] = SCRIPT
    evidence = _evidence(plan, wrong=HOSTILE)
    checks = evidence.checks.assign(detail=f"{SCRIPT} | a\nb")
    return build(replace(evidence, checks=checks))


def test_foreign_text_is_text_in_html(hostile: Report) -> None:
    text = reports.render(hostile, "html")
    page = _Page(text)
    assert {"script", "i"} & {tag for tag, _ in page.tags} == set()
    assert "<!-- -->" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert wording.visible(HOSTILE) in page.text  # it is all there to read
    assert "mo|del [bold] <i>`x`" in page.text
    assert "kveval run --model 'a```b[bold]' --kv fp8 <i>" in page.text


def test_foreign_text_is_text_in_the_terminal(hostile: Report) -> None:
    for color in (False, True):
        text = terminal.render(hostile, width=300, color=color)
        assert "\x1b[31m\\u202e" not in text
        assert "\u202e" not in text
        plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
        assert "\x1b" not in plain
        assert wording.visible(HOSTILE) in plain
        assert "[bold]red[/bold]" in plain  # rich's markup is not obeyed
        assert "'a```b[bold]'" in plain


def test_foreign_text_is_text_in_markdown(hostile: Report) -> None:
    """Read by a CommonMark parser: nothing of it becomes HTML, a link, emphasis or another table cell."""
    from markdown_it import MarkdownIt

    text = markdown.render(hostile)
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    page = _Page(re.sub(r"<br>", "", html))
    assert {"script", "i", "a", "em"} & {tag for tag, _ in page.tags} == set()
    assert wording.visible(HOSTILE) in page.text
    assert "kveval run --model 'a```b[bold]' --kv fp8 <i>\n" in page.text
    assert "https:" not in text  # a bare address would become a link on GitHub
    assert not re.search(r"(?<!&)[@#]\w", text)  # nor a mention or an issue
    written = re.findall(r"(?:^\|.*\n)+", text, re.M)
    shown = re.findall(r"<table>.*?</table>", html, re.S)
    assert len(written) == len(shown) > 8
    for source, table in zip(written, shown, strict=True):
        header = source.split("\n", 1)[0].count(" | ") + 1
        rows = re.findall(r"<tr>.*?</tr>", table, re.S)
        assert [row.count("<td") + row.count("<th") for row in rows] == [header] * len(rows)


def test_json_keeps_foreign_text_as_it_was(hostile: Report) -> None:
    text = jsonout.render(hostile)
    assert text.isascii()
    assert "\x1b" not in text
    document = json.loads(text)
    assert document["arms"][1]["lost_examples"][0]["candidate_answer"] == HOSTILE


def test_lost_answers_are_counted_and_a_few_are_told_the_longest_and_each_cell_first(case: Report) -> None:
    fp8, window = case.candidates
    assert (fp8.lost_answers, window.lost_answers) == (1, 5)  # window: depth 0.0 once, depth 0.5 four times
    (lost,) = fp8.lost_examples
    assert (lost.length, lost.depth, lost.context) == (8192, 0.5, 2)
    assert (lost.expected, lost.baseline_answer, lost.candidate_answer) == ("1234567", "1234567", "7654321")
    assert [example.depth for example in window.lost_examples] == [0.0, 0.5, 0.5, 0.5, 0.5]


def test_arms_that_cannot_be_paired_are_invalid_and_still_reported() -> None:
    evidence = _evidence()
    gone = (evidence.answers["arm"] == "fp8") & (evidence.answers["context"] == 3)
    report = build(replace(evidence, answers=evidence.answers[~gone]))
    fp8 = report.candidates[0]
    assert str(report.verdict.outcome) == "INVALID"
    assert fp8.by_length == ()
    assert fp8.pairing_error
    for name, text in _rendered(report).items():
        assert "INVALID" in text, name
    row = dict(tables.main_table(report).rows)["Recall retention"]
    assert [value.text for value in row] == ["", "not measured", "50 %"]
    grid = next(grid for grid in report.grids if grid.arm == "fp8")
    assert cells.cell_text(grid.cells[1][1], baseline=False) == "2/3"  # its own score; no loss is claimed
    assert cells.loss_text(grid.cells[1][1]) == ""
    jsonschema.validate(json.loads(jsonout.render(report)), jsonout.schema())


def test_an_unscored_answer_is_no_zero() -> None:
    """A request that failed leaves its cell with three questions, and is told."""
    evidence = _evidence()
    answers = evidence.answers.copy()
    failed = (answers["arm"] == "fp8") & (answers["prompt_sha256"] == "8192-1.0-0")
    answers = answers.assign(status=answers["status"].mask(failed, "error"), score=answers["score"].mask(failed))
    report = build(replace(evidence, answers=answers))
    fp8 = report.candidates[0]
    assert (fp8.asked, fp8.scored, fp8.deployed_asked, fp8.deployed_scored) == (20, 19, 12, 11)
    cell = next(grid for grid in report.grids if grid.arm == "fp8").cells[1][2]
    assert cell is not None
    assert (cell.asked, cell.scored, cell.score, cell.loss) == (4, 3, 3.0, 0.0)
    assert any(line.startswith("1 question of 20: no score (fp8)") for line in report.not_measured)
    assert dict(tables.main_table(report).rows)["Score"][1].detail == "1 not scored"


def test_a_run_with_empty_tables_is_reported_without_a_number() -> None:
    evidence = _evidence()
    empty: dict[str, Any] = {name: _table(name, []) for name in TABLES if name != "answers"}
    answers = evidence.answers.assign(status="error", score=float("nan"))
    report = build(replace(evidence, answers=answers, **empty))
    assert all(value.text in ("not measured", "") for value in dict(tables.main_table(report).rows)["PPL ratio"])
    assert charts.retention_chart(report) is None
    assert charts.cost_chart(report) is None
    texts = _rendered(report)
    jsonschema.validate(json.loads(texts["json"]), jsonout.schema())
    assert {text for row in _Page(texts["html"]).heat["fp8"][1:] for _, text in row[1:]} == {""}
    for words in ("Memory (all arms)", "Prefill speed (all arms)", "20 questions of 20: no score (all arms)"):
        assert any(line.startswith(words) for line in report.not_measured), words


def test_log_probabilities_that_are_no_numbers_are_told() -> None:
    evidence = _evidence()
    broken = evidence.divergence.copy()
    broken.loc[(broken["arm"] == "fp8") & (broken["position"] == 5), "nll"] = float("nan")
    report = build(replace(evidence, divergence=broken))
    assert report.candidates[0].divergence is None
    assert report.candidates[0].divergence_error
    assert str(report.verdict.outcome) == "INVALID"
    json.loads(jsonout.render(report), parse_constant=pytest.fail)


def test_few_contexts_are_told_where_the_interval_is() -> None:
    plan = _plan()
    plan["experiment"]["contexts"] = plan["experiment"]["contexts"][:1]
    evidence = _evidence(plan)
    one = {name: getattr(evidence, name) for name in ("answers", "divergence", "footprint", "throughput")}
    report = build(replace(evidence, **{name: table[table["context"] == 0] for name, table in one.items()}))
    table = tables.main_table(report)
    detail = dict(table.rows)["Recall retention"][1].detail
    # Depth 0.0 of context 0 was answered by the baseline: three cells of one question each.
    assert detail.endswith("over 3 questions\nin 1 context")
    assert "too few contexts" in table.note
    assert "over the questions in 1 context" in tables.retention_table(report).note


def test_an_unknown_format_names_the_known_ones(case: Report) -> None:
    with pytest.raises(KvevalError, match="'pdf' is not a report format: use one of terminal, md, html, json"):
        reports.render(case, "pdf")


def test_charts_put_more_above_less_and_name_the_numbers(case: Report) -> None:
    chart = charts.retention_chart(case)
    assert chart is not None
    fp8, window = chart.series
    assert [len(series.marks) for series in chart.series] == [2, 2]
    assert fp8.marks[0].y == window.marks[0].y  # both keep all at 4k
    assert fp8.marks[0].y < fp8.marks[1].y < window.marks[1].y  # 100 %, 87.5 %, 50 %; y grows downwards
    half = (fp8.marks[0].y - window.marks[1].y) / (fp8.marks[0].y - fp8.marks[1].y)
    assert half == pytest.approx(4)  # a loss of 50 % is four times one of 12.5 %
    assert fp8.marks[1].high < fp8.marks[1].y < fp8.marks[1].low
    assert fp8.marks[1].text.startswith("8k: 87.5 %")
    assert [tick.text for tick in chart.x_ticks] == ["4k", "8k"]
    assert chart.lines[0].text == "asked for: 99 %"
    cost = charts.cost_chart(case)
    assert cost is not None
    assert cost.series[0].marks[0].x == pytest.approx(cost.series[1].marks[0].x)  # both take half of the bytes
    assert cost.lines[0].at > cost.series[0].marks[0].y > cost.series[1].marks[0].y


def test_a_wide_range_of_ratios_is_drawn_by_its_logarithm() -> None:
    scale = charts.Scale(1.0, 100.0, log=True)
    assert scale(10) == pytest.approx((scale(1) + scale(100)) / 2)
    assert scale.ticks() == [1, 2, 5, 10, 20, 50, 100]
    assert charts.Scale(0.0, 1.0).ticks() == [0, 0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (wording.percent(0.99999), "99.999 %"),
        (wording.percent(1.0), "100 %"),
        (wording.percent(0.98996, near=0.99), "98.996 %"),
        (wording.percent(float("nan")), "-"),
        (wording.number(None), "not measured"),
        (wording.number(float("inf")), "infinite"),
        (wording.span(0.5, 0.75, wording.percent), "50 to 75 %"),
        (wording.span(float("nan"), float("nan")), ""),
        (wording.span(0.9, float("inf"), wording.percent), "90 % to infinite"),
        (wording.tally(15.0, 16), "15/16"),
        (wording.tally(2.5, 4), "2.50/4"),
        (wording.rate(2345.6), "2,346"),
        (wording.rate(5.678), "5.68"),
        (wording.listing(["a", "b", "c"], "or"), "a, b or c"),
        (wording.count(1, "question"), "1 question"),
        (wording.count(1200, "question"), "1,200 questions"),
        (wording.visible("a\x1b[1m\n\t\u200fé→"), "a\\x1b[1m\\n\\t\\u200fé→"),
    ],
)
def test_wording(written: str, expected: str) -> None:
    assert written == expected


@pytest.mark.parametrize(("score", "baseline", "told"), [(3, 4, "-1"), (4, 3, "+1"), (4, 4, ""), (2.5, 3, "-0.50")])
def test_a_loss_has_its_sign(score: float, baseline: float, told: str) -> None:
    cell = Cell(4096, 0.5, 4, 4, score, baseline, True)
    assert cells.loss_text(cell) == told
    assert cells.loss_text(replace(cell, discriminative=False)) == ""


def test_a_grid_with_fractional_scores_says_how_many_cells_lost() -> None:
    row = (Cell(4096, 0.0, 4, 4, 2.5, 4.0, True), Cell(4096, 1.0, 4, 4, 4.0, 4.0, True))
    grid = Grid("fp8", "vt", (4096,), (0.0, 1.0), (row,))
    assert cells.grid_notes(grid, baseline=False) == "Score / questions in each cell. 1 cell lost against the baseline."
    assert [cells.cell_text(cell, baseline=False) for cell in row] == ["2.50/4", "4/4"]
