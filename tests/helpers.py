"""What tests of several packages need."""

import subprocess
import sys

import torch


def weights(agent):
    """A copy of all of a policy's parameters, as one vector on the CPU."""
    return torch.nn.utils.parameters_to_vector(agent.policy.parameters()).detach().cpu().clone()


def output_of(code):
    """What a new Python process prints that runs some code."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
