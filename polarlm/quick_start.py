"""A quick start for our programs: Lightning without the scientific libraries that its metrics package would bring.

Lightning imports torchmetrics, which imports scipy and transformers, when they are installed, for metrics that nothing
here uses: half of the time until a command begins to work. Programs say `skip_unused_libraries()` before they import
Lightning; a notebook that imports polarlm gets the whole torchmetrics.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

UNUSED = ("scipy", "transformers", "matplotlib")


def skip_unused_libraries() -> None:
    """Let torchmetrics, when it is imported later, believe that they are not installed; nobody else is told so."""
    if "torchmetrics" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds torchmetrics as everyone else would, and looks after its execution; then it is gone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchmetrics":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with _unused_seem_absent():
                    execute(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def _unused_seem_absent() -> Iterator[None]:
    import lightning_utilities.core.imports

    known: Any = lightning_utilities.core.imports
    if not hasattr(known, "package_available") or not hasattr(known.RequirementCache, "_check_requirement"):
        yield  # another version asks in another way: everything is imported, as without us
        return
    available, check = known.package_available, known.RequirementCache._check_requirement

    def package_available(name: str) -> bool:
        return name not in UNUSED and available(name)

    def check_requirement(self: Any) -> None:
        if str(self.requirement).startswith(UNUSED):
            self.available, self.message = False, f"{self.requirement} is left out by polarlm.quick_start"
        else:
            check(self)

    known.package_available, known.RequirementCache._check_requirement = package_available, check_requirement
    try:
        yield
    finally:
        known.package_available, known.RequirementCache._check_requirement = available, check
