"""Environments, tools and MCP servers, which answer a model between its turns."""

from envs.base import Environment, ToolEnvironment  # noqa: F401 - what files of users import
