# SPDX-License-Identifier: Apache-2.0
"""Small references with seeded content, shared by the library tests."""

import numpy as np
import pytest
import torch

from rmuscle_core.library import Reference, ReferenceId

FINGERPRINT = {'weights': 'w1', 'images': '64x64'}


def references(count=4, seed=0, task='stack', episode='one', views=('top', 'wrist')):
    random = np.random.default_rng(seed)
    return [Reference(
        id=ReferenceId(task, episode, call), views=views,
        prefix=torch.from_numpy(random.normal(size=(16 * len(views), 24)).astype(np.float32)).bfloat16(),
        token_ids=random.integers(0, 520, 11, dtype=np.int32),
        states=random.normal(size=(min(call + 1, 3), 5)).astype(np.float32),
        key=random.normal(size=(len(views), 24)).astype(np.float32),
        neurons=random.integers(0, 64, (2, 3, 40), dtype=np.uint16),
        chunk=random.normal(size=(6, 5)).astype(np.float32)) for call in range(count)]


def same(one, other):
    """Whether two references are equal in every bit."""
    arrays = all(np.array_equal(getattr(one, name), getattr(other, name))
                 for name in ('token_ids', 'states', 'key', 'neurons', 'chunk'))
    return arrays and torch.equal(one.prefix.view(torch.int16), other.prefix.view(torch.int16)) and (
        one.views == other.views)


@pytest.fixture
def shelf():
    """The helpers above, without an import that depends on the test's place."""
    from types import SimpleNamespace

    return SimpleNamespace(references=references, same=same, fingerprint=FINGERPRINT)
