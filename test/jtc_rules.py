# SPDX-License-Identifier: Apache-2.0
"""joint_trajectory_controller's acceptance of a message, rule by rule, in the order of its validate_trajectory_msg.

Written from ros2_controllers' documentation and source, with the parameters of config/jtc_example.yaml: no partial
goals, no velocity at the end. It knows nothing of this project, so it does not share its mistakes.
"""

from __future__ import annotations

EPSILON = 1e-9


def seconds(duration) -> float:
    return duration.sec + duration.nanosec * 1e-9


def rejection(message, joints, now_s=None) -> str:
    """Why a controller of these joints would reject a JointTrajectory; empty if it accepts it. now_s: its clock."""
    if len(message.joint_names) != len(joints):
        return 'Joints on incoming trajectory don\'t match the controller joints.'
    if not message.joint_names:
        return 'Empty joint names on incoming trajectory.'
    if not message.points:
        return 'Empty trajectory received.'
    start = seconds(message.header.stamp)
    if start and now_s is not None and start + seconds(message.points[-1].time_from_start) < now_s:
        return 'Received trajectory with non-zero start time that ends in the past.'
    for name in message.joint_names:
        if name not in joints:
            return f'Incoming joint {name} doesn\'t match the controller\'s joints.'
    if any(abs(velocity) > EPSILON for velocity in message.points[-1].velocities):
        return 'Velocity of last trajectory point is not zero.'
    previous = None
    for i, point in enumerate(message.points):
        due = seconds(point.time_from_start)
        if previous is not None and due <= previous:
            return f'Time between points {i - 1} and {i} is not strictly increasing.'
        previous = due
        for field, optional in (('positions', False), ('velocities', True), ('accelerations', True), ('effort', True)):
            values = getattr(point, field)
            if len(values) != len(joints) and not (optional and not len(values)):
                return f'Mismatch between joint_names size and {field} at point {i}.'
    return ''
