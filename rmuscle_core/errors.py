# SPDX-License-Identifier: Apache-2.0
"""What rMuscle raises on bad input: one sentence with expected, found, where, and the next step."""


LONGEST = 1500  # characters; a longer text quotes its input instead of describing it


class RMuscleError(Exception):
    """Base of every refusal; its text is fit to be shown to an operator as it is: one line, whatever it quotes."""

    def __init__(self, text: str = '') -> None:
        line = ' '.join(str(text).split())
        super().__init__(line if len(line) <= LONGEST else f'{line[:LONGEST // 2]} [...] {line[-LONGEST // 4:]}')


class CheckpointError(RMuscleError):
    """The checkpoint directory cannot be used (missing, foreign, incomplete)."""


class ObservationError(RMuscleError):
    """An observation does not fit the policy (camera, joint, size, encoding)."""


class LibraryError(RMuscleError):
    """The episode library cannot be used as a whole (foreign fingerprint, unreadable index)."""


class EpisodeError(LibraryError):
    """One episode file is unusable; the others still are."""


class SettingsError(RMuscleError):
    """A setting has the wrong type or lies outside its range."""


class DeviceError(RMuscleError):
    """The device failed and takes every further call in this process with it: only a new process helps."""
