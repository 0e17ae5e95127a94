# SPDX-License-Identifier: Apache-2.0
"""How the tensors of a policy call are computed: eagerly, or as captured CUDA graphs; both behind the same methods."""
