"""What a release consists of: one version everywhere, what is in its files, and what the hosting site runs and asks."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddplaunch.cli.main import command
from ddplaunch.version import __version__
from tests.support.docs import PAGES
from tests.support.runs import ROOT

OF_A_RELEASE = {
    *PAGES,
    ROOT / "LICENSE",
    ROOT / "mkdocs.yml",
    ROOT / "pyproject.toml",
    ROOT / ".gitignore",
    ROOT / ".pre-commit-config.yaml",
}
FOLDERS = (".ci", ".github", "ddplaunch", "docs", "scripts", "tests")
TEMPLATES = ROOT / ".github/ISSUE_TEMPLATE"


def read(name: str) -> str:
    return (ROOT / name).read_text()


def files_below(folder: str) -> set[Path]:
    """All but what running the programs leaves there."""
    return {path for path in (ROOT / folder).rglob("*") if path.is_file() and path.parent.name != "__pycache__"}


def names(files: set[Path]) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in files}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    subprocess.run((sys.executable, "-m", "hatchling", "build", "-d", str(folder)), cwd=ROOT, check=True)
    return folder


def test_the_sdist_is_the_repository_and_nothing_beside_it(built: Path) -> None:
    with tarfile.open(built / f"ddplaunch-{__version__}.tar.gz") as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    assert held == names(OF_A_RELEASE.union(*map(files_below, FOLDERS))) | {"PKG-INFO"}


def test_the_wheel_is_the_package_with_its_documentation(built: Path) -> None:
    with zipfile.ZipFile(built / f"ddplaunch-{__version__}-py3-none-any.whl") as wheel:
        held = set(wheel.namelist())
        metadata = wheel.read(f"ddplaunch-{__version__}.dist-info/METADATA").decode()
    documentation = {f"ddplaunch/{name}" for name in names(files_below("docs"))}
    assert {name for name in held if ".dist-info/" not in name} == names(files_below("ddplaunch")) | documentation
    assert f"ddplaunch-{__version__}.dist-info/licenses/LICENSE" in held
    assert f"\nVersion: {__version__}\n" in metadata


def test_an_empty_venv_is_lent_what_is_declared_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = {
        "ddplaunch": ["first[some]>=1", "rest; extra == 'all'"],
        "first": ["second; extra == 'some'", "third; extra == 'others'", "absent; python_version < '3'"],
        "second": ["first"],
        "third": [],
        "rest": [],
    }
    (tmp_path / "site" / "shared").mkdir(parents=True)
    for name, needs in declared.items():
        (tmp_path / "site" / "shared" / f"{name}.py").touch()  # Python 3.12 leaves files out that do not exist.
        info = tmp_path / "site" / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        requires = "".join(f"Requires-Dist: {each}\n" for each in needs)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{requires}")
        (info / "RECORD").write_text(f"shared/{name}.py,,\n{info.name}/METADATA,,\n../../bin/{name},,\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    lend = runpy.run_path(str(ROOT / "scripts/lib/lend_packages.py"))["main"]
    (lent := Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "venv")}))).mkdir(parents=True)
    lend(str(tmp_path / "venv"))
    assert {link.name for link in lent.iterdir()} == {"shared", "first-1.dist-info", "second-1.dist-info"}
    assert (lent / "shared").resolve() == tmp_path / "site" / "shared"


def test_the_newest_release_of_the_changelog_is_this_version() -> None:
    headings = re.findall(r"^## (.*)$", read("CHANGELOG.md"), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert headings[-len(released) :] == released
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - 20\d\d-\d\d-\d\d", heading) for heading in released)
    assert released[0].split()[0] == __version__
    assert 'path = "ddplaunch/version.py"' in read("pyproject.toml")


def workflow() -> dict[str, Any]:
    return yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]["ci"]


def test_the_workflow_has_the_steps_of_every_other_ci() -> None:
    """All are in one file: a step that is added there is run by the workflow, too."""
    assert [step["run"] for step in workflow()["steps"] if "run" in step] == [".ci/run"]
    assert set(re.findall(r"scripts/(\w+)\b(?!/)", read(".ci/run"))) == {"check", "test", "site", "build", "compat"}


def test_the_workflow_runs_the_pythons_that_are_promised() -> None:
    promised = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', read("pyproject.toml"))
    assert workflow()["strategy"]["matrix"]["python"] == promised
    assert f'requires-python = ">={promised[0]}"' in read("pyproject.toml")
    assert f"({promised[0]} to {promised[-1]} are tested)" in read("README.md")


def test_the_hook_before_a_commit_is_our_check() -> None:
    [repository] = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"] for hook in repository["hooks"]] == ["scripts/check"]


def fields(name: str) -> Iterator[dict[str, Any]]:
    return (field for field in yaml.safe_load((TEMPLATES / name).read_text())["body"] if field["type"] != "markdown")


def test_a_report_of_a_bug_brings_what_is_needed_first() -> None:
    asked = {field["attributes"]["label"] for field in fields("bug_report.yml")}
    assert {"Output of `ddplaunch --version`", "Output of `ddplaunch --check`", "report.json of the run"} <= asked


@pytest.mark.parametrize("name", ["bug_report.yml", "feature_request.yml"])
def test_options_that_a_form_names_exist(name: str) -> None:
    ours = {option for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"--[a-z][a-z-]*", (TEMPLATES / name).read_text())) <= ours
    assert len({field["id"] for field in fields(name)}) == len([*fields(name)])
