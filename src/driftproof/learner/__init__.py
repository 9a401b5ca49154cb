"""How PPO learns from rollouts: advantages, losses, controllers and optimizer steps, without environments."""
