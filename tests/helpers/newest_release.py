"""The names that trainer/ imports from a library, looked up in its newest release on PyPI. Nothing of it is run.

    python -m tests.helpers.newest_release [DISTRIBUTION...] [--python 3.12]

Downloads the newest wheel of each distribution, or reads a wheel that is given as a file, and lists the names that it
no longer has, with the files that import them. The exit status is 1 if there are any. Names that a module makes while
it is imported are not seen; tests/trainer/libraries/ compares those of the installed release.
"""

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.tiers.plugin import ROOT

LIBRARIES = {"megatron-core": "megatron", "transformer-engine-cu13": "transformer_engine", "torch": "torch"}
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")
Places = dict[tuple[str, str], set[str]]  # (module, name in it, or "" for the module itself) -> files that import it


def download(distribution: str, python: str, directory: Path) -> Path:
    """Return the newest wheel of a distribution for Linux and a version of Python."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={python}", *(f"--platform={name}" for name in PLATFORMS), "--dest", str(directory)]
    if subprocess.run([*command, distribution]).returncode:
        sys.exit(f"pip found no wheel of {distribution} for Python {python}; give another --python, or a wheel's file")
    return next(directory.glob(f"{distribution.replace('-', '_')}-*.whl"))


def imported(package: str, below: Path = ROOT / "trainer") -> Places:
    """Return what the files below a directory import from a package."""
    places: Places = defaultdict(set)
    for path in sorted(below.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
                found = [(node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                found = [(alias.name, "") for alias in node.names if alias.name.partition(".")[0] == package]
            else:
                continue
            for name in found:
                places[name].add(str(path.relative_to(below.parent)))
    return places


class Release:
    """The modules of an unpacked wheel."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names: dict[str, set[str] | None] = {}

    def has(self, module: str, name: str) -> bool:
        """Whether the module is there and has the name: a definition, an import or a module of its own."""
        names = self.names_of(module)
        is_module = self._file(f"{module}.{name}") is not None
        return is_module if names is None else not name or name in names or is_module or "__getattr__" in names

    def names_of(self, module: str) -> set[str] | None:
        """Return the names that a module's file binds at its top level; None if there is no such file."""
        if module not in self.names:
            file = self._file(module)
            self.names[module] = None if file is None else set()  # a ring of `import *` ends here
            if file is not None and file.suffix == ".py":
                is_package = file.name == "__init__.py"
                self.names[module] = set(self._bound(ast.parse(file.read_text()).body, module, is_package))
        return self.names[module]

    def _file(self, module: str) -> Path | None:
        base = self.directory.joinpath(*module.split("."))
        found = [base / "__init__.py", base.with_suffix(".py"), *base.parent.glob(f"{base.name}.*.so")]
        return next((path for path in found if path.is_file()), base if base.is_dir() else None)

    def _bound(self, body: list[ast.stmt], module: str, is_package: bool) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    if alias.name == "*":
                        yield from self.names_of(_absolute(node, module, is_package)) or ()
                    else:
                        yield alias.asname or alias.name.partition(".")[0]
            else:
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                yield from (n.id for target in targets if target for n in ast.walk(target) if isinstance(n, ast.Name))
                for field in ("body", "orelse", "finalbody"):
                    yield from self._bound(getattr(node, field, []), module, is_package)
                for handler in getattr(node, "handlers", []):
                    yield from self._bound(handler.body, module, is_package)


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
    return ".".join([*parents, *([node.module] if node.module else [])])


def gone(wheel: Path, places: Places) -> dict[tuple[str, str], set[str]]:
    """Return those of the imported names that a wheel does not have."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder, [name for name in packed.namelist() if name.endswith((".py", ".so"))])
        release = Release(Path(folder))
        return {name: files for name, files in places.items() if not release.has(*name)}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("distributions", nargs="*", default=list(LIBRARIES), help="names, or files of wheels")
    parser.add_argument("--python", default="3.12", help="version of Python that the wheel is for")
    args, has_lost = parser.parse_args(argv), False
    for distribution in args.distributions:
        given = Path(distribution)
        if given.name.split("-")[0].replace("_", "-") not in LIBRARIES and distribution not in LIBRARIES:
            parser.error(f"{distribution} is none of {', '.join(LIBRARIES)}, nor a wheel of one")
        if given.suffix == ".whl" and not given.is_file():
            parser.error(f"{distribution} does not exist")
        with tempfile.TemporaryDirectory() as folder:
            wheel = given if given.suffix == ".whl" else download(distribution, args.python, Path(folder))
            library, version = wheel.name.split("-")[:2]
            places = imported(LIBRARIES[library.replace("_", "-")])
            lost = gone(wheel, places)
        print(f"{library} {version}: {len(places)} names are imported, {len(lost)} of them are gone")
        for (module, name), files in sorted(lost.items()):
            print(f"  {module}{f':{name}' if name else ''}, imported by {', '.join(sorted(files))}")
        has_lost |= bool(lost)
    return int(has_lost)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
