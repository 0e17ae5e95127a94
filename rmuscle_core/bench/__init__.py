# SPDX-License-Identifier: Apache-2.0
"""``rmuscle bench``: what a policy call costs, dense and cached, measured side by side."""
