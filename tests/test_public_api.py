"""The public names, and the direction of imports."""

import ast
from pathlib import Path

import pytest

import hf_specdec
from hf_specdec.drafters.base import registered_drafters

PACKAGE = Path(hf_specdec.__file__).parent

# A module imports only from those before it.
ORDER = [
    "kernels",
    "config",
    "stats",
    "patching",
    "prompts",
    "ops",
    "ranks",
    "fusing",
    "logits",
    "sampling",
    "cache",
    "attention",
    "experts",
    "continuation",
    "taps",
    "hosting",
    "pieces",
    "fingerprint",
    "graphs",
    "peers",
    "sessions",
    "drafters",
    "soundness",
    "state",
    "transcript",
    "decoding",
    "candidates",
    "integration",
    "selfcheck",
    "inspection",
    "bench",
    "cli",
]


@pytest.mark.core
def test_public_names():
    assert sorted(hf_specdec.__all__) == [
        "AutoDrafter",
        "Drafter",
        "DrafterConfig",
        "SpeculationStats",
        "install",
        "register_drafter",
        "uninstall",
    ]
    assert all(hasattr(hf_specdec, name) for name in hf_specdec.__all__)


def modules():
    """Paths of our modules by dotted name below the package."""
    paths = [path for path in PACKAGE.rglob("*.py") if "kernels" not in path.relative_to(PACKAGE).parts]
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in paths}


def is_type_checking(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported_modules(path, name):
    """Dotted names below the package of what a module imports when it runs, also inside functions."""
    tree = ast.parse(path.read_text())
    exempt = {id(child) for node in ast.walk(tree) if is_type_checking(node) for child in ast.walk(node)}
    package = name.split(".")[:-1]
    for node in ast.walk(tree):
        if id(node) in exempt:
            continue
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
            if parts:
                yield ".".join(parts)
            else:
                yield from (alias.name for alias in node.names)


@pytest.mark.core
def test_imports_go_downward():
    found = modules()
    assert {"config", "decoding", "drafters.base", "integration"} <= set(found)
    seen = 0
    for name, path in found.items():
        layer = name.split(".")[0]
        if layer in ("__init__", "__main__"):
            continue
        assert layer in ORDER, f"{name} has no place in the order of imports"
        for imported in imported_modules(path, name):
            below = imported.split(".")[0]
            if below == layer:
                continue  # a package's modules among themselves
            seen += 1
            assert below in ORDER and ORDER.index(below) < ORDER.index(layer), f"{name} imports {imported}"
            assert below != "kernels" or layer == "ops", f"{name} imports {imported}; only ops may"
    assert seen > 20


@pytest.mark.core
def test_importing_kernels_does_not_shadow_another_package():
    """With an `__init__.py` our folder would, from the repository root, be taken for Hugging Face's `kernels`."""
    assert (PACKAGE / "kernels" / "reference.py").is_file()
    for folder in (PACKAGE / "kernels", PACKAGE.parent / "kernels", PACKAGE.parent / "tests" / "kernels"):
        assert not (folder / "__init__.py").exists()


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
