# SPDX-License-Identifier: Apache-2.0
"""``python -m rmuscle_ros.demo``: the simulated cell and the policy node side by side, dense and cached."""
