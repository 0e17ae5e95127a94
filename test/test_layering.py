# SPDX-License-Identifier: Apache-2.0
"""Imports go only inward (docs/architecture.md, "Rooms"), and the folder names get in nobody's way."""

from __future__ import annotations

import ast
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SIMULATOR = {'gym_aloha', 'dm_control', 'mujoco'}
ROS = {element.text for element in ElementTree.parse(ROOT / 'package.xml').iter()
       if element.tag in ('depend', 'exec_depend') and not element.text.startswith('python3-')}
ROS |= {'message_filters', 'rmuscle'}


def imports(path: Path) -> set[str]:
    """Return the modules a source file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module)
    return found


def sources(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob('*.py'))
    assert found, f'{folder} holds no sources: this test would pass for nothing'
    return found


def packages(path: Path) -> set[str]:
    return {name.partition('.')[0] for name in imports(path)}


def offenders(folder: str, is_wrong) -> dict[str, set[str]]:
    wrong = {str(path.relative_to(ROOT)): is_wrong(path) for path in sources(folder)}
    return {name: names for name, names in wrong.items() if names}


def test_kernels_know_only_torch_and_triton():
    allowed = {'torch', 'triton', 'numpy', 'rmuscle_kernels', *sys.stdlib_module_names}
    assert not offenders('kernels', lambda path: packages(path) - allowed)


def test_the_core_knows_no_ros():
    assert not offenders('rmuscle_core', lambda path: packages(path) & {*ROS, 'rmuscle_ros'})


def test_only_the_work_cell_knows_the_simulator():
    def wrong(path):
        if {'workcell', 'evaluation'} & set(path.parts):  # closed-loop evaluation is run in the cells
            return set()
        return {name for name in imports(path)
                if name.partition('.')[0] in SIMULATOR or name.startswith('rmuscle_core.workcell')}
    assert not offenders('rmuscle_core', wrong)


def test_nobody_imports_the_kernels_by_their_folder_name():
    for folder in ('kernels', 'rmuscle_core', 'rmuscle_ros', 'test'):
        assert not offenders(folder, lambda path: packages(path) & {'kernels'})


def python(code: str, cwd: Path) -> None:
    """Run code in a fresh interpreter; its standard error is the test's message when it fails."""
    done = subprocess.run([sys.executable, '-c', code], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


CORE_WITHOUT_ROS = """
import importlib, pkgutil, sys

class NoRos:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {ros}:
            raise ImportError(name + ' is blocked in this test')

sys.meta_path.insert(0, NoRos())
import rmuscle_core
modules = [m.name for m in pkgutil.walk_packages(rmuscle_core.__path__, 'rmuscle_core.')]
assert len(modules) > 5, modules
for name in modules:
    if not name.startswith('rmuscle_core.workcell'):
        importlib.import_module(name)
"""


def test_the_whole_core_imports_where_there_is_no_ros(tmp_path):
    python(CORE_WITHOUT_ROS.format(ros=sorted({*ROS, 'rmuscle_ros'})), cwd=tmp_path)


def test_transformers_works_beside_a_folder_called_kernels():
    # transformers probes for a package `kernels`, and the current folder comes first on the path
    python('import importlib.util, transformers\n'
           'assert importlib.util.find_spec("kernels"), "no folder was in the way"\n'
           'from transformers import PaliGemmaForConditionalGeneration, SiglipVisionModel', cwd=ROOT)


def test_the_kernels_package_costs_nothing_to_probe():
    python('import sys, kernels; assert not {"torch", "triton"} & set(sys.modules)', cwd=ROOT)
