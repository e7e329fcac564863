"""The command line: parse, one call, echo. Everything heavy is imported by what is called."""

from __future__ import annotations

import errno
import functools
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kveval import __version__
from kveval.errors import KvevalError
from kveval.units import parse_tokens

# What the machine refuses in the middle of a write; any other OSError is a bug and stays loud.
MACHINE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM}
MOST_THREADS = 1024  # OpenMP crashes the process when it cannot start as many threads as it is told to

F = TypeVar("F", bound=Callable[..., Any])

# Packages that not every installation has, and the extra that brings them.
OPTIONAL = dict.fromkeys(
    ("torch", "transformers", "tokenizers", "safetensors", "lm_eval", "datasets", "gguf"), "transformers"
)


class Tokens(click.ParamType):
    """A number of tokens: 131072 or 128k."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Tokens as a whole number."""
        try:
            return value if isinstance(value, int) else parse_tokens(value)
        except KvevalError as error:
            self.fail(str(error), param, ctx)


class Listed(click.ParamType):
    """Values separated by commas, each converted by ``each``."""

    def __init__(self, each: Callable[[str], Any], name: str) -> None:
        self.each, self.name = each, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """All values, in order."""
        if not isinstance(value, str):
            return tuple(value)
        try:
            found = tuple(self.each(part) for part in value.split(",") if part.strip())
        except KvevalError as error:
            self.fail(str(error), param, ctx)
        except ValueError:
            self.fail(f"'{value}' is not a list of numbers separated by commas", param, ctx)
        if not found:  # an unset variable in a script, not a wish for the default
            self.fail("no value is given: write one or more, separated by commas", param, ctx)
        return found


def plain_errors(command: F) -> F:
    """Turn what went wrong into one sentence on stderr and the exit code of DESIGN; never a traceback for a user's mistake."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except KvevalError as error:
            click.secho(f"kveval: {error}", fg="red", err=True)
            sys.exit(error.exit_code)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            click.secho(
                f"kveval: this needs {error.name}: pip install 'kveval[{OPTIONAL[error.name]}]'", fg="red", err=True
            )
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo(
                "kveval: stopped; what was answered is kept, and the same command continues from there", err=True
            )
            sys.exit(130)
        except BrokenPipeError:
            sys.stderr.close()  # the reader of our output has gone: nothing is left to say
            sys.exit(141)
        except OSError as error:
            if error.errno not in MACHINE_ERRORS:
                raise
            place = f" '{error.filename}'" if error.filename else " the output"
            click.secho(f"kveval:{place} cannot be written ({error.strerror})", fg="red", err=True)
            sys.exit(5)

    return wrapped  # type: ignore[return-value]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="kveval")
def main() -> None:
    """May this KV cache format be shipped for this model at this context length?

    kveval reads long documents through a model whose KV cache is stored in the format, asks what was in them, and
    compares recall, perplexity, memory and speed with the BF16 cache.

    \b
    kveval run --kv fp8 --ctx 128k                       on the built-in probe
    kveval run --model DIR --kv fp8 --kv int4-g32 --ctx 32k
    kveval gate runs/DIR                                 exit 0 PASS, 1 FAIL, 3 INCONCLUSIVE, 4 INVALID
    kveval report runs/DIR --format html --out report.html

    Exit codes: 0 done, 2 usage error, 4 the evidence is INVALID, 5 the engine or the machine failed.
    """


@main.command()
@click.option(
    "--tasks",
    "tasks",
    type=Listed(str.strip, "TASK,..."),
    default="needles",
    show_default=True,
    help="What is asked: needles (a grid, length x depth), ruler (its thirteen tasks), hard (look-alike needles), or single "
    "tasks (vt,fwe). 'kveval tasks' lists them.",
)
@click.option(
    "--protocol",
    type=click.Choice(["shared", "strict"]),
    default="shared",
    show_default=True,
    help="shared: many questions about each context. strict: one question in each context, as in published RULER tables, "
    "and --contexts of each task.",
)
@click.option(
    "--kv",
    "kv",
    multiple=True,
    default=["fp8"],
    show_default=True,
    metavar="FORMAT",
    help="KV format to judge against the baseline; repeat it for more: fp8, int4-g32, kivi4, window:4k, a named one "
    "(vllm-int8) or a YAML file. 'kveval formats' lists them.",
)
@click.option(
    "--baseline",
    type=click.Choice(["bf16", "fp16"]),
    default="bf16",
    show_default=True,
    help="The 16-bit cache that candidates are compared with.",
)
@click.option(
    "--ctx",
    "ctx_tokens",
    type=Tokens(),
    required=True,
    help="Context length to judge: 128k is 131,072 tokens, 128000 is 128,000.",
)
@click.option(
    "--model",
    default="probe",
    show_default=True,
    help="The built-in probe (measures the instrument, not your model; probe:outlier=3e6 plants an outlier channel), "
    "smollm2-135m, a checkpoint directory or a hub id.",
)
@click.option(
    "--contexts",
    type=click.IntRange(min=1),
    help="Contexts that each arm reads.  [default: about 131,072 tokens' worth, at most 8]",
)
@click.option(
    "--lengths",
    type=Listed(parse_tokens, "tokens,..."),
    help="Lengths at which questions are asked; the longest must be --ctx.  [default: doubling from 4k]",
)
@click.option(
    "--depths",
    type=Listed(float, "0..1,..."),
    help="Depths of the needles, 0 the start of the context, 1 its end.  [default: 0,0.1,...,1]",
)
@click.option(
    "--needles",
    type=int,
    help="Questions for each length, depth and context (about 256 in all by default); with other tasks, for each task, length "
    "and context (2 by default).",
)
@click.option(
    "--haystack",
    default="auto",
    show_default=True,
    help="Text around the needles: noise (generated), pydoc (Python's own documentation), a text file or a folder. "
    "auto: noise for the probe, pydoc otherwise.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Another seed gives other needles at other places."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Run directory.  [default: runs/MODEL-CTX-HASH, the same for the same command]",
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
@click.option(
    "--threads", type=click.IntRange(1, MOST_THREADS), help="CPU threads; part of the plan.  [default: all cores]"
)
@click.option(
    "--chunk",
    "chunk_tokens",
    type=Tokens(),
    default=4096,
    show_default=True,
    help="Tokens that one forward pass reads.",
)
@click.option(
    "--gate",
    "policy",
    metavar="POLICY",
    help="Judge by this policy and exit 0 PASS, 1 FAIL, 3 INCONCLUSIVE, 4 INVALID.",
)
@click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
@plain_errors
def run(policy: str | None, out: Path | None, quiet: bool, depths: tuple[float, ...] | None, **asked: Any) -> None:
    """Measure one or more KV formats against a 16-bit one.

    Each context is read once by each arm; its questions are asked on the way. A run that was stopped continues
    when the same command is given again. The run directory holds the rows from which every number is computed.

    \b
    kveval run --kv fp8 --ctx 128k
    kveval run --model smollm2-135m --kv fp8 --kv int4-g32 --kv window:1k --ctx 2k
    kveval run --model smollm2-135m --tasks ruler --kv int4-g32 --ctx 4k
    kveval run --model meta-llama/Llama-3.1-8B-Instruct --kv fp8 --ctx 128k --contexts 8 --gate default
    """
    _plain_interrupts()
    from kveval.runs.plan import Request, resolve_plan
    from kveval.runs.progress import Progress
    from kveval.runs.runner import run as carry_out

    verdict_policy = _policy(policy)
    if depths is not None:
        asked["depths"] = depths
    request = Request(**asked, command=_command())
    progress = Progress(quiet=quiet)
    progress.note(f"planning: {request.model}, {request.ctx_tokens:,} tokens")
    plan = resolve_plan(request)
    directory = carry_out(plan, out or Path("runs") / plan.directory_name, progress)
    outcome = _show(directory, verdict_policy)
    click.echo(f"\nrun directory: {directory}")
    sys.exit(_exit_code(outcome, gated=policy is not None))


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--format", "kind", type=click.Choice(["terminal", "md", "html", "json"]), default="terminal", show_default=True
)
@click.option("--out", type=click.Path(path_type=Path), help="Write here instead of to the terminal.")
@click.option("--policy", metavar="POLICY", help="Judge by this policy: default, strict, exploratory or a YAML file.")
@plain_errors
def report(directory: Path, kind: str, out: Path | None, policy: str | None) -> None:
    """Show a finished run again, in the terminal or as a file to publish.

    \b
    kveval report runs/probe-128k-0123456789
    kveval report runs/probe-128k-0123456789 --format html --out report.html
    """
    if kind == "terminal" and out is None:
        _show(directory, _policy(policy))
        return
    text = _report_text(directory, _policy(policy), kind)
    if out is None:
        click.echo(text)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvevalError(f"'{out}' cannot be written ({error.strerror}): name another file with --out") from error
    click.echo(f"wrote {out}", err=True)


@main.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    default="default",
    show_default=True,
    metavar="POLICY",
    help="default, strict, exploratory or a YAML file.",
)
@plain_errors
def gate(directory: Path, policy: str) -> None:
    """Judge a finished run by a policy: exit 0 PASS, 1 FAIL, 3 INCONCLUSIVE, 4 INVALID.

    \b
    kveval gate runs/probe-128k-0123456789 && echo ship it
    """
    from kveval.gate import EXIT_CODES, decide
    from kveval.runs.evidence import load

    evidence = load(directory)
    verdict = decide(evidence, _policy(policy))
    if evidence.plan["experiment"]["model"]["instrument"]:
        click.echo("The built-in probe: this measures the instrument, not your model.")
    for arm in verdict.arms:
        click.echo(arm.sentence)
        for rule in arm.rules:
            click.echo(f"  {rule.outcome!s:<13} {rule.name}, {rule.scope}: {rule.detail}")
    sys.exit(EXIT_CODES[verdict.outcome])


@main.command()
@click.argument("name", required=False)
@click.option("--model", help="Explain it for this model: probe, smollm2-135m, a checkpoint directory or a hub id.")
@click.option(
    "--geometry",
    metavar="LAYERSxKV_HEADSxHEAD_DIM",
    help="Explain it for a model of this shape.  [default: 80x8x128, Llama-3.3-70B]",
)
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
@plain_errors
def formats(name: str | None, model: str | None, geometry: str | None, as_json: bool) -> None:
    """List the KV formats, or explain one: layout, bytes, which engines serve it, source.

    \b
    kveval formats
    kveval formats kivi4,residual=32
    kveval formats int4-g32 --geometry 32x8x128
    kveval formats fp8 --model smollm2-135m --json
    """
    import json

    from kveval.formats import explain, listing

    if name is None:
        if model or geometry:
            raise KvevalError("--model and --geometry explain one format: name it, for instance kveval formats fp8")
        click.echo(json.dumps(listing.as_data(), indent=2) if as_json else listing.as_text())
        return
    from kveval.formats.named import resolve_format

    fmt, shape = resolve_format(name), _geometry(model, geometry)
    click.echo(json.dumps(explain.as_data(fmt, *shape), indent=2) if as_json else explain.explain(fmt, *shape))


@main.command()
@click.option("--path", is_flag=True, help="Print the directory for lm-eval's --include_path.")
@plain_errors
def tasks(path: bool) -> None:
    """List the lm-eval tasks that come with kveval, with lengths and questions.

    \b
    lm_eval --model hf --model_args pretrained=DIR --include_path "$(kveval tasks --path)" --tasks kveval_needle_grid
    lm_eval --model hf --model_args pretrained=DIR --include_path "$(kveval tasks --path)" --tasks kveval_ruler_32k
    """
    if path:
        from kveval.lmtasks import tasks_path

        click.echo(tasks_path())
        return
    from kveval.task_list import listing

    click.echo(listing())


@main.group()
def models() -> None:
    """Models that need no hub: the probe, and a small real one.

    \b
    kveval models get smollm2-135m
    kveval models export probe ./probe-checkpoint
    """


@models.command("get")
@click.argument("name")
@plain_errors
def models_get(name: str) -> None:
    """Fetch a demo model once; it then works offline as --model NAME.

    \b
    kveval models get smollm2-135m
    """
    from kveval.models.fetch import get

    click.echo(get(name, progress=lambda text: click.echo(text, err=True)))


@models.command("export")
@click.argument("name", type=click.Choice(["probe"]))
@click.argument("directory", type=click.Path(path_type=Path))
@plain_errors
def models_export(name: str, directory: Path) -> None:
    """Write the probe as an ordinary Hugging Face checkpoint that any engine loads.

    \b
    kveval models export probe ./probe-checkpoint
    """
    from kveval.probe.model import export

    export(directory)
    click.echo(f"wrote {directory}")


def _policy(name: str | None) -> Any:
    from kveval.gate import load_policy

    return load_policy("default" if name is None else name)


def _geometry(model: str | None, geometry: str | None) -> Any:
    """The shape that was asked for, and in words."""
    from kveval.formats.explain import DEFAULT_GEOMETRY, describe, parse_geometry

    if model is None:
        return parse_geometry(DEFAULT_GEOMETRY if geometry is None else geometry)
    if geometry is not None:
        raise KvevalError(f"--model {model} has a shape of its own: leave out --geometry {geometry}")
    from kveval.memory.geometry import from_config
    from kveval.models.catalogue import resolve
    from kveval.models.load import load_config

    source = resolve(model)
    shape = from_config(load_config(source))
    return shape, describe(shape, source.name)


def _show(directory: Path, policy: Any) -> Any:
    """Print the terminal report; returns the verdict's outcome."""
    from kveval.report.data import build
    from kveval.report.terminal import render
    from kveval.runs.evidence import load

    built = build(load(directory), policy)
    click.echo(render(built, color=_wants_color()))
    return built.verdict.outcome


def _wants_color() -> bool:
    """A terminal that shows escape sequences, and a user who has not asked for none (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _report_text(directory: Path, policy: Any, kind: str) -> str:
    from kveval.report import render
    from kveval.report.data import build
    from kveval.runs.evidence import load

    return render(build(load(directory), policy), kind)


def _exit_code(outcome: Any, *, gated: bool) -> int:
    from kveval.gate import EXIT_CODES, Outcome

    return EXIT_CODES[outcome] if gated or outcome == Outcome.INVALID else 0


def _command() -> str:
    """What was typed, for plan.json."""
    command = f"kveval {shlex.join(sys.argv[1:])}"
    try:
        command.encode()
    except UnicodeEncodeError as error:
        shown = command.encode(errors="backslashreplace").decode()
        raise KvevalError(f"an argument is not UTF-8 text ({shown}): rename the file or folder") from error
    return command


def _plain_interrupts() -> None:
    """SIGTERM ends a run as Ctrl-C does: through the context managers that own the journal and the lock."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    main()
