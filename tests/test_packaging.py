"""A wheel built from the tree works outside it, and the tree does not shadow the `kernels` package."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_wheel_works_outside_the_tree(tmp_path):
    tree = tmp_path / "tree"  # building writes into the tree
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info", "model_cards", "runs")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, tree]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        # An import of one that it lacks may find that of the tree. The folder kernels/ takes the place of its finder.
        modules = {str(one.relative_to(tree)) for one in (tree / "hf_specdec").rglob("*.py")}
        assert modules - {*archive.namelist()} == {"hf_specdec/kernels/__init__.py"}
    program = (
        "import hf_specdec, hf_specdec.kernels.types, hf_specdec.kernels.attention, hf_specdec.kernels.kv_cache;"
        "import hf_specdec.kernels.round_state, hf_specdec.drafters.eagle3, hf_specdec.cli;"
        "print(hf_specdec.__file__, hf_specdec.kernels.types.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert all(path.startswith(str(tmp_path)) for path in out.stdout.split())


def test_kernels_folder_does_not_shadow_the_kernels_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "tests" / "kernels").exists()
    assert not (ROOT / "hf_specdec" / "kernels").is_symlink()
