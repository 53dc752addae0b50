"""What a model talks to between its turns: environments, tools, MCP servers."""

from envs.base import Environment, ToolEnvironment  # noqa: F401 - what files of users import
