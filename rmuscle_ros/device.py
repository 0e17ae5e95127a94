# SPDX-License-Identifier: Apache-2.0
"""What /diagnostics says of the device that computes: memory, temperature, clock, and captures at the wrong time."""

from __future__ import annotations

from typing import Any

from diagnostic_msgs.msg import DiagnosticStatus

from rmuscle_ros.diagnostics import OK, WARN, entry


class DeviceDiagnostics:
    """One entry; ``name`` is the product's, the hardware id of every entry of the node.

    policy: its ``engine`` says where it computes and what it captured; one without computes on the host.
    """

    def __init__(self, policy: Any):
        import torch  # not before there is a policy: it takes seconds, and a node should answer at once

        from rmuscle_core.doctor.sensors import HOT_C, Sensors
        self._engine = getattr(policy, 'engine', None)
        self._sensors = Sensors(getattr(self._engine, 'device', torch.device('cpu')))
        self.name, self._hot_c = self._sensors.name, HOT_C
        self.activated()

    def activated(self) -> None:
        """From here on nothing should be captured any more: a call that captures takes seconds."""
        self._captured = self._captures

    @property
    def _captures(self) -> int:
        return getattr(self._engine, 'captures', 0)

    def entry(self) -> DiagnosticStatus:
        """WARN: it is slower than it could be."""
        values, late = self._sensors.read(), self._captures - self._captured
        level, message = OK, 'fine'
        if late:
            level, message = WARN, (f'{late} graphs captured since activation, each held up a call; prompts or ratios '
                                    'change, ~/reset_episode prepares for the present ones')
        if values.get('slowed'):
            level, message = WARN, 'its clock is lowered for heat or power'
        if values.get('temperature_c', 0) > self._hot_c:
            level, message = WARN, f'{values["temperature_c"]:.0f} degrees Celsius'
        return entry('device', level, message, {**values, 'captures_after_activation': late}, self.name)
