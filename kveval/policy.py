"""What a verdict asks for: margins, confidence, checks. Read from YAML; a key that is not known is an error."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kveval.errors import KvevalError
from kveval.resources import data_path

CHECKS = ("engaged", "sane", "whole prompts", "paired", "discriminative", "noise floor")


class Policy(BaseModel):
    """A gate's policy. Every key must be given; ``null`` switches off a rule whose type allows it.

    Shares are written as numbers from 0 to 1. configs/gates/default.yaml gives each number's reason.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    confidence: float = Field(gt=0.5, lt=1)  # of each one-sided bound
    retention_margin: float = Field(
        gt=0, le=1
    )  # retention at every length must not be below it; the deployed one must show it
    catastrophe_ratio: float | None = Field(ge=0, lt=1)  # no cell may keep less than this of the baseline's score
    ppl_ratio_max: float | None = Field(gt=0)
    kl_mean_max: float | None = Field(gt=0)  # nats
    top1_agreement_min: float | None = Field(gt=0, le=1)
    min_contexts: int = Field(ge=1)  # fewer cannot PASS
    min_baseline_score: float = Field(gt=0, le=1)  # cells below it are left out: a loss there would not show
    discriminative_cells_min: float = Field(
        gt=0, le=1
    )  # share of the deployed length's cells that must not be left out
    errors_max: float = Field(ge=0, lt=1)  # share of requests that may fail before the run is INVALID
    incomplete_max: float = Field(ge=0, lt=1)  # share of answers that may be cut short before the run cannot PASS
    required_checks: tuple[str, ...] = Field(
        strict=False
    )  # must have passed; any failed check is INVALID, required or not

    @field_validator("required_checks")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in CHECKS:
                raise ValueError(f"'{name}' is no check; known checks: {', '.join(CHECKS)}")
        return names


def load_policy(name_or_path: str) -> Policy:
    """The policy that ships as configs/gates/NAME.yaml, or that of a YAML file (a path, or a name that ends in .yaml).

    Raises KvevalError when there is none, it is not YAML, or a key is unknown, missing or out of range; names the key.
    """
    file = _file(name_or_path)
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise KvevalError(f"policy '{file}' cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise KvevalError(
            f"policy '{file}' holds no keys: copy one of {', '.join(_names())} from configs/gates and change it"
        )
    try:
        return Policy.model_validate(values)
    except ValidationError as error:
        told = "; ".join(_told(dict(problem)) for problem in error.errors())
        raise KvevalError(f"policy '{file}': {told}") from error


def _file(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        if not path.is_file():
            raise KvevalError(f"policy '{name_or_path}' is no file: give a YAML file or one of {', '.join(_names())}")
        return path
    if name_or_path not in _names():
        close = difflib.get_close_matches(name_or_path, _names(), n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        raise KvevalError(
            f"unknown policy '{name_or_path}': {hint}accepted are {', '.join(_names())}, or the path of a YAML file"
        )
    return data_path("configs", "gates", f"{name_or_path}.yaml")


def _names() -> list[str]:
    return sorted(file.stem for file in data_path("configs", "gates").glob("*.yaml"))


def _told(problem: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, Policy.model_fields, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        return f"unknown key '{key}': {hint}accepted are {', '.join(Policy.model_fields)}"
    if problem["type"] == "missing":
        return f"the key '{key}' is missing"
    return f"'{key}' is {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}"
