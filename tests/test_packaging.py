"""What a person with pip gets: a wheel with the package, the tasks and the configs, which needs no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kveval
from kveval.resources import data_path

ROOT = Path(kveval.__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, unpacked as pip would."""
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(out / "site")
    return out / "site"


def files(root: Path, *suffixes: str) -> set[str]:
    """Relative paths of the files below ``root``."""
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.suffix in suffixes and "__pycache__" not in p.parts}


def test_the_wheel_holds_all_of_the_package_and_its_data(installed: Path) -> None:
    shipped = installed / "kveval"
    assert files(ROOT / "kveval", ".py", ".j2", ".json", ".html", ".css") <= files(
        shipped, ".py", ".j2", ".json", ".html", ".css"
    )
    assert files(ROOT / "configs", ".yaml") == files(shipped / "_data" / "configs", ".yaml")
    assert files(ROOT / "tasks", ".yaml") == files(shipped / "_data" / "tasks", ".yaml")
    assert {path.name for path in installed.iterdir()} == {"kveval", f"kveval-{kveval.__version__}.dist-info"}


def test_the_installed_package_reads_its_own_data(installed: Path, tmp_path: Path) -> None:
    code = """if True:
        from kveval.models.catalogue import catalogue_names
        from kveval.resources import data_path
        print(data_path("tasks"), *catalogue_names())
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.stdout.split() == [str(installed / "kveval" / "_data" / "tasks"), "smollm2-135m"], done.stderr


def test_the_checkout_reads_the_files_beside_the_package() -> None:
    assert data_path("configs", "models", "smollm2-135m.yaml") == ROOT / "configs" / "models" / "smollm2-135m.yaml"
