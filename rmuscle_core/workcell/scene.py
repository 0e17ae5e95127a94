# SPDX-License-Identifier: Apache-2.0
"""The cell's cameras, rendered from a light-weight copy of the physics model.

Software rendering is bound by vertices, shadows and multisampling, not by pixels. The copy has the same bodies, joints
and cameras, coarser meshes and no shadows, and takes only joint positions: three 64-pixel views in a few milliseconds.
"""

from __future__ import annotations

import mujoco
import numpy as np
from gym_aloha.constants import ASSETS_DIR

SCENE_FILE = str(ASSETS_DIR / 'bimanual_viperx_transfer_cube.xml')
CAMERAS = ('top', 'left_wrist', 'right_wrist')
TOP_FIELD_OF_VIEW = 50.0  # degrees; the benchmark's 78 shows mostly floor at 64 pixels
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


def light_model(pixels: int, coarseness: float = 0.07, keep_below: int = 200) -> mujoco.MjModel:
    """Compile the scene with every mesh of ``keep_below`` faces or more clustered to ``coarseness`` of its extent."""
    full, spec = mujoco.MjModel.from_xml_path(SCENE_FILE), mujoco.MjSpec.from_file(SCENE_FILE)
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
    model.cam_fovy[model.camera('top').id] = TOP_FIELD_OF_VIEW
    return model


class Scene:
    """Cameras of the cell; lights and table colour are drawn anew by ``relight``."""

    def __init__(self, pixels: int = 64):
        self._model = light_model(pixels)
        self._data = mujoco.MjData(self._model)
        self._renderer = mujoco.Renderer(self._model, pixels, pixels)
        head = self._model.vis.headlight
        self._nominal = self._model.light_diffuse.copy(), head.ambient.copy(), head.diffuse.copy()
        self._table = self._model.geom('table').id

    def relight(self, generator: np.random.Generator) -> None:
        """Draw brightness and tint of the lamps, ambient light and table colour."""
        diffuse, ambient, head = self._nominal
        draw = generator.uniform
        self._model.light_diffuse[:] = np.clip(diffuse * draw(0.6, 1.5) * draw(0.8, 1.2, 3), 0, 1)
        self._model.vis.headlight.ambient[:] = ambient * draw(0.7, 1.3)
        self._model.vis.headlight.diffuse[:] = head * draw(0.7, 1.3)
        self._model.geom_rgba[self._table, :3] = np.clip(draw(0.1, 0.45) * draw(0.8, 1.2, 3), 0, 1)

    def render(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return {camera: uint8 [pixels, pixels, 3]} for the generalised positions of the physics model."""
        self._data.qpos[:] = positions
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_comPos(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        return {camera: self._view(camera) for camera in CAMERAS}

    def _view(self, camera: str) -> np.ndarray:
        self._renderer.update_scene(self._data, camera)
        self._renderer.scene.flags[_OFF] = 0
        return self._renderer.render().copy()

    def close(self) -> None:
        """Free the GL context (otherwise it complains when the interpreter ends)."""
        self._renderer.close()
