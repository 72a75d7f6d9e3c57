"""The house keeps its order: imports run one way, importing does nothing, names are documented, files stay small."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import zipccl_core

ROOT = Path(__file__).parent.parent
PACKAGES = ("zipccl_core", "zipccl_deepspeed", "zipccl_accelerate")
FLOORS = [
    "errors",
    "registry",
    "kernels",
    "codec",
    "strategy",
    "config",
    "observe",
    "collective",
    "calls",
    "communicator",
    "compilation",
    "drop_in",
    "arguments",
    "process_group",
    "groups",
    "hooks",
    "testing",
]


def module_imports(path: Path) -> set[str]:
    """Modules that a file imports at module level, not under TYPE_CHECKING."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


@pytest.mark.parametrize(
    "path", sorted((ROOT / "zipccl_core").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_imports_of_the_core(path: Path) -> None:
    parts = path.relative_to(ROOT / "zipccl_core").with_suffix("").parts
    for name in module_imports(path):
        assert name.split(".")[0] not in {
            "deepspeed",
            "accelerate",
            "transformers",
            "pycuda",
            "zipccl_deepspeed",
            "zipccl_accelerate",
        }
        if name.startswith("zipccl_core.") and parts[0] in FLOORS:
            target = name.split(".")[1]
            if target in FLOORS:
                assert FLOORS.index(target) <= FLOORS.index(parts[0]), f"{path.name} imports {name}, which is above it"


def test_files_do_one_thing() -> None:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 400, f"{path} has grown long"


def test_public_names() -> None:
    assert zipccl_core.__all__ == sorted(
        zipccl_core.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )
    for name in zipccl_core.__all__:
        public = getattr(zipccl_core, name)
        assert name == "NATIVE" or public.__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        zipccl_core.nonsense  # noqa: B018


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)


def python(code: str, **environ: str) -> str:
    process = run_python(code, **environ)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_importing_the_core_imports_no_framework_and_starts_nothing() -> None:
    code = (
        "import sys, threading, zipccl_core; from zipccl_core import ZipCCLConfig, Communicator, ZipCCLProcessGroup;"
        "frameworks = {'deepspeed', 'accelerate', 'transformers', 'pycuda'};"
        "print(sorted(frameworks & set(sys.modules)), threading.active_count())"
    )
    assert python(code) == "[] 1"


AUTOLOAD = "import zipccl_core._autoload as a, zipccl_deepspeed._autoload as b; a.autoload(); b.autoload()"


def test_autoload_is_light_and_knows_the_backend() -> None:
    known = "'zipccl' in torch.distributed.Backend.backend_list"
    code = f"import sys, torch; {AUTOLOAD}; print('pydantic' in sys.modules, {known})"
    assert python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False True"


@pytest.mark.parametrize(
    "order", ["import torch; {a}; import deepspeed", "import deepspeed; {a}", "import torch, deepspeed; {a}"]
)
def test_autoload_installs_into_deepspeed(order: str) -> None:
    pytest.importorskip("deepspeed")
    code = (
        order.format(a=AUTOLOAD)
        + "; import deepspeed.comm.comm as c, zipccl_deepspeed as z; print(c.TorchBackend.__mro__[1].__name__)"
    )
    assert python(code).splitlines()[-1] == "ZipCCLBackendMixin"


def test_autoload_never_breaks_torch() -> None:
    broken = "import torch, torch.distributed as d; d.Backend.register_backend = None"
    code = f"{broken}; {AUTOLOAD}; print(torch.ones(2).sum().item())"
    assert python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "2.0"


def test_autoload_never_breaks_deepspeed() -> None:
    """A DeepSpeed that ZipCCL does not know goes on without it, and somebody is told."""
    pytest.importorskip("deepspeed")
    broken = "import zipccl_deepspeed.installation as i; i._Installation = lambda: {}.unknown"
    code = f"import torch; {broken}; {AUTOLOAD}; import deepspeed; print(deepspeed.__version__)"
    process = run_python(code)
    assert process.returncode == 0
    assert "zipccl supports deepspeed 0.19" in process.stderr
    assert "goes on without it" in process.stderr


def test_the_repository_stands_alone() -> None:
    """No paths of the machine that it was written on, and none out of the tree."""
    pattern = re.compile("|".join(map(re.escape, {str(ROOT), f"{Path.home()}/", "../" + "shared"})))
    files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.split()
    for name in files:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".c", ".h", ".json", ".csv"} and path != Path(__file__):
            assert not pattern.search(path.read_text()), f"{name} names a path of somebody's machine"
