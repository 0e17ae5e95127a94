# SPDX-License-Identifier: Apache-2.0
"""Episodes as people have them (LeRobot datasets, ROS bags, our recordings), read as what a policy would have seen."""
