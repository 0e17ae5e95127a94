# SPDX-License-Identifier: Apache-2.0
"""A cell's cameras, rendered from a light-weight copy of the physics model.

Software rendering is bound by vertices, shadows and multisampling, not by pixels. The copy has the same bodies, joints
and cameras, coarser meshes and no shadows, and takes only joint positions: three 64-pixel views in a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mujoco
import numpy as np

TABLE = 'table'  # geom whose colour varies
_OFF = [int(getattr(mujoco.mjtRndFlag, f'mjRND_{name}')) for name in ('SHADOW', 'REFLECTION', 'SKYBOX', 'HAZE')]


def decimate(vertices: np.ndarray, faces: np.ndarray, cell: float) -> tuple[np.ndarray, np.ndarray]:
    """Merge the vertices that share a cube of edge ``cell``; return what is left as (vertices [n,3], faces [m,3])."""
    _, first, cluster = np.unique(np.floor(vertices / cell).astype(np.int64), axis=0, return_index=True,
                                  return_inverse=True)
    merged = cluster.ravel()[faces]
    a, b, c = merged.T
    merged = merged[(a != b) & (b != c) & (a != c)]
    _, unique = np.unique(np.sort(merged, axis=1), axis=0, return_index=True)
    return vertices[first], merged[unique]


@dataclass(frozen=True)
class View:
    """What a scene looks like.

    file: MuJoCo XML. cameras: names, in the policy's order. table_shade: darkest and brightest the table is drawn.
    edit: adds cameras to the specification, or turns those it has; names the geom TABLE if the file does not.
    """

    file: str
    cameras: tuple[str, ...]
    table_shade: tuple[float, float]
    edit: Callable[[mujoco.MjSpec], None]


def light_model(view: View, pixels: int, coarseness: float = 0.07, keep_below: int = 200) -> mujoco.MjModel:
    """Compile the scene with every mesh of ``keep_below`` faces or more clustered to ``coarseness`` of its extent."""
    full, spec = mujoco.MjModel.from_xml_path(view.file), mujoco.MjSpec.from_file(view.file)
    view.edit(spec)
    for body in spec.bodies:
        if body.name != 'world':  # nothing moves by force here, and thin meshes have no valid inertia
            body.explicitinertial, body.mass, body.inertia, body.ipos = 1, 1.0, [1, 1, 1], [0, 0, 0]
    for mesh in list(spec.meshes):
        index = full.mesh(mesh.name).id
        start, count = full.mesh_faceadr[index], full.mesh_facenum[index]
        if count < keep_below:
            continue
        faces = full.mesh_face[start:start + count]
        start, count = full.mesh_vertadr[index], full.mesh_vertnum[index]
        # the compiler centres and turns a mesh; the copy must be given the file's own frame again
        turn = np.zeros(9)
        mujoco.mju_quat2Mat(turn, full.mesh_quat[index])
        vertices = full.mesh_vert[start:start + count] @ turn.reshape(3, 3).T + full.mesh_pos[index]
        vertices, faces = decimate(vertices, faces, np.ptp(vertices, axis=0).max() * coarseness)
        coarse = spec.add_mesh(name=f'{mesh.name}_coarse', inertia=mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL,
                               uservert=vertices.astype(np.float32).ravel(), userface=faces.astype(np.int32).ravel())
        for geom in spec.geoms:
            if geom.meshname == mesh.name:
                geom.meshname = coarse.name
    model = spec.compile()
    model.vis.global_.offwidth = model.vis.global_.offheight = pixels
    model.vis.quality.offsamples = 0
    return model


class Scene:
    """Cameras of a cell; lights and table colour are drawn anew by ``relight``."""

    def __init__(self, view: View, pixels: int = 64):
        self._view, self._model = view, light_model(view, pixels)
        self._data = mujoco.MjData(self._model)
        self._renderer = mujoco.Renderer(self._model, pixels, pixels)
        head = self._model.vis.headlight
        self._nominal = self._model.light_diffuse.copy(), head.ambient.copy(), head.diffuse.copy()
        self._table = self._model.geom(TABLE).id

    def relight(self, generator: np.random.Generator) -> None:
        """Draw brightness and tint of the lamps, ambient light and table colour."""
        diffuse, ambient, head = self._nominal
        draw = generator.uniform
        self._model.light_diffuse[:] = np.clip(diffuse * draw(0.6, 1.5) * draw(0.8, 1.2, 3), 0, 1)
        self._model.vis.headlight.ambient[:] = ambient * draw(0.7, 1.3)
        self._model.vis.headlight.diffuse[:] = head * draw(0.7, 1.3)
        self._model.geom_rgba[self._table, :3] = np.clip(draw(*self._view.table_shade) * draw(0.8, 1.2, 3), 0, 1)

    def render(self, positions: np.ndarray, **marks: np.ndarray) -> dict[str, np.ndarray]:
        """Return {camera: uint8 [pixels, pixels, 3]} for the generalised positions of the physics model.

        marks: site -> where it is in its body, metres [3].
        """
        self._data.qpos[:] = positions
        for site, position in marks.items():
            self._model.site(site).pos = position
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        return {camera: self._picture(camera) for camera in self._view.cameras}

    def _picture(self, camera: str) -> np.ndarray:
        self._renderer.update_scene(self._data, camera)
        self._renderer.scene.flags[_OFF] = 0
        return self._renderer.render().copy()

    def close(self) -> None:
        """Free the GL context (otherwise it complains when the interpreter ends)."""
        self._renderer.close()
