"""A real MCP server over stdio whose tools misbehave on request, for the fault campaign."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent

server = MCPServer("odd")


@server.tool()
def echo() -> str:
    """Answers."""
    return "answered"


@server.tool()
def die() -> str:
    """Ends the server in the middle of a call."""
    os._exit(1)


@server.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.sleep(1000)
    return ""


@server.tool()
def garbage() -> str:
    """Writes what is no message before its answer."""
    os.write(1, b"{]garbage\xff\xfe\n" + b"x" * 10000 + b"\n")
    return "after the garbage"


@server.tool()
def flood() -> str:
    """Writes a lot to standard error."""
    for _ in range(500):
        sys.stderr.write("chatter " * 12500 + "\n")
    return "after the flood"


@server.tool()
def megabytes() -> str:
    """Says a lot."""
    return "x" * 20_000_000


@server.tool()
def environment() -> str:
    """Whether it can see the trainer's keys."""
    return "HAS KEYS" if any(value.startswith("canary") for value in os.environ.values()) else "none"


@server.tool()
def picture(path: str) -> ImageContent:
    """Gives a path where an image's data belong."""
    return ImageContent(type="image", data=path, mime_type="image/png")


if __name__ == "__main__":
    server.run("stdio")
