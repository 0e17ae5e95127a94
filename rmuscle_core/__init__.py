# SPDX-License-Identifier: Apache-2.0
"""rMuscle: muscle memory for vision-language-action policies (no ROS in here)."""

__version__ = '0.1.0'
