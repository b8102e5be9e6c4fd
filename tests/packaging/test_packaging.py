"""What is shipped: sdist and wheel hold every source once, and the installed wheel works away from the tree.

The wheel is installed in a fresh environment whose dependencies are those of the environment of the tests, by path: an
environment's own `.pth` files are not read there, so that the editable install of the tree stays out of sight.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

import harness

ROOT = Path(__file__).parents[2]
FOLDERS = {"src/harness": "harness", "build": "harness/build", "runtime": "harness/runtime", "calib": "harness/calib"}


def shipped_files() -> dict[str, str]:
    """Path in the wheel of every file of the package, by path in the tree."""
    files: dict[str, str] = {}
    for folder, target in FOLDERS.items():
        for parent, folders, names in os.walk(ROOT / folder, followlinks=False):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in names:
                if not name.endswith((".md", ".pyc")):
                    path = Path(parent, name).relative_to(ROOT).as_posix()
                    files[path] = f"{target}/{path.removeprefix(folder + '/')}"
    return files


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True, kw_only=True)
class Distributions:
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The sdist, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Distributions(sdist=sdist, wheel=wheel)


@pytest.fixture(scope="module")
def environment(distributions: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a fresh environment that holds the wheel."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    install = ("install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, *install, distributions.wheel, cwd=home)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    dependencies = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    return home / "bin"


def test_wheel_holds_every_source_once(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as wheel:
        names = Counter(name for name in wheel.namelist() if ".dist-info/" not in name)
    assert names == Counter(shipped_files().values())


def test_sdist_holds_every_source_once(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as sdist:
        assert all(member.isfile() for member in sdist.getmembers())
        names = Counter(member.name.split("/", 1)[1] for member in sdist.getmembers())
    assert set(names.values()) == {1}
    assert set(shipped_files()) <= set(names)
    linked = ("src/harness/build/", "src/harness/runtime/", "src/harness/calib/")
    assert not [name for name in names if name.startswith(linked)]
    assert {"LICENSE", "README.md", "pyproject.toml", "docs/manifest.schema.json"} <= set(names)


def test_wheel_is_typed_and_licensed(distributions: Distributions) -> None:
    with zipfile.ZipFile(distributions.wheel) as wheel:
        names = wheel.namelist()
        (licence,) = [name for name in names if name.endswith("licenses/LICENSE")]
        assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    assert "harness/py.typed" in names


@pytest.mark.parametrize("command", ["harness-build", "harness-run"])
def test_console_scripts_run_from_another_folder(environment: Path, command: str, tmp_path: Path) -> None:
    assert "Usage" in run(environment / command, "--help", cwd=tmp_path)
    assert run(environment / command, "--version", cwd=tmp_path).strip() == harness.__version__
    assert not list(tmp_path.iterdir())


def test_every_module_imports_without_torch(environment: Path, tmp_path: Path) -> None:
    said = run(environment / "python", ROOT / "scripts" / "import-all", cwd=tmp_path)
    num_modules, path = int(said.split()[0]), Path(said.split()[-1])
    assert num_modules == sum(name.endswith(".py") for name in shipped_files())
    assert path.is_relative_to(environment.parent)
