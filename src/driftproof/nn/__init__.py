"""Networks of the agent: recurrent cores, value heads, policies. Pure modules: no training state."""
