"""The wheel works without the repository: built, installed into a second environment, used from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from polarlm import __version__

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "data=text", "data.path=text.txt", "data.split.val=0.1", "tokenizer=byte", "logger=none",
    "model.d_model=16", "model.n_layer=1", "model.n_head=2", "model.context=16",
    "trainer.max_steps=4", "trainer.batch_tokens=64", "trainer.val_every=2", "diagnostics.every=2",
)  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True)
    (built,) = folder.glob("*.whl")
    return built


class Elsewhere:
    """An empty folder and an environment in which only the wheel provides polarlm."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.folder, environment = folder / "empty", folder / "environment"
        self.folder.mkdir()
        venv.create(environment, with_pip=False)
        self.scripts = environment / ("Scripts" if os.name == "nt" else "bin")
        pip = [sys.executable, "-m", "pip", "--python", str(self.scripts / "python"), "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
        (packages,) = environment.rglob("site-packages")
        # torch and the other libraries are borrowed from the environment of the tests; a line in a .pth file does not
        # make Python read the .pth files there, so that an editable polarlm in it stays out of sight.
        (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(self, *arguments: str, program: str = "polarlm") -> str:
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "POLARLM_CACHE")}
        done = subprocess.run(
            [self.scripts / program, *arguments], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def elsewhere(wheel, tmp_path_factory) -> Elsewhere:
    place = Elsewhere(wheel, tmp_path_factory.mktemp("elsewhere"))
    (place.folder / "text.txt").write_text("".join(f"{i} lamps and {i * i % 7} rivers.\n\n" for i in range(400)))
    place.run("train", *TINY, "block=polar", "name=first")
    return place


def test_the_wheel_holds_the_package_its_configs_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {str(path.relative_to(ROOT / "configs")) for path in (ROOT / "configs").rglob("*.yaml")}
    assert {n.removeprefix("polarlm/configs/") for n in names if n.startswith("polarlm/configs/")} == shipped
    assert "polarlm/py.typed" in names and "polarlm/report/assets/page.html" in names
    assert {n.partition("/")[0] for n in names} == {"polarlm", "hydra_plugins", f"polarlm-{__version__}.dist-info"}


def test_the_installed_package_is_the_one_that_runs(elsewhere):
    file = elsewhere.run("-c", "import polarlm; print(polarlm.__file__)", program="python")
    assert Path(file.strip()).is_relative_to(elsewhere.scripts.parent)
    assert elsewhere.run("--version").strip() == f"polarlm {__version__}"


def test_a_run_trained_from_an_empty_folder_is_judged_used_and_compared_there(elsewhere):
    summary = json.loads((elsewhere.folder / "runs" / "first" / "summary.json").read_text())
    assert summary["status"] == "finished" and (elsewhere.folder / "data" / "cache").is_dir()
    elsewhere.run("eval", "checkpoint=runs/first", "out=numbers.json")
    numbers = json.loads((elsewhere.folder / "numbers.json").read_text())
    assert numbers["val/loss"] == pytest.approx(summary["val/loss"], rel=1e-6)
    assert elsewhere.run("generate", "runs/first", "--prompt", "12 lamps", "--tokens", "8").strip()
    elsewhere.run("compare", "runs", "--out", "report.html")
    assert (elsewhere.folder / "report.html").stat().st_size > 10_000


def test_a_folder_configs_beside_the_user_adds_choices(elsewhere):
    own = elsewhere.folder / "configs"
    (own / "block").mkdir(parents=True)
    (own / "data").mkdir()
    (own / "block" / "mine.yaml").write_text("defaults: [polar]\nnu_t: 3.0\n")
    (own / "data" / "lamps.yaml").write_text("defaults: [text]\nname: lamps\npath: text.txt\n")
    elsewhere.run("train", *TINY, "block=mine", "name=second")
    config = (elsewhere.folder / "runs" / "second" / "config.yaml").read_text()
    assert "nu_t: 3.0" in config and "block: mine" in config
    assert "train" in elsewhere.run("data", "info", "data=lamps", "tokenizer=byte", "data.split.val=0.1")
