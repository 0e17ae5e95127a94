# SPDX-License-Identifier: Apache-2.0
"""Offline validation: recorded executions through the policy, dense and cached side by side, and one report."""
