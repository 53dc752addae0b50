"""The backward pass that a micro-batch can do without: where all completions of a prompt scored alike, most losses have
no gradient."""

import torch
from torch import Tensor, nn

import utils


class TwoStageBackward:
    """Calls the policy for a loss, and takes the loss's gradient back through it, in two stages: first by what the
    policy returned (log-probs, entropy), which is cheap, then from there through the model."""

    def __init__(self, policy: nn.Module):
        self.policy = policy
        self.pairs: list[tuple[Tensor, Tensor]] = []  # what it returned, and leaves of the same values for the loss

    def __call__(self, *inputs) -> list[Tensor]:
        returned = self.policy(*inputs)
        leaves = [values.detach().requires_grad_(values.requires_grad) for values in returned]
        self.pairs.extend(pair for pair in zip(returned, leaves, strict=True) if pair[0].requires_grad)
        return leaves

    def backward(self, loss: Tensor, may_skip: bool) -> bool:
        """`loss.backward()`; with may_skip without the second stage, if the first finds a gradient of 0 on all
        ranks. This is not concluded from advantages of 0: a KL term may have one all the same. All ranks take the same
        branch, or FSDP's collectives would not match. Returns whether it was skipped."""
        returned, leaves = zip(*self.pairs, strict=True)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        if may_skip and not utils.all_max(int(any(bool(gradient.any()) for gradient in gradients))):
            return True
        torch.autograd.backward(returned, gradients)
        return False
