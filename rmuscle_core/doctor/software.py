# SPDX-License-Identifier: Apache-2.0
"""Versions, and what ROS needs."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from rmuscle_core.doctor.finding import FAIL, OK, WARN, Finding, Host

PYTHON = ((3, 10), (3, 13))
# package -> (least version, first one not tried); as in setup.py
SUPPORTED = {'torch': ((2, 11), None), 'triton': ((3, 6), (3, 10)), 'transformers': ((4, 57), None),
             'numpy': ((1, 26), None), 'h5py': ((3, 10), None), 'safetensors': ((0, 4, 3), None)}
NEEDED = ('torch', 'numpy', 'h5py', 'safetensors', 'transformers')


def versions(host: Host) -> Iterator[Finding]:
    """Python and the packages whose versions matter."""
    fits = PYTHON[0] <= sys.version_info[:2] < PYTHON[1]
    yield Finding(OK if fits else WARN, 'python', f'{platform.python_version()} on {platform.machine()}',
                  '' if fits else 'tested with 3.10 to 3.12')
    for package, (least, beyond) in SUPPORTED.items():
        try:
            text = version(package)
        except PackageNotFoundError:
            level = FAIL if package in NEEDED else WARN
            yield Finding(level, package, 'not installed', f"pip install '{package}>={'.'.join(map(str, least))}'")
            continue
        number = tuple(int(part) for part in re.findall(r'\d+', text.partition('+')[0])[:3])
        if number < least:
            yield Finding(FAIL, package, text, f"pip install --upgrade '{package}>={'.'.join(map(str, least))}'")
        elif beyond and number >= beyond:
            yield Finding(WARN, package, f'{text} is newer than what was tried', 'if kernels fail, take an older one')
        else:
            yield Finding(OK, package, text)


def has_ros() -> bool:
    """Whether rclpy can be imported."""
    return find_spec('rclpy') is not None


def ros(host: Host) -> Iterator[Finding]:
    """What the policy node needs beside rclpy."""
    if not host.ros:
        yield Finding(OK, 'ROS', 'rclpy cannot be imported here; the core needs none')
        return
    distribution = host.environ.get('ROS_DISTRO')
    middleware = host.environ.get('RMW_IMPLEMENTATION', 'the default middleware')
    yield Finding(OK, 'ROS', f'{distribution or "wheels, no distribution sourced"}, {middleware}')
    if find_spec('rmuscle') is None:
        yield Finding(FAIL, 'messages', 'rmuscle.msg cannot be imported: the node will not start',
                      'colcon build, then source install/setup.bash')
    else:
        yield Finding(OK, 'messages', 'rmuscle.msg is built')
    domain = host.environ.get('ROS_DOMAIN_ID', '0')
    if not domain.isdigit() or int(domain) > 101:
        yield Finding(WARN, 'ROS domain', f'ROS_DOMAIN_ID is {domain!r}; above 101 its ports meet those that '
                      'Linux gives out', 'export ROS_DOMAIN_ID=<0 to 101>')
    else:
        yield Finding(OK, 'ROS domain', domain)
