# SPDX-License-Identifier: Apache-2.0
"""Start the simulated two-arm work cell and, on its clock, the policy node that controls it: both active."""

from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import Node
from launch_ros.substitutions import FindPackageShare

from launch import LaunchDescription

POLICY_ARGUMENTS = ('namespace', 'params_file', 'log_level', 'checkpoint', 'library', 'prompt')


def generate_launch_description():
    """Declare the arguments, start the cell, and pass on what concerns the policy."""
    share = FindPackageShare('rmuscle')
    policy = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(PathJoinSubstitution([share, 'launch', 'rmuscle.launch.py'])),
        launch_arguments={
            **{name: LaunchConfiguration(name) for name in POLICY_ARGUMENTS},
            'use_sim_time': 'true', 'configure': 'true', 'activate': 'true',
        }.items())
    cell = Node(
        package='rmuscle', executable='cell_node', name='cell_node', namespace=LaunchConfiguration('namespace'),
        parameters=[LaunchConfiguration('params_file')], output='both', emulate_tty=True,
        arguments=['--ros-args', '--log-level', LaunchConfiguration('log_level')])
    return LaunchDescription([
        DeclareLaunchArgument('namespace', default_value='', description='namespace of both nodes and their topics'),
        DeclareLaunchArgument('params_file', default_value=PathJoinSubstitution([share, 'config', 'workcell.yaml']),
                              description='YAML parameter file of both nodes'),
        DeclareLaunchArgument('log_level', default_value='info', description='debug, info, warn, error or fatal'),
        DeclareLaunchArgument('checkpoint', default_value='', description='folder of the policy checkpoint'),
        DeclareLaunchArgument('library', default_value='', description='folder of the episode library'),
        DeclareLaunchArgument('prompt', default_value='', description='what the robot is told to do'),
        cell,
        policy,
    ])
