"""Configurations: reading, validation, and building environments, agents and populations from them."""

from driftproof._requirements import require

require("driftproof.config", "cli", "gymnasium", "pydantic", "stable_baselines3", "yaml")

from driftproof.config.build import AgentMaker, build_agent, build_env, build_population, check, try_env
from driftproof.config.files import ConfigError, dumps, load, loads, read_text
from driftproof.config.migration import Migrated, migrate
from driftproof.config.model import Config
from driftproof.config.reference import commented_yaml, json_schema

__all__ = [
    "AgentMaker",
    "Config",
    "ConfigError",
    "Migrated",
    "build_agent",
    "build_env",
    "build_population",
    "check",
    "commented_yaml",
    "dumps",
    "json_schema",
    "load",
    "loads",
    "migrate",
    "read_text",
    "try_env",
]
