# SPDX-License-Identifier: Apache-2.0
"""For installing without ROS: the same packages that CMakeLists.txt installs, less the messages."""

from setuptools import find_packages, setup

kernels = ['rmuscle_kernels', *(f'rmuscle_kernels.{name}' for name in find_packages('kernels'))]
gpu = ['triton>=3.6', 'nvidia-ml-py>=12']
workcell = ['gym-aloha>=0.1.5', 'matplotlib>=3.9', 'dm-control>=1.0.41', 'mujoco>=3.8.1,<3.9']
bags = ['rosbags>=0.11.9']
lerobot = ['av>=12.3', 'pyarrow>=16.1']
serve = ['msgpack>=1.0.5', 'websockets>=13']

setup(
    name='rmuscle',
    version='0.1.0',
    description='Muscle memory for vision-language-action policies on ROS 2',
    license='Apache-2.0',
    python_requires='>=3.10',
    packages=find_packages(include=['rmuscle_core*', 'rmuscle_ros*']) + kernels,
    package_dir={'rmuscle_kernels': 'kernels'},
    data_files=[('share/rmuscle/config/openpi',
                 [f'config/openpi/{name}.yaml' for name in ('aloha', 'droid', 'libero')])],
    # rmuscle_ros needs rclpy and the message packages too; those belong to the ROS installation, not to pip.
    install_requires=[
        'h5py>=3.10',
        'huggingface_hub>=0.34',
        'numpy>=1.26',
        'opencv-python-headless>=4.8',
        'pillow>=10.1',
        'PyYAML>=6.0',
        'rich>=13',
        'safetensors>=0.4.3',
        'sentencepiece>=0.2',
        'tokenizers>=0.20',
        'torch>=2.11',
        'transformers>=4.57',
    ],
    extras_require={
        'gpu': gpu,
        'workcell': workcell,
        'bags': bags,
        'lerobot': lerobot,
        'serve': serve,
        'test': [*gpu, *workcell, *bags, *lerobot, *serve, 'hypothesis>=6.100', 'pytest>=8', 'ruff>=0.15'],
    },
    entry_points={'console_scripts': ['rmuscle = rmuscle_core.cli:main']},
)
