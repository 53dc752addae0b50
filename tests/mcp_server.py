"""A real MCP server whose tools misbehave on request. usage: mcp_server.py [PORT]   (without: over stdio)"""

import asyncio
import io
import os
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from PIL import Image as Picture

server = MCPServer("misbehaving")


@server.tool()
async def echo(text: str, seconds: float = 0.0) -> str:
    """Says it again, after a while."""
    await asyncio.sleep(seconds)
    return f"{text} from {os.getpid()}"


@server.tool()
def fail(text: str) -> str:
    """Raises."""
    raise ToolError(f"cannot {text}")


@server.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.sleep(1000)
    return ""


@server.tool()
def megabyte() -> str:
    """Says a lot."""
    return "x" * 1_000_000


@server.tool()
def die() -> str:
    """Ends the server in the middle of a call."""
    os._exit(1)


@server.tool()
def garbage() -> str:
    """Writes what is no message before its answer."""
    os.write(1, b"{]garbage\xff\xfe\n")
    return "after the garbage"


@server.tool()
def look() -> Image:
    """A red picture."""
    out = io.BytesIO()
    Picture.new("RGB", (8, 8), "red").save(out, "PNG")
    return Image(data=out.getvalue(), format="png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
