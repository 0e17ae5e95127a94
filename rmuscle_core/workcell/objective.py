# SPDX-License-Identifier: Apache-2.0
"""What the policy is trained on: flow matching of action chunks, and saying where things are."""

from __future__ import annotations

import torch
from torch import nn

from rmuscle_core.model import VLA, PrefixCache
from rmuscle_core.model.norms import rms_norm
from rmuscle_core.workcell.training_data import Frames, PromptWriter

STATE_NOISE = 0.05  # of half the training range
STATE_DROPOUT = 0.3  # without it the policy reads the plan's phase off the joints and stops looking
_BRIGHTNESS, _TINT = 0.15, 0.1  # standard deviations, images in [-1, 1]


def dense(x: torch.Tensor, mlp: nn.Module, layer: int, step: int) -> torch.Tensor:
    """The plain FFN; rmuscle_core.ffn would bring in Triton, which a training machine need not have."""
    return mlp(x)


def to_pixels(images: torch.Tensor) -> torch.Tensor:
    """Images uint8 [B,V,S,S,3] to float32 [B,V,3,S,S] in [-1, 1], as the checkpoint's processor does."""
    return images.permute(0, 1, 4, 2, 3).float() / 255.0 * 2.0 - 1.0


def disturb(pixels: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw light and colour anew, alike in all views of a frame; add noise to states or blank them (normalised 0).

    No shift or crop: the cameras are bolted down, and one pixel is a centimetre of table.
    """
    size, device = len(pixels), pixels.device
    gain = 1.0 + _BRIGHTNESS * torch.randn(size, 1, 1, 1, 1, device=device)
    tint = _TINT * torch.randn(size, 1, 3, 1, 1, device=device)
    known = torch.rand(size, 1, device=device) > STATE_DROPOUT
    return (pixels * gain + tint).clamp(-1, 1), (states + STATE_NOISE * torch.randn_like(states)) * known


class Objective(nn.Module):
    """The policy with its training losses.

    ``locators`` read the landmarks' positions off the visual tokens, as they enter and as they leave the prefix; that
    makes the prefix worth attending to long before the action loss would. They are not part of the checkpoint. They
    read each view's maximum over tokens, because a landmark is one token of 64: through the mean, or the maximum over
    all views, it is not found in the hundreds of steps that this takes.
    Padding dimensions of actions are disconnected instead of trained: at inference they carry noise nothing reads.
    """

    def __init__(self, model: VLA, prompts: PromptWriter, landmarks: int):
        super().__init__()
        self.model, self._prompts = model, prompts
        views = len(model.config.cameras)
        self.locators = nn.ModuleList(nn.Linear(views * model.config.prefix.width, landmarks) for _ in range(2))
        self._visual = views, model.config.vision.tokens
        with torch.no_grad():
            model.expert.action_in.weight[:, model.config.action_dim:] = 0
            model.expert.action_out.weight[model.config.action_dim:] = 0

    def look(self, frames: Frames, augment: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Visual tokens [B,T,D] of B frames, and the states [B,A] that go with them."""
        pixels, states = to_pixels(frames.images), frames.states
        if augment:
            pixels, states = disturb(pixels, states)
        return self.model.embed_images(pixels.flatten(0, 1)).unflatten(0, pixels.shape[:2]).flatten(1, 2), states

    def prefill(self, frames: Frames, augment: bool) -> tuple[PrefixCache, torch.Tensor]:
        """Prefix of B frames, and the visual tokens [B,T,D] that entered it."""
        visual, states = self.look(frames, augment)
        prompt = self.model.embed_prompt(self._prompts(states))
        return self.model.prefill(torch.cat([visual, prompt], 1), dense), visual

    def locate(self, cache: PrefixCache, visual: torch.Tensor) -> torch.Tensor:
        """Each locator's estimate of the landmarks from a prefix, standard units, float32 [2,B,D]."""
        ends = visual, cache.hidden[:, :visual.shape[1]]
        return torch.stack([self._estimate(end, tokens) for end, tokens in enumerate(ends)])

    def look_loss(self, frames: Frames) -> torch.Tensor:
        """Mean squared error of the landmarks as they enter the prefix, standard units; costs the vision alone."""
        return (self._estimate(0, self.look(frames, augment=True)[0]) - frames.landmarks).square().mean()

    def losses(self, frames: Frames, repeats: int, augment: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Flow-matching loss, and mean squared error of the landmarks at both ends of the prefix.

        ``repeats`` draws of noise and time share each frame's prefix, the costly part.
        """
        cache, visual = self.prefill(frames, augment)
        seen = (self.locate(cache, visual) - frames.landmarks).square().mean()
        actions = frames.chunks.repeat(repeats, 1, 1)
        noise = torch.randn_like(actions)
        # Beta(1.5, 1) by its inverse distribution function: pi0's preference for the noisy end.
        time = torch.rand(len(actions), device=actions.device) ** (2 / 3) * 0.999 + 0.001
        noisy = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
        velocity = self.model.velocity(cache.repeat(repeats), self._padded(noisy), 0, dense, time=time)
        return (velocity[..., :actions.shape[-1]].float() - (noise - actions)).square().mean(), seen

    def action_error(self, frames: Frames) -> torch.Tensor:
        """Mean absolute error of denoised chunks, normalised units."""
        cache, _ = self.prefill(frames, augment=False)
        actions = self.model.denoise(cache, self._padded(torch.randn_like(frames.chunks)), dense)
        return (actions[..., :frames.chunks.shape[-1]] - frames.chunks).abs().mean()

    def _padded(self, actions: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(actions, (0, self.model.config.padded_dim - actions.shape[-1]))

    def _estimate(self, end: int, tokens: torch.Tensor) -> torch.Tensor:
        tokens = rms_norm(tokens, torch.zeros((), device=tokens.device))
        return self.locators[end](tokens.unflatten(1, self._visual).amax(2).flatten(1)).float()
