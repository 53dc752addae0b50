"""A real MCP server whose tools misbehave on request.

usage: mcp_server.py                            over stdio
       mcp_server.py PORT [TRANSPORT] [TOKEN]   streamable-http or sse; with a token, it wants that as bearer
"""

import asyncio
import base64
import io
import os
import sys

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
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
    print("these are my last words", file=sys.stderr, flush=True)
    os._exit(1)


def png() -> bytes:
    out = io.BytesIO()
    Picture.new("RGB", (8, 8), "red").save(out, "PNG")
    return out.getvalue()


@server.tool()
def look() -> Image:
    """A red picture."""
    return Image(data=png(), format="png")


@server.tool()
def structured() -> CallToolResult:
    """A result without any text."""
    return CallToolResult(content=[], structured_content={"temperature": 21, "sky": "küstenklar"})


@server.tool()
def everything() -> CallToolResult:
    """Every kind of part that there is."""
    text = TextResourceContents(uri="file:///etc/hosts", mime_type="text/plain", text="127.0.0.1 home")
    binary = BlobResourceContents(
        uri="file:///a.zip", mime_type="application/zip", blob=base64.b64encode(b"12345").decode()
    )
    picture = BlobResourceContents(uri="file:///a.png", mime_type="image/png", blob=base64.b64encode(png()).decode())
    return CallToolResult(
        content=[
            TextContent(text="first"),
            ResourceLink(name="hosts", uri="file:///etc/hosts", mime_type="text/plain", description="the hosts"),
            EmbeddedResource(resource=text),
            EmbeddedResource(resource=binary),
            EmbeddedResource(resource=picture),
            AudioContent(data=base64.b64encode(b"123").decode(), mime_type="audio/wav"),
        ]
    )


def guarded(app, token: str):
    """The app for those who send the bearer token, and 401 for others."""

    from starlette.responses import PlainTextResponse

    async def check(scope, receive, send):
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and headers.get(b"authorization") != f"Bearer {token}".encode():
            await PlainTextResponse("who are you?", 401)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return check


if __name__ == "__main__":
    port, transport, token = (sys.argv[1:] + [None] * 3)[:3]
    if port is None or not port.isdigit():
        server.run("stdio")
    else:
        import uvicorn

        app = server.sse_app() if transport == "sse" else server.streamable_http_app()
        uvicorn.run(guarded(app, token) if token else app, host="127.0.0.1", port=int(port), log_level="error")
