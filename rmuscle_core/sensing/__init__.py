# SPDX-License-Identifier: Apache-2.0
"""From messages of cameras and joints to an Observation, without ROS: live, from a bag, or in a test."""
