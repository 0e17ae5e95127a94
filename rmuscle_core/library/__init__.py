# SPDX-License-Identifier: Apache-2.0
"""Compact references on disk: one directory per library, one never-changing file per episode."""

from rmuscle_core.library.fingerprint import fingerprint
from rmuscle_core.library.index import LibraryIndex
from rmuscle_core.library.library import EpisodeLibrary
from rmuscle_core.library.reference import Reference, ReferenceId

__all__ = ['EpisodeLibrary', 'LibraryIndex', 'Reference', 'ReferenceId', 'fingerprint']
