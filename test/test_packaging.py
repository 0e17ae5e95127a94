# SPDX-License-Identifier: Apache-2.0
"""What pip, colcon and CI read agrees with what is in the tree."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import rmuscle_core

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ('rmuscle_core', 'rmuscle_ros', 'kernels')
MODULES_OF = {'opencv-python-headless': 'cv2', 'PyYAML': 'yaml', 'nvidia-ml-py': 'pynvml', 'gym-aloha': 'gym_aloha',
              'dm-control': 'dm_control', 'pillow': 'PIL'}
# measured beside ours, or run as a second task, where a user has them; their own limits exclude our versions
PEERS = {'lerobot', 'flash_rt', 'metaworld'}
PACKAGE_XML = ElementTree.parse(ROOT / 'package.xml').getroot()
CMAKE = (ROOT / 'CMakeLists.txt').read_text()
SOURCES = sorted(path for folder in (*PACKAGES, 'launch', 'test') for path in (ROOT / folder).rglob('*.py'))


@pytest.fixture(scope='module')
def metadata(tmp_path_factory):
    """The folder of metadata that setup.py makes."""
    folder = tmp_path_factory.mktemp('metadata')
    subprocess.run([sys.executable, 'setup.py', '-q', 'egg_info', '--egg-base', str(folder)], cwd=ROOT, check=True)
    return folder / 'rmuscle.egg-info'


@pytest.fixture(scope='module')
def requirements(metadata):
    """What setup.py asks for, extras included: name -> Requirement."""
    lines = (metadata / 'requires.txt').read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith('[')]
    return {requirement.name: requirement for requirement in found}


def pins():
    for line in (ROOT / 'requirements.txt').read_text().splitlines():
        if line.partition('#')[0].strip():
            yield Requirement(line.partition('#')[0])


def test_one_version_everywhere(metadata):
    version = rmuscle_core.__version__
    assert f'\nVersion: {version}\n' in (metadata / 'PKG-INFO').read_text()
    assert PACKAGE_XML.findtext('version') == version
    assert re.search(r'^Forthcoming\n-+\n', (ROOT / 'CHANGELOG.rst').read_text(), re.M)
    assert re.search(rf'^{re.escape(version)}\n-+\n', (ROOT / 'CHANGELOG.rst').read_text(), re.M)


def test_the_pinned_versions_are_inside_the_supported_ranges(requirements):
    pinned = list(pins())
    assert {r.name for r in pinned} >= set(requirements), 'tests would run on versions nobody chose'
    for pin in pinned:
        wanted = requirements.get(pin.name)
        exact = [s.version for s in pin.specifier if s.operator == '==']
        if wanted and exact:
            assert exact[0] in wanted.specifier, f'{pin} is outside {wanted}'


def test_every_import_is_declared(requirements):
    ros = {e.text for e in PACKAGE_XML if e.tag in ('depend', 'exec_depend') and not e.text.startswith('python3-')}
    known = {*sys.stdlib_module_names, *ros, *PEERS, 'rmuscle', 'rmuscle_core', 'rmuscle_ros', 'rmuscle_kernels',
             *(MODULES_OF.get(name, name) for name in requirements)}
    undeclared = {}
    for path in (p for p in SOURCES if p.relative_to(ROOT).parts[0] in (*PACKAGES, 'launch')):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            undeclared |= {name: str(path.relative_to(ROOT)) for name in names if name.partition('.')[0] not in known}
    assert not undeclared, 'add these to setup.py or package.xml'


def test_every_package_folder_is_shipped(metadata):
    shipped = (metadata / 'SOURCES.txt').read_text().split()
    for package in PACKAGES:
        for path in (ROOT / package).rglob('*.py'):
            assert str(path.relative_to(ROOT)) in shipped, f'{path.parent.relative_to(ROOT)} lacks an __init__.py'


def test_the_command_line_starts_at_an_existing_function(metadata):
    entries = ConfigParser()
    entries.read(metadata / 'entry_points.txt')
    module, _, function = entries['console_scripts']['rmuscle'].partition(':')
    assert callable(getattr(__import__(module, fromlist=[function]), function))


def test_cmake_builds_every_message_and_package():
    for message in (ROOT / 'msg').iterdir():
        assert f'"msg/{message.name}"' in CMAKE
    installed = re.findall(r'ament_python_install_package\((\w+)(?: PACKAGE_DIR (\w+))?\)', CMAKE)
    assert {folder or name for name, folder in installed} == set(PACKAGES)
    assert 'rmuscle' not in {name for name, _ in installed}, 'that module name belongs to the messages'


@pytest.mark.parametrize('script', sorted(p.name for p in (ROOT / 'rmuscle_ros/scripts').iterdir() if p.is_file()))
def test_each_node_is_installed_and_starts_an_existing_function(script):
    path = ROOT / 'rmuscle_ros' / 'scripts' / script
    assert f'rmuscle_ros/scripts/{script}' in CMAKE and os.access(path, os.X_OK)
    module = next(n.module for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom))
    source = ROOT / (module.replace('.', '/') + '.py')
    assert 'main' in {n.name for n in ast.parse(source.read_text()).body if isinstance(n, ast.FunctionDef)}


def test_the_messages_parse_without_ros():
    rosbags = pytest.importorskip('rosbags.typesys', reason='needs the extra "bags"')
    for message in (ROOT / 'msg').iterdir():
        name = f'rmuscle/msg/{message.stem}'
        assert name in rosbags.get_types_from_msg(message.read_text(), name)


@pytest.mark.skipif(find_spec('rmuscle') is None, reason='the messages are not built here; scripts/test builds them')
def test_the_messages_keep_what_they_are_given():
    from rclpy.serialization import deserialize_message, serialize_message

    from rmuscle.msg import ActionChunk, CacheStatus
    chunk = ActionChunk(joint_names=['a', 'b'], dt=0.04, horizon=2, execute_steps=1, actions=[1.0, 2.0, 3.0, 4.0],
                        reference='pick/0001#3', path='library', call=2**40)
    status = CacheStatus(mode='full', path='library', stages=['prefill'], stage_ms=[1.5], working_set_bytes=2**35,
                         similarity=0.5, slots=12, call=2**40)
    for message in (chunk, status):
        assert deserialize_message(serialize_message(message), type(message)) == message


@pytest.mark.skipif(find_spec('rmuscle') is None, reason='the package is not built here; scripts/test builds it')
def test_launch_files_and_configuration_are_installed():
    from ament_index_python.packages import get_package_prefix, get_package_share_directory
    share = Path(get_package_share_directory('rmuscle'))
    for folder in ('launch', 'config'):
        wanted = {p.name for p in (ROOT / folder).iterdir() if p.is_file()}
        assert wanted <= {p.name for p in (share / folder).iterdir()}
    programs = Path(get_package_prefix('rmuscle')) / 'lib' / 'rmuscle'
    assert {'policy_node', 'cell_node'} <= {p.name for p in programs.iterdir() if os.access(p, os.X_OK)}


@pytest.mark.parametrize('path', sorted((ROOT / 'config').glob('*.yaml')), ids=lambda path: path.name)
def test_configuration_is_of_ros_shape(path):
    for node, content in yaml.safe_load(path.read_text()).items():
        assert set(content) == {'ros__parameters'}, node


@pytest.mark.parametrize('script', ['scripts/setup_env.sh', 'scripts/run', 'scripts/test', 'scripts/demo', '.ci/run'])
def test_scripts_parse_and_can_be_run(script):
    subprocess.run(['bash', '-n', ROOT / script], check=True)
    assert script.endswith('.sh') or os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize('path', SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sources_carry_their_licence_and_stay_small(path):
    lines = path.read_text().splitlines()
    assert lines[0] == '# SPDX-License-Identifier: Apache-2.0'
    assert len(lines) <= 350, 'split it: a file is read in one sitting'


@pytest.mark.skipif(shutil.which('ruff') is None, reason='needs ruff')
def test_ruff_finds_nothing():
    done = subprocess.run(['ruff', 'check', '--output-format', 'concise', str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
