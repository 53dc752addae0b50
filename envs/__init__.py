"""What a model talks to between its turns: environments, games, tools, MCP servers."""

from envs.base import Environment, ToolEnvironment  # noqa: F401 - what files of users import
from envs.games import FrozenLake, Sokoban  # noqa: F401
