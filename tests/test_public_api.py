"""The public names, and the direction of imports."""

import ast
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import hf_specdec
from hf_specdec.drafters.registry import registered_drafters

PACKAGE = Path(hf_specdec.__file__).parent

# Folders and modules at the top; each imports only from those before it.
ORDER = [
    "kernels",
    "errors",
    "host",
    "config",
    "stats",
    "device_policy",
    "op_choice",
    "ops",
    "memory",
    "modules",
    "cache",
    "patching",
    "parallel",
    "state",
    "sampling",
    "checkpoints",
    "drafters",
    "training",
    "graphs",
    "auto_k",
    "calls",
    "engine",
    "stock",
    "hosting",
    "auto",
    "integration",
    "loading",
    "prompt_sources",
    "inspection",
    "serving",
    "bench",
    "install",
    "trl",
    "cli",
]


@pytest.mark.core
def test_public_names():
    assert sorted(hf_specdec.__all__) == [
        "AutoDrafter",
        "AwqConfig",
        "Drafter",
        "DrafterConfig",
        "GPTQConfig",
        "Mxfp4Config",
        "NoDrafter",
        "SpeculationStats",
        "SuffixDrafter",
        "install",
        "register_drafter",
        "uninstall",
    ]
    assert all(hasattr(hf_specdec, name) for name in hf_specdec.__all__)


def modules():
    """Paths of our modules by dotted name below the package."""
    paths = [path for path in PACKAGE.rglob("*.py") if "kernels" not in path.relative_to(PACKAGE).parts]
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in paths}


def is_module(name):
    folder = PACKAGE.parent / "kernels" if name.startswith("kernels.") else PACKAGE
    return folder.joinpath(*name.removeprefix("kernels.").split(".")).with_suffix(".py").is_file()


def imported_modules(path, name):
    """Dotted names below the package of the modules that a module imports, also inside functions."""
    tree = ast.parse(path.read_text())
    package = name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "hf_specdec":
                    yield ".".join(alias.name.split(".")[1:])
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - node.level + 1]
            elif node.module.split(".")[0] == "hf_specdec":
                base = []
            else:
                continue
            parts = (node.module or "").split(".") if node.module else []
            parts = base + (parts if node.level else parts[1:])
            for alias in node.names:
                whole = ".".join((*parts, alias.name))
                yield whole if is_module(whole) else ".".join(parts)


def imports_of_ours():
    """Pairs of modules, the second imported by the first, by dotted name below the package."""
    for name, path in modules().items():
        if not name.endswith("__init__"):
            yield from ((name, imported) for imported in imported_modules(path, name) if imported)


def test_packages_import_in_layers():
    seen = 0
    for name, imported in imports_of_ours():
        layer, below = name.split(".")[0], imported.split(".")[0]
        assert layer in ORDER, f"{name} has no place in the order of imports"
        if below == layer:
            continue  # see the next test
        seen += 1
        assert below in ORDER and ORDER.index(below) < ORDER.index(layer), f"{name} imports {imported}"
        assert below != "kernels" or layer == "ops" or imported == "kernels.types", f"{name} imports {imported}"
    assert seen > 100


def test_no_import_cycles():
    """Imports for type checkers count too."""
    below = {}
    for name, imported in imports_of_ours():
        below.setdefault(name, set()).add(imported)
    done = set()

    def visit(name, path):
        assert name not in path, f"a circle of imports: {' -> '.join((*path, name))}"
        if name not in done:
            for imported in below.get(name, ()):
                visit(imported, (*path, name))
            done.add(name)

    for name in below:
        visit(name, ())


def test_importing_kernels_does_not_shadow_another_package():
    """With an `__init__.py` our folder would, from the repository root, be taken for Hugging Face's `kernels`."""
    assert (PACKAGE.parent / "kernels" / "types.py").is_file()
    for folder in (PACKAGE.parent / "kernels", PACKAGE.parent / "tests" / "kernels"):
        assert not (folder / "__init__.py").exists()


def test_kernels_and_references_are_apart():
    """References import no Triton, kernels only references, shared types and each other; every op with a kernel has a
    reference."""
    paths = {f"kernels.{path.stem}": path for path in (PACKAGE.parent / "kernels").glob("*.py")}
    kernels = {name for name, path in paths.items() if "import triton" in path.read_text()}
    for name, path in paths.items():
        ours = set(imported_modules(path, name))
        assert ours <= paths.keys() if name in kernels else not ours & kernels, name
    parts = {"kernels.attention_splits", "kernels.launch", "kernels.low_rank_tile", "kernels.reduction"}  # of kernels
    # Of which the reference is that of another kernel.
    parts |= {"kernels.linear_descriptors", "kernels.linear_stored"}
    assert {f"{name}_reference" for name in kernels - parts} <= paths.keys() - kernels
    assert len(kernels) > 5


@pytest.mark.core
def test_registering_a_drafter():
    from hf_specdec import Drafter, DrafterConfig, register_drafter

    class AnotherConfig(DrafterConfig):
        model_type = "hf_specdec_test_another"

    @register_drafter
    class Another(Drafter):
        config_class = AnotherConfig

    assert registered_drafters()["hf_specdec_test_another"] is Another
    assert register_drafter(Another) is Another
    with pytest.raises(ValueError, match=r"hf_specdec_test_another.*already registered for Another"):
        register_drafter(type("Impostor", (Drafter,), {"config_class": AnotherConfig}))
    with pytest.raises(TypeError, match=r"expected a subclass of hf_specdec\.Drafter"):
        register_drafter(dict)
    with pytest.raises(TypeError, match="expected a subclass of DrafterConfig"):
        register_drafter(type("Nameless", (Drafter,), {"config_class": dict}))


def test_names_in_files_that_need_a_gpu_exist():
    """Of the package, as far as they are imported or attributes of its modules: no machine without a GPU runs them."""
    root, checked = Path(__file__).parent.parent, 0
    for path in [*(root / "tests" / "gpu").glob("*.py"), root / "examples" / "kernel_bandwidth.py"]:
        tree, modules = ast.parse(path.read_text(encoding="utf-8")), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == "hf_specdec":
                for name in node.names:
                    found = pkgutil.resolve_name(f"{node.module}.{name.name}")
                    checked += 1
                    if isinstance(found, ModuleType):
                        modules[name.asname or name.name] = found
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                assert hasattr(modules[node.value.id], node.attr), f"{path}: {ast.unparse(node)}"
    assert checked > 30
