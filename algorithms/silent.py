"""Skips the backward pass of micro-batches without a gradient: under most losses those where all completions of a
prompt scored alike."""

import torch
from torch import Tensor, nn

import utils


class TwoStageBackward:
    """Calls the policy for a loss, and takes the loss's gradient back in two stages: first to what the policy returned
    (log-probs, entropy), which is cheap, then from there through the model."""

    def __init__(self, policy: nn.Module):
        self.policy = policy
        self.pairs: list[tuple[Tensor, Tensor]] = []  # (an output of the policy, its values as a leaf)

    def __call__(self, *inputs) -> list[Tensor]:
        returned = self.policy(*inputs)
        leaves = [values.detach().requires_grad_(values.requires_grad) for values in returned]
        self.pairs.extend(pair for pair in zip(returned, leaves, strict=True) if pair[0].requires_grad)
        return leaves

    def backward(self, loss: Tensor, may_skip: bool) -> bool:
        """Like `loss.backward()`. With may_skip the second stage is left out if the first finds a gradient of 0 on
        all ranks; returns whether it was. Advantages of 0 would not be enough to tell: a KL term may still have a
        gradient. All ranks take the same branch, as FSDP's collectives have to match."""
        returned, leaves = zip(*self.pairs, strict=True)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        if may_skip and not utils.all_max(int(any(bool(gradient.any()) for gradient in gradients))):
            return True
        torch.autograd.backward(returned, gradients)
        return False
