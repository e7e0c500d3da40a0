"""Hold the installation together: declared packages, pinned versions, and a resolver run for every supported platform.

python -m tools.pins            what can be checked without a network (also a test)
python -m tools.pins --resolve  also resolve for every Python and platform, from the public index alone
python -m tools.pins --write    pin again: newest versions that fit, present pins kept where they still fit
python -m tools.pins --write --upgrade numpy scipy   … and move these to their newest version
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
INDEX = "https://pypi.org/simple"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# name: (uv's platform, sys_platform, platform_system). The CPU build of torch is not on the public index.
PLATFORMS = {
    "Linux CUDA": ("x86_64-manylinux_2_28", "linux", "Linux"),
    "Linux CPU": ("x86_64-manylinux_2_28", "linux", "Linux"),
    "macOS arm64": ("aarch64-apple-darwin", "darwin", "Darwin"),
    "Windows": ("x86_64-pc-windows-msvc", "win32", "Windows"),
}
HEADER = """\
# Every package that any extra needs, on every platform, at the version this repository is tested with.
# Written by `make pins` (python -m tools.pins --write): do not edit by hand. `make lint` checks it.
# torch has no local suffix (+cpu, +cu130), so that the CPU build and the CUDA builds satisfy the pin alike.
"""
# Import names of packages that need not be installed here; all others are looked up in the environment.
DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "lm_eval": "lm-eval",
    "optuna": "optuna",
    "PIL": "pillow",
    "submitit": "hydra-submitit-launcher",
    "trackio": "trackio",
    "transformers": "transformers",
    "triton": "triton",
    "wandb_workspaces": "wandb-workspaces",
    "yaml": "pyyaml",
}


def main(arguments: list[str] | None = None) -> int:
    """Check (and with --write first renew) the pins; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.pins", description=__doc__.splitlines()[0])
    parser.add_argument("--resolve", action="store_true", help="run the resolver for every Python and platform")
    parser.add_argument("--write", action="store_true", help="write constraints.txt")
    parser.add_argument("--upgrade", nargs="*", default=[], metavar="package", help="with --write: renew these")
    options = parser.parse_args(arguments)
    if options.write:
        write(options.upgrade)
    problems = [*undeclared_imports(), *pins_that_contradict(), *unpinned()]
    if options.resolve and not problems:
        problems = list(resolve_all())
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(problems)} problem(s)" if problems else "the pins hold together")
    return bool(problems)


def undeclared_imports(package: Path = ROOT / "polarlm") -> Iterator[str]:
    """Third-party modules that the package imports (anywhere, also inside functions) and pyproject does not declare."""
    declared = {canonicalize_name(r.name) for r in requirements(without=("dev",))}
    distributions = packages_distributions()
    seen: dict[str, Path] = {}
    for file in sorted(package.rglob("*.py")):
        for module in imported_modules(file):
            seen.setdefault(module, file)
    for module, file in seen.items():
        if module in sys.stdlib_module_names or module == package.name:
            continue
        names = {DISTRIBUTIONS[module]} if module in DISTRIBUTIONS else set(distributions.get(module, [module]))
        if not declared & {canonicalize_name(n) for n in names}:
            yield f"{file.relative_to(package.parent)} imports {module}, which pyproject.toml does not declare"


def imported_modules(file: Path) -> Iterator[str]:
    """Top-level names that a file imports absolutely."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def pins_that_contradict() -> Iterator[str]:
    """Pins outside pyproject's bounds on a platform where both apply."""
    declared, pinned = requirements(), pins()
    for name, python, environment in environments():
        for requirement in (r for r in declared if applies(r, environment)):
            for pin in pins_for(requirement, pinned, environment):
                if not requirement.specifier.contains(version(pin)):
                    yield f"{pin} contradicts '{requirement}' of pyproject.toml (Python {python}, {name})"


def unpinned() -> Iterator[str]:
    """Direct dependencies that have no pin, or two, on some platform."""
    declared, pinned = requirements(), pins()
    for name, python, environment in environments():
        for requirement in (r for r in declared if applies(r, environment)):
            if len(lines := pins_for(requirement, pinned, environment)) != 1:
                listed = ", ".join(map(str, lines)) or "nothing"
                yield f"{requirement.name} is pinned by {listed} for Python {python} on {name}: run `make pins`"


def requirements(without: Iterable[str] = ()) -> list[Requirement]:
    """The requirements of pyproject.toml, those of its extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [r for name, listed in project["optional-dependencies"].items() if name not in without for r in listed]
    parsed = [Requirement(text) for text in [*project["dependencies"], *extras]]
    return [r for r in parsed if r.name != project["name"]]


def pins() -> dict[str, list[Requirement]]:
    """The lines of constraints.txt by package."""
    by_name: dict[str, list[Requirement]] = {}
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            by_name.setdefault(canonicalize_name(pin.name), []).append(pin)
    return by_name


def pins_for(
    requirement: Requirement, pinned: dict[str, list[Requirement]], environment: dict[str, str]
) -> list[Requirement]:
    """The pins of one requirement that are in force in one environment."""
    return [pin for pin in pinned.get(canonicalize_name(requirement.name), []) if applies(pin, environment)]


def version(pin: Requirement) -> str:
    """The version of an exact pin."""
    (only,) = pin.specifier
    return only.version


def applies(requirement: Requirement, environment: dict[str, str]) -> bool:
    """Is this requirement in force in that environment?"""
    return requirement.marker is None or requirement.marker.evaluate(environment)


def environments() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Every supported platform and Python, with the markers that they set."""
    machine = {"Linux": "x86_64", "Darwin": "arm64", "Windows": "AMD64"}
    for name, (_, sys_platform, system) in PLATFORMS.items():
        for python in PYTHONS:
            yield (
                name,
                python,
                {
                    "python_version": python,
                    "python_full_version": f"{python}.0",
                    "sys_platform": sys_platform,
                    "platform_system": system,
                    "platform_machine": machine[system],
                    "platform_python_implementation": "CPython",
                    "extra": "",
                },
            )


def write(upgrade: Iterable[str] = ()) -> None:
    """Renew constraints.txt: one resolution for all platforms and Pythons at once, all extras included."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "pins.txt"
        if CONSTRAINTS.exists():
            shutil.copy(CONSTRAINTS, target)  # uv keeps what stands in its output file where it can
        newer = [word for package in upgrade for word in ("--upgrade-package", package)]
        universal = ("--universal", "--python-version", PYTHONS[0], "--all-extras", "--no-annotate", "--no-header")
        uv("pip", "compile", "pyproject.toml", *universal, *newer, "-o", str(target))
        CONSTRAINTS.write_text(HEADER + target.read_text(encoding="utf-8"), encoding="utf-8")


def resolve_all() -> Iterator[str]:
    """Resolve `.[dev]` with the pins, from the public index alone; one problem per combination that fails."""
    with tempfile.TemporaryDirectory() as folder:
        cpu = ("--find-links", str(cpu_torch_stand_in(Path(folder))))
        for name, (platform, _, _) in PLATFORMS.items():
            for python in PYTHONS:
                where = ("--python-version", python, "--python-platform", platform)
                links = cpu if name == "Linux CPU" else ()
                command = ("pip", "compile", "pyproject.toml", "--extra", "dev", "-c", str(CONSTRAINTS), *where, *links)
                try:
                    solution = uv(*command, "--no-annotate", "--no-header")
                except subprocess.CalledProcessError as error:
                    yield f"Python {python} on {name}: {error.stderr.strip()}"
                    continue
                torch = re.search(r"^torch==.*$", solution, re.MULTILINE)
                print(f"Python {python:5} {name:12} {len(solution.splitlines())} packages, {torch and torch[0]}")


def cpu_torch_stand_in(folder: Path) -> Path:
    """A folder with an empty wheel that requires what torch's CPU build requires.

    That build lies on PyTorch's own index, which a resolver for the public index must not need; its version carries
    the suffix +cpu, so that it wins over the CUDA build where both are offered.
    """
    release = version(pins()["torch"][0])
    needs = ("filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5")
    stem = f"torch-{release}+cpu"
    files = {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {release}+cpu\n"
        + "".join(f"Requires-Dist: {need}\n" for need in needs),
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_digest(text)},{len(text)}\n" for name, text in files.items())
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{stem}.dist-info/RECORD": record}.items():
            wheel.writestr(name, text)
    return folder


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def uv(*arguments: str) -> str:
    """Run uv without this machine's own package folders and settings; return what it prints."""
    program = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    # Apple's tags begin at the oldest system that torch has a build for.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UV_")} | {
        "MACOSX_DEPLOYMENT_TARGET": "14.0"
    }
    command = [program, *arguments, "--no-config", "--quiet", "--default-index", INDEX]
    return subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
