"""The rules of the code: which modules may import which, who may touch the environment, how names and texts begin.

Each test goes through all files and fails with every line that breaks its rule. `make lint` runs these tests too.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.full  # `make lint` runs them always

ROOT = Path(__file__).parents[1]
PACKAGES = ("flows", "stages", "dataset_builders", "trainer")
CONTRACTS = "dataset_builders.contracts"
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# What others may know of the trainer: what it is told and answers, and the numbers of a model directory.
TRAINER_FACE = ("trainer.contract", "trainer.model", "trainer.plan")
# package -> what of ours it may import, beside itself
ALLOWED = {
    "dataset_builders": (),
    "trainer": (
        *(CONTRACTS, "dataset_builders.errors", "dataset_builders.storage"),
        *("dataset_builders.known_version", "dataset_builders.pictures.pixels"),
    ),
    "stages": ("dataset_builders", *TRAINER_FACE),
    "flows": ("stages", "dataset_builders", *TRAINER_FACE),
}
# heavy package -> the modules that may import it
IMPORTERS = {
    "prefect": ("flows.",),
    "distributed": ("flows.pipeline.dask_pool",),
    "dask": ("flows.pipeline.dask_pool",),
    "mlflow": (
        *("flows.tracking.store", "flows.tracking.publish", "flows.tracking.parts"),
        *("flows.tracking.run_writer", "flows.tracking.registry", "flows.tracking.system"),
        "flows.service.mlflow_app",  # the server's own process
        "stages.release.mlflow_model",  # copied into a release, never imported here
    ),
    "megatron": ("trainer.",),
    "transformer_engine": ("trainer.layers.modules.engine",),
    "transformer_engine_torch": ("trainer.layers.modules.engine",),
    "transformers": ("stages.",),
    "webdataset": ("dataset_builders.contracts.shard_io",),
    "PIL": (
        *("dataset_builders.pictures.images", "dataset_builders.pictures.pixels"),
        *("stages.shared.chat_format.images", "stages.contamination.second_look"),
        # run where there is no athanor
        *("stages.release.mlflow_model", "stages.verify.loaders", "stages.answer.vllm_process"),
    ),
    "simplejpeg": ("dataset_builders.pictures.images",),
    "av": ("dataset_builders.videos.decode", "dataset_builders.videos.decode_process"),
}
# The modules that may use private parts of libraries, or replace parts; each checks the version of its library.
PRIVATE_PARTS = ("flows.libraries", "flows.service.mlflow_app", "trainer.libraries", "trainer.layers.modules.engine")
PUBLIC_DESPITE_THEIR_NAMES = {"_asdict", "_exit", "_fields", "_make", "_replace"}
NO_MEGATRON = (*TRAINER_FACE, "trainer.data", "trainer.loop.metrics")
RANK_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
RANK_READERS = (
    *("trainer.parallel.mesh", "stages.answer.worker"),  # processes that torchrun starts: ranks of a training, workers
    "stages.verify.loaders",  # one process of a job does the work
    "stages.shared.launchers.torchrun",  # sets torchrun's variables for a process that needs no torchrun
)
# Modules that may change the process's own environment: for settings that a library reads at its import, or on request.
ENVIRONMENT_WRITERS = (
    *("flows", "flows.cli.main", "flows.service.access", "flows.pipeline.temporary_server", "flows.tracking"),
    "flows.cli.chat",  # where Gradio keeps uploaded images, and no analytics
    "trainer.layers.modules.choice",  # where FlashAttention 4 keeps compiled kernels
)
CHILD_ENVIRONMENT_WRITERS = (
    "stages.shared.launchers.torchrun",
    "stages.shared.launchers.slurm",
    "flows.pipeline.processes",
    *("stages.shared.launchers.vllm", "stages.answer.vllm_engine", "stages.verify.loaders"),  # what vLLM reads
)
VAGUE = {"utils", "util", "base", "common", "helpers", "misc", "core", "types", "interfaces"}

STANDARD = sys.stdlib_module_names


def name_of(path: Path) -> str:
    """Return the module name of a path: trainer/loop/__init__.py -> trainer.loop."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def imports_of(nodes: Iterable[ast.AST], module: str, is_package: bool) -> Iterator[str]:
    """Return the dotted names of all imports, also inside functions. `from a import b` gives a.b too."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") if is_package else module.split(".")[:-1]
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def is_within(name: str, prefix: str) -> bool:
    return name == prefix.rstrip(".") or name.startswith(prefix.rstrip(".") + ".")


@cache
def imports(path: Path) -> tuple[str, ...]:
    return tuple(imports_of(nodes_of(path), name_of(path), path.name == "__init__.py"))


def at(path: Path, line: int = 1) -> str:
    """Return a position in the form trainer/loop/train.py:12."""
    return f"{path.relative_to(ROOT)}:{line}"


def fail_with(offences: Iterable[str]) -> None:
    """Fail with all offences, one per line."""
    found = list(offences)
    assert not found, "\n" + "\n".join(found)


def test_the_checks_see_what_they_look_for():
    code = "import a.b\nfrom . import c\nfrom ..d import e\ndef f():\n    from g import h\n"
    found = set(imports_of(ast.walk(ast.parse(code)), "top.inner.module", False))
    assert {"a.b", "top.inner.c", "top.d.e", "g.h"} <= found
    writes = "os.environ['A'] = '1'\nos.environ.setdefault('A', '1')\ndel os.environ['A']\nos.putenv('A', '1')\n"
    assert list(environment_writes(ast.walk(ast.parse(writes + "x = os.environ.get('A')")))) == [1, 3, 2, 4]
    assert is_within("stages.shared.launchers.job", "stages.") and not is_within("stages_other", "stages")


def test_the_modules_of_the_four_packages_are_checked():
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {*PACKAGES, "tests"}
    assert {name_of(path).split(".")[0] for path in MODULES} == set(PACKAGES)
    assert len(MODULES) > 40


def may_import(package: str, imported: str) -> bool:
    """Whether a module of one of athanor's packages may import a name."""
    top = imported.split(".")[0]
    if top not in PACKAGES or top == package:
        return top not in ("tests", "infra")
    # `import a.b.c` also yields the packages above c, whose own code imports nothing.
    return any(is_within(imported, prefix) or is_within(prefix, imported) for prefix in ALLOWED[package])


def test_imports_point_down():
    fail_with(
        f"{at(path)}: {name_of(path)} imports {imported}; {package} may import {ALLOWED[package]}"
        for path in MODULES
        for package in [name_of(path).split(".")[0]]
        for imported in imports(path)
        if not may_import(package, imported)
    )


FOLDERS = sorted({path.parent for path in MODULES})


def folder_imports() -> dict[str, set[str]]:
    """Return folder -> other folders whose files it imports, all as dotted names."""
    modules = {name_of(path): name_of(path.parent / "__init__.py") for path in MODULES}
    found: dict[str, set[str]] = {}
    for path in MODULES:
        here = modules[name_of(path)]
        for imported in imports(path):
            # `from a.b import c` also yields the package a.b, where c may be a module of it.
            is_package = imported in modules and modules[imported] == imported
            if imported in modules and not is_package and modules[imported] != here:
                found.setdefault(here, set()).add(modules[imported])
    return found


@cache
def names_in(path: Path) -> frozenset[str]:
    """Return every name that a module binds, at whatever depth."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return frozenset(names)


def test_an_imported_name_is_there():
    """Benches and tests for a GPU are not run with the others, so a renamed function would leave them behind."""
    ours = {name_of(path): path for path in [*MODULES, *TESTS, *(ROOT / "infra").rglob("*.py")]}
    fail_with(
        f"{at(path, node.lineno)}: {node.module} has no {alias.name}"
        for path in ours.values()
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and node.module in ours
        for alias in node.names
        if f"{node.module}.{alias.name}" not in ours and alias.name not in names_in(ours[node.module])
    )


def test_no_ring_of_folders():
    """Remove folders that import nothing of the rest, until none is left. Two that import each other are a ring."""
    left = {folder: set(others) for folder, others in folder_imports().items()}
    while free := [folder for folder in left if not left[folder] & left.keys()]:
        for folder in free:
            del left[folder]
    assert not left, left


# Of the folders of each line, each may import those before it and no later one, also inside a function. A process that
# is started by the name of its module (`python -m`, `uvicorn --factory`) is no import: the temporary server of
# flows/pipeline is the application of flows/service.
FLOORS = (
    ("trainer.model", "trainer.layers", "trainer.parts", "trainer.families"),
    ("flows.libraries", "flows.tracking", "flows.pipeline", "flows.service", "flows.cli"),
)


@pytest.mark.parametrize("floors", FLOORS, ids=["trainer", "flows"])
def test_a_floor_imports_only_those_below(floors):
    """A folder below trainer/layers that imports one part makes no ring, and so escapes the tests of rings."""
    fail_with(
        f"{at(path)}: {name_of(path)} imports {imported}; it may import {floors[:floor]} alone"
        for floor, folder in enumerate(floors)
        for path in MODULES
        if is_within(name_of(path), folder)
        for imported in imports(path)
        if any(is_within(imported, above) for above in floors[floor + 1 :])
    )


def test_the_rooms_of_flows_are_the_floors():
    folders = {name_of(path.parent / "__init__.py") for path in MODULES if is_within(name_of(path), "flows")}
    assert folders == {"flows", *FLOORS[1]}


def importer_offences(path: Path) -> Iterator[str]:
    name = name_of(path)
    for imported in imports(path):
        places = IMPORTERS.get(imported.split(".")[0])
        if places is not None and not any(is_within(name, place) for place in places):
            yield f"{at(path)}: {name} imports {imported}; only {places} may"
        is_gpu_package = imported.split(".")[0] in ("megatron", "transformer_engine")
        if is_gpu_package and any(is_within(name, place) for place in NO_MEGATRON):
            yield f"{at(path)}: {name} imports {imported}"


def test_a_heavy_package_has_its_one_importer():
    fail_with(offence for path in MODULES for offence in importer_offences(path))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_DESPITE_THEIR_NAMES


@cache
def own_names() -> set[str]:
    """Return the names that our packages define, and the attributes that they set."""
    nodes = [node for path in MODULES for node in nodes_of(path)]
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    stored = [n for n in nodes if isinstance(n, ast.Name | ast.Attribute) and isinstance(n.ctx, ast.Store)]
    variables = {node.id for node in stored if isinstance(node, ast.Name)}
    own = {n.attr for n in stored if isinstance(n, ast.Attribute) and ast.unparse(n.value) in ("self", "cls")}
    return defined | variables | own


def private_offences(path: Path) -> Iterator[str]:
    foreign = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] not in (*PACKAGES, *STANDARD):
            names = [alias.name for alias in node.names]
            private = [name for name in (*node.module.split("."), *names) if is_private(name)]
            yield from (f"{at(path, node.lineno)}: imports {name} of {node.module}" for name in private)
            foreign |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            foreign |= {alias.asname or alias.name.split(".")[0] for alias in node.names} - STANDARD
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own_names():
            yield f"{at(path, node.lineno)}: uses {ast.unparse(node)}"
    for node in nodes_of(path):
        is_stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_stored and ast.unparse(node).split(".")[0] in foreign:
            yield f"{at(path, node.lineno)}: replaces {ast.unparse(node)}"


def test_private_parts_of_libraries_are_used_in_their_one_file():
    homes = [path for path in MODULES if any(is_within(name_of(path), home) for home in PRIVATE_PARTS)]
    fail_with(offence for path in MODULES if path not in homes for offence in private_offences(path))
    assert len([offence for path in homes for offence in private_offences(path)]) > 20


LIGHT_PLACES = (CONTRACTS, "dataset_builders.errors", "dataset_builders.storage")
LIGHT = [
    path
    for path in MODULES
    if path.stem != "shard_io" and any(is_within(name_of(path), place) for place in LIGHT_PLACES)
]


FACE = [path for path in MODULES if any(is_within(name_of(path), face) for face in TRAINER_FACE)]
HEAVY = {"torch", "prefect", "mlflow", "transformers"}


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (f"import importlib; [importlib.import_module(n) for n in {[*map(name_of, LIGHT + FACE)]}]", {"megatron"}),
        ("import flows.cli.main; flows.cli.main.make_parser()", {"pyarrow"}),
    ],
    ids=["contracts", "--help"],
)
def test_nothing_heavy_is_loaded_by(code, heavy):
    code += f"\nimport sys; print(*{HEAVY | heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == ""


def test_only_distributed_reads_the_rank():
    fail_with(
        f"{at(path, node.lineno)}: only {RANK_READERS} read {sorted(RANK_NAMES)}"
        for path in MODULES
        if name_of(path) not in RANK_READERS
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and node.value in RANK_NAMES
    )


def environment_writes(nodes: Iterable[ast.AST]) -> Iterator[int]:
    """Return the lines that change os.environ."""
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            if any("os.environ" in ast.unparse(target) for target in targets):
                yield node.lineno
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            changing = ("setdefault", "update", "pop", "clear", "__setitem__")
            if called in {"os.putenv", "os.unsetenv", *(f"os.environ.{name}" for name in changing)}:
                yield node.lineno


def test_who_writes_the_environment():
    fail_with(
        f"{at(path, line)}: {name_of(path)} writes os.environ"
        for path in MODULES
        if name_of(path) not in ENVIRONMENT_WRITERS
        for line in environment_writes(nodes_of(path))
    )


def test_only_the_launcher_gives_a_child_its_environment():
    fail_with(
        f"{at(path, node.lineno)}: env= for a child"
        for path in MODULES
        if name_of(path) not in CHILD_ENVIRONMENT_WRITERS
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and any(keyword.arg == "env" for keyword in node.keywords)
    )


def test_module_names_say_what_is_inside():
    # A file that is run as a script would shadow it. A folder such as stages/tokenize shadows nothing.
    shadows = [f"{at(path)}: has the name of a standard module" for path in MODULES if path.stem in STANDARD]
    stems = {path: path.parent.name if path.stem in ("__init__", "__main__") else path.stem for path in MODULES}
    fail_with(shadows + [f"{at(path)}: a name says what is inside" for path, stem in stems.items() if stem in VAGUE])


def test_no_sys_path():
    fail_with(
        f"{at(path, node.lineno)}: sys.path"
        for path in (*MODULES, *TESTS)
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr == "path" and ast.unparse(node.value) == "sys"
    )


def test_ascii_only():
    fail_with(
        f"{at(path, number)}: not ASCII; write it as an escape"
        for path in (*MODULES, *TESTS)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not line.isascii()
    )


def test_every_module_says_what_it_is():
    fail_with(
        f"{at(path)}: has no docstring"
        for path in MODULES
        if not ast.get_docstring(tree_of(path))
        if path.name != "__init__.py" or path.read_text().strip()
    )


def test_no_page_is_written_by_hand():
    fail_with(
        f"{at(path)}: {', '.join(tags)}; HTML lies in stages/shared/pages/templates"
        for path in MODULES
        if "stages" in path.relative_to(ROOT).parts
        if (tags := re.findall(r"</(?:a|b|div|h\d|p|pre|section|span|table|td|tr)>", path.read_text(encoding="utf-8")))
    )


def stage_offences(path: Path) -> Iterator[str]:
    names = [ast.unparse(node.targets[0]) for node in tree_of(path).body if isinstance(node, ast.Assign)]
    if "VERSION" not in names:
        yield f"{at(path)}: a stage has its VERSION"
    package, _, module = name_of(path).rpartition(".")
    if not re.search(rf"from {package} import .*\b{module}\b", (ROOT / "flows" / "pipeline" / "steps.py").read_text()):
        yield f"{at(path)}: flows/pipeline/steps.py does not know this stage"


def test_a_stage_has_its_version_and_the_flows_know_it():
    stages = [path for path in MODULES if is_within(name_of(path), "stages") and "STAGE = Stage(" in path.read_text()]
    assert len(stages) > 10
    fail_with(offence for path in stages for offence in stage_offences(path))


def test_the_trainers_command_line_is_one_file():
    code = "from trainer.__main__ import parse_args\nprint(parse_args(['run.json']))\n"
    code += "for arguments in (['run.json', '--lr', '1e-5'], ['run.json', 'other.json'], []):\n"
    code += "    try: parse_args(arguments)\n    except SystemExit as error: print(error.code)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["run.json", "2", "2", "2"]
    assert done.stderr.count("unrecognized arguments") == 2
    assert "the following arguments are required: run_json" in done.stderr


# A docstring that begins so is no sentence, or leaves its subject to the reader.
HARD_BEGINNINGS = re.compile(r"(Of|As|What|To be|The same|So many)\b")


def test_a_docstring_begins_with_what_it_describes():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    fail_with(
        f"{at(path, getattr(node, 'lineno', 1))}: docstring begins with {found[0]!r}; see English in CONTRIBUTING.md"
        for path in (*MODULES, *TESTS)
        for node in nodes_of(path)
        if isinstance(node, documented) and (found := HARD_BEGINNINGS.match(ast.get_docstring(node) or ""))
    )
