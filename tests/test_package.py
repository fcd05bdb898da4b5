"""The wheel carries conf/ and recipes/ and works from any folder; an editable checkout does too; versions agree."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import lightning_megascale
from tests.cli.run_megascale import REPOSITORY, TINY, environment


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    code = f"import hatchling.build; print(hatchling.build.build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


def test_the_wheel_holds_everything(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "recipes", "lightning_megascale"):
        for file in (REPOSITORY / folder).rglob("*"):
            if file.suffix in (".py", ".yaml"):
                inside = file.relative_to(REPOSITORY).as_posix()
                assert (inside if folder == "lightning_megascale" else f"lightning_megascale/{inside}") in names
    assert not [name for name in names if name.startswith(("tests/", "conf/", "recipes/")) or name.endswith("ruff.toml")]
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("where", ["wheel", "checkout"])
def test_config_is_found_from_any_folder(wheel, where, tmp_path):
    path = REPOSITORY
    if where == "wheel":
        path = tmp_path / "unpacked"
        zipfile.ZipFile(wheel).extractall(path)
    code = (
        "import sys; sys.argv = ['megascale', 'train', 'recipe=sweeps/learning_rate', 'model=dense_175b', '--cfg', 'job'];"
        "from lightning_megascale.cli.__main__ import main; main();"
        "import lightning_megascale.cli.config as config; print('root', config.ROOT)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd="/", env=environment(PYTHONPATH=str(path)), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "num_layers: 96" in done.stdout
    assert f"root {path / 'lightning_megascale' if where == 'wheel' else path}" in done.stdout


def test_the_wheel_says_what_it_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    lines = archive.read(name).decode().splitlines()
    assert f"Version: {lightning_megascale.__version__}" in lines
    assert "Requires-Python: <3.14,>=3.10" in lines
    assert "Requires-Dist: lightning<2.7,>=2.6.4" in lines  # 2.6.2 and 2.6.3 were pulled
    assert "Requires-Dist: torch<2.14,>=2.12" in lines


@pytest.mark.slow
def test_a_fresh_environment_trains_from_the_wheel(wheel, tmp_path):
    """The wheel installed alone; the dependencies are this environment's."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    script = Path(tmp_path / "venv" / "bin" / "megascale")
    variables = environment()
    variables.pop("PYTHONPATH")
    done = subprocess.run([script, "train", *TINY], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "quickstart" / "finished.json").exists()
    where = [str(python), "-c", "import lightning_megascale.cli.config as config; print(config.ROOT)"]
    assert str(site) in subprocess.run(where, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=60, check=False).stdout
