# SPDX-License-Identifier: Apache-2.0
"""A simulated two-arm workstation: physics, scripted expert, demonstrations, training and closed-loop evaluation."""

import os
import sys
from contextlib import suppress

# MuJoCo chooses its GL backend when it is imported; without a display only off-screen rendering can work.
if sys.platform == 'linux' and not os.environ.get('DISPLAY'):
    os.environ.setdefault('MUJOCO_GL', 'osmesa')

# Mesa's software renderer and Triton each bring their own LLVM. Triton has to come first: imported after MuJoCo has
# loaded Mesa, it crashes the process.
with suppress(ImportError):
    import triton  # noqa: F401
