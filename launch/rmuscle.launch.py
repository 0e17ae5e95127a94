# SPDX-License-Identifier: Apache-2.0
"""Start the policy node; by default it loads and warms up its policy and then waits, inactive.

``activate:=true`` makes it move the robot as soon as it is configured. Tuning belongs into the parameter file; an
argument left empty keeps what the file says.
"""

from launch.actions import DeclareLaunchArgument, EmitEvent, OpaqueFunction, RegisterEventHandler
from launch.conditions import IfCondition
from launch.event_handlers import OnProcessStart
from launch.events import matches_action
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare
from lifecycle_msgs.msg import Transition

from launch import LaunchDescription

KEPT_WHEN_EMPTY = ('checkpoint', 'library', 'prompt')


def generate_launch_description():
    """Declare the arguments and start the node with them."""
    default_parameters = PathJoinSubstitution([FindPackageShare('rmuscle'), 'config', 'default.yaml'])
    return LaunchDescription([
        DeclareLaunchArgument('namespace', default_value='', description='namespace of the node and its topics'),
        DeclareLaunchArgument('params_file', default_value=default_parameters, description='YAML parameter file'),
        DeclareLaunchArgument('use_sim_time', default_value='false', choices=['true', 'false'],
                              description='take the time from /clock'),
        DeclareLaunchArgument('log_level', default_value='info', description='debug, info, warn, error or fatal'),
        DeclareLaunchArgument('checkpoint', default_value='', description='folder of the policy checkpoint'),
        DeclareLaunchArgument('library', default_value='', description='folder of the episode library'),
        DeclareLaunchArgument('prompt', default_value='', description='what the robot is told to do'),
        DeclareLaunchArgument('trajectory_topic', default_value='joint_trajectory',
                              description='where the controller listens, as /arm_controller/joint_trajectory'),
        DeclareLaunchArgument('configure', default_value='true', choices=['true', 'false'],
                              description='load and warm up the policy at start'),
        DeclareLaunchArgument('activate', default_value='false', choices=['true', 'false'],
                              description='activate after the first successful configure: the robot may move'),
        DeclareLaunchArgument('respawn', default_value='false', choices=['true', 'false'],
                              description='start the node again when it dies; it then stays inactive'),
        OpaqueFunction(function=_policy_node),
    ])


def _policy_node(context):
    given = {name: LaunchConfiguration(name).perform(context) for name in KEPT_WHEN_EMPTY}
    parameters = {name: ParameterValue(value, value_type=str) for name, value in given.items() if value}
    parameters['use_sim_time'] = ParameterValue(LaunchConfiguration('use_sim_time'), value_type=bool)
    node = LifecycleNode(
        package='rmuscle', executable='policy_node', name='policy_node', namespace=LaunchConfiguration('namespace'),
        parameters=[LaunchConfiguration('params_file'), parameters], output='both', emulate_tty=True,
        remappings=[('joint_trajectory', LaunchConfiguration('trajectory_topic'))],
        arguments=['--ros-args', '--log-level', LaunchConfiguration('log_level')],
        respawn=LaunchConfiguration('respawn').perform(context) == 'true', respawn_delay=2.0)

    def change_state(transition):
        return EmitEvent(event=ChangeState(lifecycle_node_matcher=matches_action(node), transition_id=transition))

    configure_at_start = RegisterEventHandler(
        OnProcessStart(target_action=node, on_start=[change_state(Transition.TRANSITION_CONFIGURE)]),
        condition=IfCondition(LaunchConfiguration('configure')))
    # Once only: an operator who cleans up and configures by hand, or a respawn, must not set the robot moving.
    activate_once = RegisterEventHandler(
        OnStateTransition(target_lifecycle_node=node, start_state='configuring', goal_state='inactive',
                          entities=[change_state(Transition.TRANSITION_ACTIVATE)], handle_once=True),
        condition=IfCondition(LaunchConfiguration('activate')))
    return [activate_once, configure_at_start, node]  # the handlers first: the node's first event is for them
