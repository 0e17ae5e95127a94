# SPDX-License-Identifier: Apache-2.0
"""``rmuscle doctor``: what on this machine keeps a policy from running, or from running fast, and the way out."""
