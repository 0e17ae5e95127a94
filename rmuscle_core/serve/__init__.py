# SPDX-License-Identifier: Apache-2.0
"""A policy behind a websocket, in the protocol of openpi's clients (docs/serving.md)."""
