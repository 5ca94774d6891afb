"""An environment's tools over MCP: the same typed routes that it serves as ``POST /<tool>``, declared once.

`McpEndpoint` serves them at ``/mcp`` (streamable HTTP, stateless, JSON responses) to any holder of an attempt's token,
and every call runs in that attempt's session. The ``mcp`` package (extra ``mcp``) is imported when it is needed.
"""
