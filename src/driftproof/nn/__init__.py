"""Networks of the agent: recurrent cores, value heads and policies, without training state."""
