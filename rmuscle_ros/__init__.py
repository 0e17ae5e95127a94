# SPDX-License-Identifier: Apache-2.0
"""ROS 2 side of rMuscle: the only package that imports rclpy."""
