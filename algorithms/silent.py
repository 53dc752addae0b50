"""Skips the backward pass of micro-batches without a gradient: under most losses those where all completions of a
prompt scored alike."""

import torch
from torch import Tensor, nn

import utils


class TwoStageBackward:
    """Calls the policy for a loss, and takes the loss's gradient back in two stages: first to what the policy returned
    (log-probs, entropy), which is cheap; then, if there is any, through the model.

    The second stage is skipped until some rank has a gradient, so passes that may have none come first. Advantages of 0
    would not be enough to tell: a KL term may still have a gradient. A loss reaches parameters only through what the
    policy returned.
    """

    def __init__(self, policy: nn.Module):
        self.policy, self.skips = policy, True
        self.pairs: list[tuple[Tensor, Tensor]] = []  # (an output of the policy, its values as a leaf)

    def __call__(self, *inputs) -> dict[str, Tensor]:
        returned = self.policy(*inputs)
        leaves = {name: values.detach().requires_grad_(values.requires_grad) for name, values in returned.items()}
        self.pairs.extend((values, leaves[name]) for name, values in returned.items() if values.requires_grad)
        return leaves

    def backward(self, loss: Tensor, last: bool) -> None:
        """`loss.backward()`. The last pass is not skipped: DDP waits for it. All ranks take the same branch, or FSDP's
        collectives would not match; once one has a gradient, they need not ask one another."""
        returned, leaves = zip(*self.pairs, strict=True)
        self.pairs = []
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        if self.skips and not last and not utils.all_max(int(any(bool(gradient.any()) for gradient in gradients))):
            return
        self.skips = False
        torch.autograd.backward(returned, gradients)
