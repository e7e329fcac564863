"""A run directory: one experiment, one process at a time, whole when its manifest is there."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from kveval.errors import KvevalError
from kveval.runs.evidence import read_json

PLAN, MANIFEST, JOURNAL, LOCK, HOLDER = "plan.json", "manifest.json", "journal.sqlite", "run.lock", "holder.json"
# What a process that died before its plan was written may leave. A journal is not among it: without its plan nobody
# knows whose answers it holds.
_BEFORE_PLAN = {LOCK, HOLDER, f"{HOLDER}.partial", f"{PLAN}.partial"}


def is_whole(directory: Path) -> bool:
    """Whether a finished run lies there."""
    return (directory / MANIFEST).is_file()


@contextmanager
def claim(directory: Path, plan: dict[str, Any]) -> Iterator[Path]:
    """The directory for this plan and this process alone; made if it is not there. Yields where work in progress may lie.

    Raises KvevalError when it cannot be written, holds something else or another experiment, or is in use.
    """
    check_foreign(directory, plan)
    new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileLock(directory / LOCK, timeout=0)
        lock.acquire()
    except Timeout:
        raise KvevalError(
            f"'{directory}' is in use by {_holder(directory)}: wait for it, or choose another with --out"
        ) from None
    except OSError as error:
        raise KvevalError(
            f"the run directory '{directory}' cannot be written ({error.strerror}): choose another with --out"
        ) from error
    try:
        work = _move_in(directory, plan)
        yield work
        shutil.rmtree(work)
        (directory / HOLDER).unlink()
    except KvevalError as error:
        if (
            new and error.exit_code == KvevalError.exit_code
        ):  # what was asked for cannot be run: leave no directory behind
            shutil.rmtree(directory)
        raise
    finally:
        lock.release()
    (directory / LOCK).unlink(missing_ok=True)


def _move_in(directory: Path, plan: dict[str, Any]) -> Path:
    """Say who is here and what for; returns where work in progress may lie."""
    work = directory / "work"
    try:
        write_json(directory / HOLDER, {"process": os.getpid(), "host": socket.gethostname()})
        if not (directory / PLAN).exists():
            write_json(directory / PLAN, plan)
        work.mkdir(exist_ok=True)
    except OSError as error:
        raise KvevalError(
            f"'{error.filename}' cannot be written ({error.strerror}): choose another directory with --out"
        ) from error
    return work


def check_foreign(directory: Path, plan: dict[str, Any]) -> None:
    """Raises KvevalError when ``directory`` holds another experiment than ``plan``, or something that is no run."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise KvevalError(f"'{directory}' is a file: name a directory with --out")
    if not (directory / PLAN).exists():
        others = sorted({entry.name for entry in directory.iterdir()} - _BEFORE_PLAN)
        if others:
            raise KvevalError(
                f"'{directory}' holds other things ({others[0]} ...): name a new or empty directory with --out"
            )
        return
    there = read_json(directory / PLAN)
    if there.get("hash") != plan["hash"]:
        differing = difference(there.get("experiment"), plan["experiment"])
        raise KvevalError(f"'{directory}' holds another experiment ({differing}): choose another directory with --out")


def difference(there: Any, here: Any, path: str = "") -> str:
    """The first place where two experiments differ, in words."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted(there.keys() | here.keys()):
            if there.get(key) != here.get(key):
                return difference(there.get(key), here.get(key), f"{path}.{key}" if path else key)
    short_there, short_here = (text if len(text) < 60 else text[:57] + "..." for text in (str(there), str(here)))
    return f"{path or 'plan'} is {short_there} there and {short_here} here"


def write_json(file: Path, value: Any) -> None:
    """Write JSON whole or not at all (temporary file, rename)."""
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, file)


def _holder(directory: Path) -> str:
    try:
        holder = read_json(directory / HOLDER)
    except KvevalError:
        return "another process"
    return f"process {holder.get('process')} on {holder.get('host')}"
