# SPDX-License-Identifier: Apache-2.0
"""Implementations of the one seam: ``ffn(x, mlp, layer, step) -> y``.

x [B, rows, width] is the FFN's input after the norm, mlp the layer's GeGLU; see docs/architecture.md.
"""

from rmuscle_core.ffn.context import ContextFFN
from rmuscle_core.ffn.dense import DenseFFN
from rmuscle_core.ffn.neuron import NeuronFFN
from rmuscle_core.ffn.record import Interrupted, RecordFFN
from rmuscle_core.ffn.residual import ResidualFFN
from rmuscle_core.ffn.score import ScoreFFN

__all__ = ['ContextFFN', 'DenseFFN', 'Interrupted', 'NeuronFFN', 'RecordFFN', 'ResidualFFN', 'ScoreFFN']
