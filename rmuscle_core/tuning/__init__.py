# SPDX-License-Identifier: Apache-2.0
"""Choose token_ratio, neuron_ratio and window from recorded executions, under a stated error budget."""
