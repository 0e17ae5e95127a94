# SPDX-License-Identifier: Apache-2.0
"""Evidence: closed-loop success of every setting, of published alternatives and of controls, at equal seeds."""
